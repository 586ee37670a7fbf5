"""The load of `gateway.py`: a closed loop over kept connections, without an event loop so that it costs little.

    python bench/_load.py --ports 8080 --connections 64 --size 1024 --seconds 2 --watch proxy=123 --watch engine=45

Warms up, measures for so long, and prints what it saw as JSON. It reads the CPU clocks of the watched processes at the
very ends of the measured time. Prints `{"failed": ...}` where an answer was not 200 or a connection was closed.
"""

import argparse
import json
import os
import select
import socket
import sys
import time
from dataclasses import dataclass, field

from _conversations import NUMBER, conversations
from _engine import JSON_TAIL, STAMP, STAMP_DIGITS

HEAD = (
    "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\nuser-agent: bench\r\naccept: application/json\r\n"
    "content-type: application/json\r\nauthorization: Bearer none\r\ncontent-length: %d\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"
ROOM = memoryview(bytearray(262_144))
SILENCE_S = 10.0
WARM_LIMIT_S = 60.0


class Failed(Exception):
    """What is measured does not do what is asked of it."""


@dataclass(slots=True)
class Connection:
    socket: socket.socket
    request: bytearray
    number_at: int
    asked_ns: int = 0
    begun: bool = False
    had: int = 0


@dataclass(slots=True)
class Seen:
    """Within the measured time."""

    answers: int = 0
    events: int = 0
    latencies_ns: list[int] = field(default_factory=list)


def cpu_ns(pids: list[int]) -> int:
    """CPU time that the kernel accounted to processes, with all threads that they ever had."""
    return sum(time.clock_gettime_ns((~pid << 3) | 2) for pid in pids)


def machine_busy_ns() -> int:
    """CPU time spent by anything on this machine."""
    with open("/proc/stat", encoding="ascii") as file:  # noqa: PTH123 - read within the measured time
        ticks = [int(word) for word in file.readline().split()[1:9]]
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) * (1_000_000_000 // os.sysconf("SC_CLK_TCK"))


class Load:
    def __init__(self, options: argparse.Namespace) -> None:
        self._stream = options.stream
        self._chats = conversations(options.size, stream=options.stream, max_tokens=options.max_tokens)
        self._fresh = options.fresh
        self._asked = options.first_number
        self._poll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self.seen = Seen()

    def connect(self, ports: list[int], count: int) -> None:
        for number in range(count):
            chat = self._chats[number % len(self._chats)]
            one = socket.create_connection(("127.0.0.1", ports[number % len(ports)]), timeout=SILENCE_S)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            head = (HEAD % len(chat.body)).encode()
            connection = Connection(one, bytearray(head + chat.body), len(head) + chat.number_at)
            self._connections[one.fileno()] = connection
            self._poll.register(one, select.EPOLLIN)
            self._ask(connection)

    def run(self, seconds: float, *, until_all_had: int | None = None) -> None:
        """`until_all_had`: no longer than until every connection had so many answers, or as many reads of a stream."""
        until_s = time.perf_counter() + seconds
        heard_s = time.perf_counter()
        take = self._take_events if self._stream else self._take_answer
        while (now_s := time.perf_counter()) < until_s:
            if until_all_had is not None and all(one.had >= until_all_had for one in self._connections.values()):
                return
            ready = self._poll.poll(min(until_s - now_s, 1.0))
            for descriptor, _ in ready:
                connection = self._connections[descriptor]
                take(connection, bytes(ROOM[: connection.socket.recv_into(ROOM)]))
            if ready:
                heard_s = now_s
            elif now_s - heard_s > SILENCE_S:
                raise Failed(f"no answer for {SILENCE_S:g} s")

    def _take_answer(self, connection: Connection, data: bytes) -> None:
        self._check(connection, data)
        if data.endswith((JSON_TAIL, LAST_CHUNK)):
            connection.had += 1
            self.seen.answers += 1
            self.seen.latencies_ns.append(time.monotonic_ns() - connection.asked_ns)
            self._ask(connection)

    def _take_events(self, connection: Connection, data: bytes) -> None:
        self._check(connection, data)
        connection.had += 1
        events = data.count(b"data: {")
        self.seen.events += events
        at = data.rfind(STAMP)
        if at >= 0 and len(digits := data[at + len(STAMP) :][:STAMP_DIGITS]) == STAMP_DIGITS:
            self.seen.latencies_ns.append(time.monotonic_ns() - int(digits))
        if data.endswith(LAST_CHUNK):
            self.seen.answers += 1
            self._ask(connection)

    def _check(self, connection: Connection, data: bytes) -> None:
        if connection.begun and data:
            return
        if not data.startswith(b"HTTP/1.1 200"):
            raise Failed(f"it answered {data[:300]!r}" if data else "it closed a connection")
        connection.begun = True

    def _ask(self, connection: Connection) -> None:
        if self._fresh:
            self._asked += 1
            at = connection.number_at
            connection.request[at : at + len(NUMBER)] = b"%08d" % self._asked
        connection.begun = False
        connection.asked_ns = time.monotonic_ns()
        connection.socket.sendall(connection.request)


def measure(options: argparse.Namespace) -> dict[str, object]:
    watched: dict[str, list[int]] = {"load": [os.getpid()]}
    for word in options.watch:
        name, _, pids = word.partition("=")
        watched[name] = [int(pid) for pid in pids.split(",") if pid]
    load = Load(options)
    load.connect(options.ports, options.connections)
    load.run(options.warm)
    load.run(WARM_LIMIT_S, until_all_had=1 if options.stream else 2)
    load.seen = seen = Seen()
    before_ns = {name: cpu_ns(pids) for name, pids in watched.items()}
    busy_ns, began_ns = machine_busy_ns(), time.monotonic_ns()
    load.run(options.seconds)
    took_ns = time.monotonic_ns() - began_ns
    used_ns = {name: cpu_ns(pids) - before_ns[name] for name, pids in watched.items()}
    others_ns = machine_busy_ns() - busy_ns - sum(used_ns.values())
    times = sorted(seen.latencies_ns)
    if not times:
        raise Failed("nothing came back in the measured time")
    return {
        "seconds": took_ns / 1e9,
        "answers": seen.answers,
        "events": seen.events,
        "p50_ms": times[len(times) // 2] / 1e6,
        "p99_ms": times[len(times) * 99 // 100] / 1e6,
        "cpu_s": {name: used / 1e9 for name, used in used_ns.items()},
        "others_s": max(0.0, others_ns / 1e9),
    }


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--ports", type=int, nargs="+", required=True)
    options.add_argument("--connections", type=int, required=True)
    options.add_argument("--size", type=int, required=True)
    options.add_argument("--seconds", type=float, required=True)
    options.add_argument("--warm", type=float, default=0.4)
    options.add_argument("--stream", action="store_true")
    options.add_argument("--max-tokens", type=int)
    options.add_argument("--fresh", action="store_true", help="every question has another number")
    options.add_argument("--first-number", type=int, default=0)
    options.add_argument("--watch", action="append", default=[], metavar="NAME=PID,PID")
    try:
        print(json.dumps(measure(options.parse_args())))
    except (Failed, OSError) as error:
        print(json.dumps({"failed": str(error)}))
        sys.stdout.flush()
        os._exit(0)  # without waiting for a proxy that hangs


if __name__ == "__main__":
    main()
