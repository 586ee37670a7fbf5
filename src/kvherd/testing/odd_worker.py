"""A worker on HTTP in a process of its own that does to a completion what a test says.

    python -m kvherd.testing.odd_worker PORT MOOD

It says that it is well and serves the model `m`. The moods, at a POST:

    well            answers, as a stream if it is asked for one
    well-once       … and closes the connection
    well-later      … half a second later
    hang            reads the request and never answers
    stand-still     the whole process stops (SIGSTOP), as one does that is out of memory or in a debugger
    die             the process is killed (SIGKILL) before it answers
    die-in-head     … in the middle of the head of its answer
    die-in-body     … after the first event of a stream
    reset           the connection is reset before an answer
    reset-in-body   … after the first event of a stream
    half-close      it ends its half of the connection without an answer, and goes on reading
    half-close-in-body  … after the first event of a stream
"""

import json
import os
import signal
import socket
import socketserver
import struct
import sys
import threading
import time
from contextlib import suppress

MOODS = (
    "well",
    "well-once",
    "well-later",
    "hang",
    "stand-still",
    "die",
    "die-in-head",
    "die-in-body",
    "reset",
    "reset-in-body",
    "half-close",
    "half-close-in-body",
)
_EVENT = b'data: {"choices":[{"index":0,"text":"well"}]}\n\n'
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class OddWorker(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, port: int, mood: str) -> None:
        super().__init__(("127.0.0.1", port), _Connection)
        self.mood = mood


class _Connection(socketserver.StreamRequestHandler):
    server: OddWorker
    connection: socket.socket

    def handle(self) -> None:
        with suppress(OSError):
            while head := self._head():
                body = self.rfile.read(int(head.get("content-length", "0")))
                if head[""].startswith("POST "):
                    if not self._post(json.loads(body)):
                        return
                else:
                    self._get(head[""].split()[1])

    def _head(self) -> dict[str, str]:
        """The request's line under no name, and its headers; empty at the end of the connection."""
        lines: list[str] = []
        while (line := self.rfile.readline().decode("latin-1").strip()) or not lines:
            if not line:
                return {}
            lines.append(line)
        return {"": lines[0]} | {
            name.lower(): value.strip() for name, _, value in (one.partition(":") for one in lines[1:])
        }

    def _get(self, path: str) -> None:
        if path == "/v1/models":
            self._json("200 OK", {"object": "list", "data": [{"id": "m", "object": "model"}]})
        elif path == "/health":
            self._json("200 OK", {})
        else:
            self._json("404 Not Found", {"error": {"message": "there is no such thing"}})

    def _post(self, asked: dict[str, object]) -> bool:
        """Whether the connection goes on."""
        mood, _, in_body = self.server.mood.partition("-in-")
        if in_body == "body":
            self.wfile.write(_STREAM + _chunk(_EVENT))
        elif in_body == "head":
            self.wfile.write(_STREAM[:40])
        match mood:
            case "well" | "well-once" | "well-later":
                time.sleep(0.5 * (mood == "well-later"))
                self._answer(streams=bool(asked.get("stream")))
                return mood != "well-once"
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stand-still":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.rfile.close()
                self.wfile.close()
                self.connection.close()  # no descriptor is left: with linger 0 that is a reset
                return False
            case "half-close":
                self.connection.shutdown(socket.SHUT_WR)
            case _:
                pass
        while self.rfile.read(1):
            pass
        return False

    def _answer(self, *, streams: bool) -> None:
        if streams:
            self.wfile.write(_STREAM + _chunk(_EVENT) + _chunk(b"data: [DONE]\n\n") + _chunk(b""))
        else:
            self._json("200 OK", {"object": "text_completion", "choices": [{"index": 0, "text": "well"}]})

    def _json(self, status: str, value: object) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.wfile.write(head.encode() + body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def main(port: int, mood: str) -> None:
    with OddWorker(port, mood) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print("listening", flush=True)  # noqa: T201 - its starter waits for that
        signal.sigwait([signal.SIGTERM])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
