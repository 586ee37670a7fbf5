"""Two engines in one process for `gateway.py`: they answer at once, or stream an event a tick, and cost little.

    python bench/_engine.py [--tick-ms 20] [--events CHATS.json]

Prints its ports as JSON: `http`, and with `--events` also `live` and `replay`, where each publishes its KV events as
vLLM does. `CHATS.json` says, per conversation, the tokens that are cached and how many a whole prompt has. Each engine
holds the known part of every conversation; for each answer it stores a block more, and removes an old one. To a tick
belong all its streams, as to an engine's step.
"""

import argparse
import json
import os
import random
import select
import socket
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import zmq

JSON_TAIL = b'"system_fingerprint":"bench"}'
STAMP = b'"stamp":'
STAMP_DIGITS = 16
BLOCK = 16
ENGINES = 2
EVENT_TICK_S = 0.01
HELD_BLOCKS = 2000
_ROOM = memoryview(bytearray(262_144))  # a new buffer of this size a read would cost more than the read
_MODELS = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm","max_model_len":32768}]}'
_CACHE = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="100000",engine="0"} 1.0\n'
_SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"logprobs":null,"finish_reason":null}],' + STAMP + b"%016d}\n\n"
)
_EVENT_BYTES = len(_EVENT % 0)
_CHUNK = b"%x\r\n" % _EVENT_BYTES + _EVENT + b"\r\n"
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
assert len(b"data: [DONE]\n\n") == 0xE


def plain(body: bytes, status: bytes = b"200 OK", kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, kind, len(body), body)


GETS = {
    b"/v1/models": plain(_MODELS),
    b"/version": plain(b'{"version":"0.32.0"}'),
    b"/metrics": plain(_CACHE, kind=b"text/plain; version=0.0.4"),
    b"/health": plain(b""),
    b"/health_generate": plain(b""),
    b"/liveness": plain(b""),
    b"/get_model_info": plain(b'{"model_path":"m","is_generation":true}'),
    b"/get_server_info": plain(b'{"model_path":"m","served_model_name":"m"}'),
    b"/get_load": plain(b'[{"num_reqs":0,"num_tokens":0}]'),
}
NOT_FOUND = plain(b'{"error":{"message":"no such route"}}', b"404 Not Found")


def answer(prompt_tokens: int, cached_tokens: int) -> bytes:
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 3,
        "total_tokens": prompt_tokens + 3,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    message = {"role": "assistant", "content": "Paris."}
    said = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": usage,
        "system_fingerprint": "bench",
    }
    return plain(json.dumps(said, separators=(",", ":")).encode())


class Publisher:
    """The KV events of one engine, and their replay."""

    def __init__(self, context: "zmq.Context[Any]", chats: dict[str, dict[str, Any]]) -> None:
        import zmq  # noqa: PLC0415 - only with events

        self._live, self._past = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.live = f"tcp://127.0.0.1:{self._live.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay = f"tcp://127.0.0.1:{self._past.bind_to_random_port('tcp://127.0.0.1')}"
        self._again = zmq.Again
        self._no_wait = zmq.NOBLOCK
        self._life: list[bytes] = []
        self._fresh: deque[int] = deque()
        self._next = 1
        self._parents: list[int] = []
        for chat in chats.values():
            self._store(None, chat["known"])
        self.answered = 0

    def _store(self, parent: int | None, token_ids: list[int]) -> None:
        blocks = len(token_ids) // BLOCK
        if blocks:
            hashes = tuple(range(self._next, self._next + blocks))
            self._next += blocks
            self._parents.append(hashes[-1])
            self._publish([(hashes, parent, token_ids[: blocks * BLOCK])], [])

    def tick(self) -> None:
        """What was computed since the last one."""
        if self.answered:
            stored: list[tuple[tuple[int, ...], int | None, list[int]]] = []
            gone: list[int] = []
            for _ in range(self.answered):
                parent = self._parents[self._next % len(self._parents)]
                stored.append(((self._next,), parent, [(self._next + step) % 49_000 for step in range(BLOCK)]))
                self._fresh.append(self._next)
                self._next += 1
            while len(self._fresh) > HELD_BLOCKS:
                gone.append(self._fresh.popleft())
            self.answered = 0
            self._publish(stored, gone)
        self._serve_replays()

    def _publish(self, stored: list[tuple[tuple[int, ...], int | None, list[int]]], gone: list[int]) -> None:
        from kvherd.core.ids import EngineHash, Rank  # noqa: PLC0415 - only with events
        from kvherd.core.kv.events import BlocksRemoved, BlocksStored  # noqa: PLC0415
        from kvherd.wire.vllm_kv import encode_batch  # noqa: PLC0415

        events: list[BlocksStored | BlocksRemoved] = [
            BlocksStored(
                block_hashes=tuple(map(EngineHash, hashes)),
                parent_hash=None if parent is None else EngineHash(parent),
                token_ids=tuple(tokens),
                block_size=BLOCK,
            )
            for hashes, parent, tokens in stored
        ]
        if gone:
            events.append(BlocksRemoved(tuple(map(EngineHash, gone))))
        data = encode_batch(time.time(), events, Rank(0))
        self._live.send_multipart([b"kv-events", len(self._life).to_bytes(8, "big"), data])
        self._life.append(data)

    def _serve_replays(self) -> None:
        try:
            asker, _, start = self._past.recv_multipart(self._no_wait)
        except self._again:
            return
        first = int.from_bytes(start, "big")
        for number, data in enumerate(self._life[first:], start=first):
            self._past.send_multipart([asker, b"", b"kv-events", number.to_bytes(8, "big"), data])
        self._past.send_multipart([asker, b"", b"", b"\xff" * 8, b""])


@dataclass(slots=True)
class Client:
    socket: socket.socket
    engine: int
    got: bytes = b""
    events_left: int = 0
    done: bool = False


@dataclass
class Engines:
    tick_s: float
    chats: dict[str, dict[str, Any]]
    publishers: list[Publisher]
    clients: dict[int, Client] = field(default_factory=dict)
    streaming: list[set[int]] = field(default_factory=lambda: [set() for _ in range(ENGINES)])

    def __post_init__(self) -> None:
        self._poll = select.epoll()
        self._doors: dict[int, tuple[socket.socket, int]] = {}
        self._answers = {
            name.encode(): answer(chat["prompt_tokens"], len(chat["known"]) // BLOCK * BLOCK)
            for name, chat in self.chats.items()
        }
        self._usual = answer(200, 0)
        self._dice = random.Random(1)

    def listen(self) -> list[int]:
        ports = []
        for number in range(ENGINES):
            door = socket.create_server(("127.0.0.1", 0), backlog=2048)
            door.setblocking(False)
            self._doors[door.fileno()] = door, number
            self._poll.register(door, select.EPOLLIN)
            ports.append(door.getsockname()[1])
        return ports

    def serve(self) -> None:
        due_s = [time.monotonic() + self.tick_s * number / ENGINES for number in range(ENGINES)]
        events_due_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            for engine, due in enumerate(due_s):
                if now_s >= due:
                    self._step(engine)
                    due_s[engine] = max(due + self.tick_s, now_s)
            if self.publishers and now_s >= events_due_s:
                for publisher in self.publishers:
                    publisher.tick()
                events_due_s = now_s + EVENT_TICK_S
            wait_s = (min(due_s) if any(self.streaming) else now_s + 0.2) - now_s
            if self.publishers:
                wait_s = min(wait_s, EVENT_TICK_S)
            for descriptor, _ in self._poll.poll(max(wait_s, 0)):
                if descriptor in self._doors:
                    self._accept(*self._doors[descriptor])
                else:
                    self._read(descriptor)

    def _accept(self, door: socket.socket, engine: int) -> None:
        try:
            one, _ = door.accept()
        except BlockingIOError:
            return
        one.setblocking(False)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.clients[one.fileno()] = Client(one, engine)
        self._poll.register(one, select.EPOLLIN)

    def _read(self, descriptor: int) -> None:
        client = self.clients[descriptor]
        try:
            data = bytes(_ROOM[: client.socket.recv_into(_ROOM)])
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(descriptor)
            return
        client.got = client.got + data if client.got else data
        at = client.got.find(b"\r\n\r\n")
        if at >= 0 and self._whole(client.got, at):
            request, client.got = client.got, b""
            self._answer(descriptor, client, request)

    def _whole(self, got: bytes, at: int) -> bool:
        head = got[:at].lower()
        length = head.find(b"content-length:")
        if length >= 0:
            return len(got) - at - 4 >= int(head[length + 15 :].split(b"\r\n", 1)[0])
        return b"chunked" not in head or got.endswith(b"0\r\n\r\n")

    def _answer(self, descriptor: int, client: Client, request: bytes) -> None:
        if request.startswith(b"GET"):
            path = request.split(b" ", 2)[1].partition(b"?")[0]
            self._write(descriptor, client, GETS.get(path, NOT_FOUND))
            return
        if b"/completions" not in request[:64]:
            self._write(descriptor, client, NOT_FOUND)
        elif b'"stream":true' in request or b'"stream": true' in request:
            client.events_left = self._dice.randrange(100, 300)
            self.streaming[client.engine].add(descriptor)
            self._write(descriptor, client, _SSE_HEAD)
        else:
            at = request.find(b"Conversation ") if self._answers else -1
            self._write(descriptor, client, self._answers.get(request[at : at + 15], self._usual))
            if self.publishers:
                self.publishers[client.engine].answered += 1

    def _step(self, engine: int) -> None:
        for descriptor in tuple(self.streaming[engine]):
            client = self.clients[descriptor]
            if client.events_left:
                client.events_left -= 1
                self._write(descriptor, client, _CHUNK % (time.monotonic_ns() % 10**STAMP_DIGITS))
            else:
                self.streaming[engine].discard(descriptor)
                self._write(descriptor, client, _DONE)

    def _write(self, descriptor: int, client: Client, data: bytes) -> None:
        try:
            client.socket.send(data)  # all of it fits into the kernel's buffer, or the proxy stands still
        except OSError:
            self._drop(descriptor)

    def _drop(self, descriptor: int) -> None:
        client = self.clients.pop(descriptor, None)
        if client is not None:
            self.streaming[client.engine].discard(descriptor)
            self._poll.unregister(client.socket)
            client.socket.close()


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tick-ms", type=float, default=20.0)
    options.add_argument("--events", type=Path)
    chosen = options.parse_args()
    chats: dict[str, dict[str, Any]] = {}
    publishers: list[Publisher] = []
    if chosen.events:
        import zmq  # noqa: PLC0415 - only with events

        chats = json.loads(chosen.events.read_text())
        context = zmq.Context()
        publishers = [Publisher(context, chats) for _ in range(ENGINES)]
    engines = Engines(chosen.tick_ms / 1000, chats, publishers)
    ports = {
        "http": engines.listen(),
        "live": [one.live for one in publishers],
        "replay": [one.replay for one in publishers],
    }
    print(json.dumps(ports), flush=True)
    try:
        engines.serve()
    except KeyboardInterrupt:
        os._exit(0)


if __name__ == "__main__":
    main()
