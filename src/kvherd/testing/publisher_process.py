"""A publisher of KV events in a process of its own, that can be killed, stopped and started again.

    python -m kvherd.testing.publisher_process EVENTS REPLAY ORDERS

takes orders, one at a time, on the ZeroMQ endpoint ORDERS: Python literals such as `("publish", [("clear",)], False)`
and `("flood", 1000, 64)`. It answers each when it is done.
"""

import ast
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import zmq
import zmq.asyncio

from kvherd.core.kv.events import CacheCleared, KvEvent
from kvherd.testing.cache_truth import CacheTruth, removed, stored
from kvherd.testing.processes import OwnedProcess
from kvherd.testing.publisher import FakePublisher

Told = tuple[Any, ...]
"""("store", number, parent, blocks), ("remove", number, …) or ("clear",)."""
_FLOOD_FROM = 10_000_000
_ANSWER_MS = 20_000


class PublisherProcess:
    """A context manager: inside it, a life runs unless it was killed. `truth` is what that life holds."""

    def __init__(self, folder: Path, events_port: int, replay_port: int) -> None:
        self.events = f"tcp://127.0.0.1:{events_port}"
        self.replay = f"tcp://127.0.0.1:{replay_port}"
        self.truth = CacheTruth()
        self.process: OwnedProcess | None = None
        self._flooded = _FLOOD_FROM
        self._orders = f"ipc://{folder}/orders"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Begin a life, and return when it is there."""
        module = "kvherd.testing.publisher_process"
        self.process = OwnedProcess([sys.executable, "-m", module, self.events, self.replay, self._orders])
        self.publish()

    def kill(self) -> None:
        """SIGKILL, if it lives; all that it held is gone."""
        process, self.process = self.process, None
        if process is not None:
            process.__exit__(None, None, None)
        self.truth.copies.clear()

    def publish(self, *told: Told, lost: bool = False) -> None:
        self.truth.apply(as_event(one) for one in told)
        self._order(("publish", list(told), lost))

    def flood(self, batches: int, blocks: int) -> None:
        """Publish so many batches of so many blocks as fast as can be; each removes what the one before stored."""
        first, self._flooded = self._flooded, self._flooded + batches * blocks
        self.truth.apply([stored(self._flooded - blocks, blocks=blocks)])
        self._order(("flood", first, batches, blocks))

    def _order(self, order: Told) -> None:
        with zmq.Context() as context, context.socket(zmq.REQ) as socket:
            socket.set(zmq.LINGER, 0)
            socket.connect(self._orders)
            socket.send_string(repr(order))
            said = "" if self.process is None else self.process.said
            assert socket.poll(_ANSWER_MS), f"the publisher does not obey; it said {said!r}"
            socket.recv()


def as_event(told: Told) -> KvEvent:
    match told:
        case ("store", number, parent, blocks):
            return stored(number, parent, blocks=blocks)
        case ("remove", *numbers):
            return removed(*numbers)
        case _:
            return CacheCleared()


async def main(events: str, replay: str, orders: str) -> None:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.REP)
    async with FakePublisher(events_endpoint=events, replay_endpoint=replay) as publisher:
        socket.bind(orders)
        while True:
            await _obey(publisher, ast.literal_eval(await socket.recv_string()))
            await socket.send(b"done")


async def _obey(publisher: FakePublisher, order: Sequence[Any]) -> None:
    match order:
        case ("publish", [*told], bool(lost)):
            if told:
                await publisher.publish(*map(as_event, told), lost=lost)
        case ("flood", int(begin), int(batches), int(blocks)):
            for first in range(begin, begin + batches * blocks, blocks):
                gone = [removed(*range(first - blocks, first))] if first > begin else []
                await publisher.publish(*gone, stored(first, blocks=blocks))
                await asyncio.sleep(0)  # replays are asked for meanwhile
        case _:
            raise ValueError(f"no order: {order}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
