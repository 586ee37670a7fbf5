"""A publisher of KV events that behaves badly on request: it drops, repeats, restarts, and answers replays in part."""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Final, Self

import msgspec
import zmq
import zmq.asyncio

from kvherd.core.ids import Rank
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent
from kvherd.testing.cache_truth import CacheTruth
from kvherd.wire.vllm_kv import encode_batch

END: Final = b"\xff" * 8
_RANK_0: Final = Rank(0)


class FakePublisher:
    """One rank on real sockets, in vLLM's framing. An async context manager.

    Entered again after it was left, or by `restart`, it is another process at the same endpoints: `life` is new and
    counts from 0, and `truth` is what that process holds.

    `answers` may change what a replay sends: it gets the frames and returns those to send; `ends` False leaves the end
    marker out. `frame_s` is the pause before each of them. After `stops_after` of them `stopped` is set and no more
    comes. `cut_frames`: the frames of an answer lack their last part. `old` is as vLLM was through 0.22: events are
    arrays, and replays have no topic.
    """

    def __init__(
        self,
        *,
        rank: Rank = _RANK_0,
        events_endpoint: str = "tcp://127.0.0.1:*",
        replay_endpoint: str = "tcp://127.0.0.1:*",
        connects: bool = False,
    ) -> None:
        self.rank = rank
        self.events_endpoint = events_endpoint
        self.replay_endpoint = replay_endpoint
        self.kept = 10_000
        self.ends = True
        self.answers: Callable[[list[tuple[int, bytes]]], Iterable[tuple[int, bytes]]] = list
        self.replays_asked = 0
        self.frame_s = 0.0
        self.stops_after: int | None = None
        self.stopped = asyncio.Event()
        self.cut_frames = False
        self.old = False
        self.truth = CacheTruth()
        self._connects = connects
        self.life: list[tuple[int, bytes]] = []

    async def __aenter__(self) -> Self:
        self.life = []
        self.truth.copies.clear()
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._router = self._context.socket(zmq.ROUTER)
        for socket in (self._pub, self._router):
            socket.set(zmq.LINGER, 0)
        self.replay_endpoint = await _bind(self._router, self.replay_endpoint)
        if self._connects:
            self._pub.connect(self.events_endpoint)
        else:
            self.events_endpoint = await _bind(self._pub, self.events_endpoint)
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._replaying = self._group.create_task(self._answer())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._replaying.cancel()
        await self._group.__aexit__(None, None, None)
        self._context.destroy(linger=0)

    async def restart(self) -> None:
        await self.__aexit__(None, None, None)
        await self.__aenter__()

    async def hang_up(self) -> None:
        """Break every connection that events go over; who reconnects finds the same life."""
        self._pub.close(linger=0)
        self._pub = self._context.socket(zmq.PUB)
        await _bind(self._pub, self.events_endpoint)

    @property
    def next_sequence(self) -> int:
        return self.life[-1][0] + 1 if self.life else 0

    async def publish(self, *events: KvEvent, lost: bool = False, payload: bytes | None = None) -> int:
        """Publish one batch and return its number; `lost` keeps it from the live stream, `payload` replaces it."""
        number = self.next_sequence
        data = self._encode(events) if payload is None else payload
        self.truth.apply(events)
        self.life.append((number, data))
        if not lost:
            await self._send(number, data)
        return number

    async def repeat(self, number: int) -> None:
        """Send a batch of this life again."""
        await self._send(*next(one for one in self.life if one[0] == number))

    def count_from(self, number: int) -> None:
        """Let the next batch have this number."""
        self.life.append((number - 1, encode_batch(time.time(), (), self.rank)))

    def _encode(self, events: Sequence[KvEvent]) -> bytes:
        if not self.old:
            return encode_batch(time.time(), events, self.rank)
        return msgspec.msgpack.encode([time.time(), [_as_array(event) for event in events], self.rank])

    async def _send(self, number: int, data: bytes) -> None:
        await self._pub.send_multipart([b"kv-events", number.to_bytes(8, "big"), data])

    async def _answer(self) -> None:
        while True:
            asker, _, start = await self._router.recv_multipart()
            self.replays_asked += 1
            asked = int.from_bytes(start, "big")
            held = self.life[-self.kept :] if self.kept else []
            topic = [] if self.old else [b"kv-events"]
            for sent, (number, data) in enumerate(self.answers([one for one in held if one[0] >= asked])):
                if sent == self.stops_after:
                    self.stopped.set()
                    break
                if self.frame_s:
                    await asyncio.sleep(self.frame_s)
                body = [number.to_bytes(8, "big")] if self.cut_frames else [number.to_bytes(8, "big"), data]
                await self._router.send_multipart([asker, b"", *topic, *body])
            else:
                if self.ends:
                    await self._router.send_multipart([asker, b"", *([] if self.old else [b""]), END, b""])


def _as_array(event: KvEvent) -> list[object]:
    match event:
        case BlocksStored():
            return ["BlockStored", event.block_hashes, event.parent_hash, event.token_ids, event.block_size]
        case BlocksRemoved():
            return ["BlockRemoved", event.block_hashes]
        case CacheCleared():
            return ["AllBlocksCleared"]


async def _bind(socket: zmq.asyncio.Socket, endpoint: str) -> str:
    """Bind, waiting for a port that an earlier life has just left. Raises `zmq.ZMQError` after two seconds."""
    deadline = asyncio.get_running_loop().time() + 2
    while True:
        try:
            socket.bind(endpoint)
        except zmq.ZMQError:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.02)
        else:
            return str(socket.get_string(zmq.LAST_ENDPOINT))


def without(*numbers: int) -> Callable[[Sequence[tuple[int, bytes]]], list[tuple[int, bytes]]]:
    """A replay that loses these batches."""
    return lambda frames: [one for one in frames if one[0] not in numbers]
