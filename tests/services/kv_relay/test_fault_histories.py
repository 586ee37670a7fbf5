"""Random histories of faults, in virtual time: what the index says is true, or the worker has no credit.

An engine that lies, dies and is cut off; a relay that reads it, directly or behind a bridge that is killed; a follower
that is cut off, stalls, flushes and starts over. Five seconds after whatever happened, the promise is looked at.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Self

import pytest

from kvherd.core.ids import Epoch, Rank, WorkerId
from kvherd.core.kv.events import CacheCleared, KvEvent, KvEventBatch, SnapshotChunk
from kvherd.core.kv.hashing import PrefixHasher
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.core.kv.stream import KvStreamError, ResumeOutOfRange, StreamBroken
from kvherd.ports.kv_feed import FeedItem, Subscribed
from kvherd.services.gateway.following.follow import Followers, FollowOptions
from kvherd.services.kv_relay.direct import DirectKvFeed
from kvherd.services.kv_relay.relay import KvRelay, RelayOptions
from kvherd.testing.cache_truth import PROMISE_S, CacheTruth, doubt, removed, stored
from kvherd.testing.engine_model import Lies, ModelEngine, ModelFrames
from kvherd.testing.kv_feeds import OpenFeed
from kvherd.testing.virtual_time import virtual_time
from kvherd.wire.kv_pb import KvPbDecoder, decode_subscribe, encode_item, encode_subscribe
from kvherd.wire.kv_status import stream_error
from kvherd.wire.status import status_of

ANN = WorkerId("ann")
OPTIONS = FollowOptions(grace_s=4.5, long_pause_s=3.0)
NOT_MSGPACK = b"\xc1 no msgpack"
UNKNOWN_EVENT = b"\x93\xcb?\xf0\x00\x00\x00\x00\x00\x00\x91\x81\xa4type\xaaBlockMoved\x00"

Item = KvEventBatch | SnapshotChunk
Act = tuple[str, int, float]
"""What happens, and two numbers that say how."""

ACTS = Counter(
    store=30,
    remove=12,
    clear=3,
    lost_store=6,
    lost_remove=6,
    twice=4,
    empty=2,
    repeat=2,
    restart=5,
    die=2,
    start=3,
    cut=3,
    mend=4,
    hang_up=3,
    slow_reconnect=2,
    slow_notice=2,
    kept=2,
    loses=2,
    endless=1,
    stops=1,
    trickles=1,
    silent=1,
    restarts_midway=2,
    honest=4,
    bad_bytes=1,
    bad_event=1,
    jump=1,
    flush=2,
    bridge_dies=2,
    network=2,
    stall=2,
    returned=1,
    readded=1,
    pause=25,
    settle=6,
)


def script(seed: int, length: int) -> list[Act]:
    dice = random.Random(seed)
    names, weights = list(ACTS), list(ACTS.values())
    return [(dice.choices(names, weights)[0], dice.randrange(1_000), dice.random()) for _ in range(length)]


class WiredFeed(OpenFeed):
    """A `KvFeed` to a bridge, over a wire without sockets: what is sent is encoded and decoded as on gRPC."""

    def __init__(self) -> None:
        self.relay: KvRelay | None = None
        self.flowing = asyncio.Event()
        self.flowing.set()
        self._breaks = asyncio.Event()

    def cut(self) -> None:
        self._breaks.set()
        self._breaks = asyncio.Event()

    async def subscribe(self, cursors: dict[Rank, int], epoch: Epoch | None) -> AsyncGenerator[FeedItem, None]:
        if self.relay is None:
            raise StreamBroken("the bridge is away")
        breaks = self._breaks
        call = decode_subscribe(*encode_subscribe(cursors, epoch))
        decoder = KvPbDecoder()
        try:
            subscription = self.relay.subscribe(
                start_sequence_number=call.start_sequence_number, cursors=call.cursors, epoch=call.epoch
            )
            yield Subscribed(subscription.epoch)
            items = aiter(subscription)
            while True:
                decoded = decoder.decode(encode_item(await self._next(items, breaks)))
                assert decoded is not None
                yield decoded
        except KvStreamError as error:
            told = error.epoch if isinstance(error, ResumeOutOfRange) else None
            raise stream_error(status_of(error).grpc, str(error), told) from error

    async def _next(self, items: AsyncIterator[Item], breaks: asyncio.Event) -> Item:
        await self.flowing.wait()
        getting = asyncio.ensure_future(anext(items))
        breaking = asyncio.ensure_future(breaks.wait())
        try:
            await asyncio.wait((getting, breaking), return_when=asyncio.FIRST_COMPLETED)
            if breaking.done():
                raise StreamBroken("the network broke")
            return getting.result()
        finally:
            for one in (getting, breaking):
                one.cancel()
            await asyncio.wait((getting, breaking))
            if getting.done() and not getting.cancelled():
                getting.exception()


@dataclass
class World:
    """Everything that a history happens to. `late_clear`: the engine was flushed and has not said so yet.

    `flushes`: the gateway orders them, and nobody else does.
    """

    direct: bool
    ranks: int
    can_replay: bool
    room: int
    flushes: bool
    kept: int = 10_000
    engines: dict[Rank, ModelEngine] = field(default_factory=dict)
    late_clear: set[Rank] = field(default_factory=set)
    log: list[str] = field(default_factory=list)
    checks: Counter[str] = field(default_factory=Counter)
    numbers: "count[int]" = field(default_factory=lambda: count(1))
    stamps: "count[int]" = field(default_factory=count)

    async def __aenter__(self) -> Self:
        self.stack = AsyncExitStack()
        self.bridge = AsyncExitStack()
        loop = asyncio.get_running_loop()
        for number in range(self.ranks):
            rank = Rank(number)
            self.engines[rank] = ModelEngine(rank, clock=self._stamp, lies=Lies(kept=self.kept))
        self.followers = await self.stack.enter_async_context(
            Followers(
                PrefixIndex(PrefixHasher(b"k")), options=OPTIONS, dice=lambda: 0.5, wall=lambda: 1e6 + loop.time()
            )
        )
        if self.direct:
            self.feed: DirectKvFeed | WiredFeed = DirectKvFeed(self._open)
        else:
            self.feed = WiredFeed()
            await self._start_bridge()
        self.followers.add(ANN, self.feed, model="m")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.bridge.aclose()
        await self.stack.aclose()

    def _stamp(self) -> float:
        return 1e6 + asyncio.get_running_loop().time() + next(self.stamps) * 1e-6

    def _open(self) -> dict[Rank, ModelFrames]:
        return {
            rank: ModelFrames(engine, can_replay=self.can_replay, room=self.room)
            for rank, engine in self.engines.items()
        }

    async def _start_bridge(self) -> None:
        assert isinstance(self.feed, WiredFeed)
        options = RelayOptions(history_tokens=600)
        dice = random.Random(next(self.numbers)).randrange
        self.feed.relay = await self.bridge.enter_async_context(KvRelay(self._open(), options=options, dice=dice))

    @property
    def truths(self) -> dict[Rank, CacheTruth]:
        return {rank: engine.truth for rank, engine in self.engines.items()}

    def publish(self, engine: ModelEngine, *events: KvEvent, lost: bool = False, payload: bytes | None = None) -> None:
        if engine.alive and engine.rank in self.late_clear:
            self.late_clear.discard(engine.rank)
            # What it held was gone when it was flushed; it says so now, before the rest.
            events = (CacheCleared(), *events)
        engine.publish(*events, lost=lost, payload=payload)
        if lost and not self.can_replay:
            engine.publish()  # nobody can tell that the last batch is lost until there is another

    async def do(self, act: Act) -> None:  # noqa: C901, PLR0912 - a table of what may happen
        name, number, share = act
        engine = self.engines[Rank(number % self.ranks)]
        lies, truth = engine.lies, engine.truth
        held = sorted(truth.blocks)
        chosen = held[int(share * len(held))] if held else None
        match name:
            case "store" | "lost_store":
                fresh = next(self.numbers) * 10
                parent = chosen if number % 3 else None
                self.publish(engine, stored(fresh, parent, blocks=1 + number % 7), lost=name == "lost_store")
            case "remove" | "lost_remove":
                gone = chosen if chosen is not None and number % 5 else number
                self.publish(engine, removed(gone), lost=name == "lost_remove")
            case "twice" if chosen is not None and chosen - 1 in truth.blocks:
                self.publish(engine, stored(chosen, chosen - 1))
                if number % 2:
                    self.publish(engine, removed(chosen), removed(chosen), removed(chosen))
            case "clear" if not self.flushes:
                self.publish(engine, CacheCleared(), stored(next(self.numbers) * 10))
            case "empty":
                self.publish(engine)
            case "repeat" if self.can_replay:  # nothing else can tell a late one from the next
                engine.repeat(number % 5)
            case "restart":
                self.restart(engine, silent=number % 12)
            case "die":
                self.late_clear.discard(engine.rank)
                engine.die()
            case "start" if not engine.alive:
                self.restart(engine, silent=number % 4)
            case "cut":
                engine.cut_off()
            case "mend":
                engine.cut = False
            case "hang_up":
                engine.hang_up()
            case "slow_reconnect":
                engine.reconnect_s = share * 2
            case "slow_notice":
                engine.notice_s = share * 2
            case "kept":
                lies.kept = (1, 2, 5, 10_000)[number % 4]
            case "loses":
                lies.loses = frozenset(engine.next_number - back for back in range(number % 4))
            case "endless":
                lies.ends = False
            case "stops":
                lies.stops_after = number % 5
                lies.ends = lies.ends and lies.stops_after > 1  # or it would hide the last for ever
            case "trickles":
                lies.frame_s = share * 1.5
            case "silent":
                lies.silent = True
            case "restarts_midway":
                lies.restarts_after = number % 5
            case "honest":
                engine.lies, engine.notice_s, engine.reconnect_s = Lies(), 0.0, 0.05
            case "bad_bytes":
                self.publish(engine, payload=NOT_MSGPACK)
            case "bad_event":
                self.publish(engine, payload=UNKNOWN_EVENT)
            case "jump":
                engine.next_number = min(engine.next_number + (1, 2**32, 2**62)[number % 3], 2**64 - 1_000)
            case "flush" if self.flushes and engine.reachable:
                await self.flush(clear_first=bool(number % 2))
            case "bridge_dies" if isinstance(self.feed, WiredFeed):
                await self.restart_bridge(away_s=share * 8)
            case "network" if isinstance(self.feed, WiredFeed):
                self.feed.cut()
            case "stall" if isinstance(self.feed, WiredFeed):
                self.feed.flowing.clear()
            case "returned":
                self.followers.returned(ANN)
            case "readded" if not self.flushes:  # whoever has just come cannot know of an earlier flush
                self.followers.remove(ANN)
                self.followers.add(ANN, self.feed, model="m")
            case "pause":
                await asyncio.sleep((0.0, 0.01, 0.1, 1.0)[number % 4] * share)
            case "settle":
                await self.settle()
            case _:
                pass

    def restart(self, engine: ModelEngine, silent: int) -> None:
        """A new life, which has published some before anyone can have heard it."""
        self.late_clear.discard(engine.rank)
        engine.start()
        for _ in range(silent):
            engine.publish(stored(next(self.numbers) * 10), lost=True)

    async def flush(self, *, clear_first: bool) -> None:
        """All ranks obey an order; their clears come before the answer, or with what they publish next."""
        if not all(engine.reachable for engine in self.engines.values()):
            return
        ordered_s = asyncio.get_running_loop().time()
        for rank, engine in self.engines.items():
            engine.truth.copies.clear()
            self.late_clear.discard(rank)
            if clear_first:
                engine.publish(CacheCleared())
            else:
                self.late_clear.add(rank)
        await asyncio.sleep(0.01)
        self.followers.flushed(ANN, ordered_s=ordered_s)

    async def restart_bridge(self, away_s: float) -> None:
        assert isinstance(self.feed, WiredFeed)
        self.feed.relay = None
        self.feed.cut()
        await self.bridge.aclose()
        self.bridge = AsyncExitStack()
        await asyncio.sleep(away_s)
        await self._start_bridge()

    async def settle(self) -> None:
        """The promise, with whatever is broken still broken."""
        if isinstance(self.feed, WiredFeed):
            self.feed.flowing.set()
        await asyncio.sleep(PROMISE_S)
        problem = doubt(self.followers, ANN, self.truths)
        assert not problem, problem
        self.checks["live" if self.followers.credit(ANN) else "quarantined"] += 1

    async def recover(self) -> None:
        """All is mended, and something happens on every rank: credit comes back, for that at least."""
        for engine in self.engines.values():
            engine.lies, engine.cut, engine.notice_s, engine.reconnect_s = Lies(), False, 0.0, 0.05
            if not engine.alive:
                engine.start()
        await self.settle()
        for _ in range(4):
            await asyncio.sleep(PROMISE_S)
            latest = {rank: next(self.numbers) * 10 for rank in self.engines}
            for rank, engine in self.engines.items():
                self.publish(engine, stored(latest[rank]))
        await self.settle()
        assert self.followers.credit(ANN), self.followers.view(ANN)
        for rank, number in latest.items():
            assert number in self.followers.index.contents(Holder(ANN, rank))


def world_of(seed: int) -> World:
    dice = random.Random(-seed)
    can_replay = dice.random() < 0.8
    return World(
        direct=dice.random() < 0.5,
        ranks=dice.choice((1, 1, 2)),
        can_replay=can_replay,
        room=dice.choice((5, 200, 200)) if can_replay else 200,  # a lost last batch must be asked for
        flushes=dice.random() < 0.5,
        kept=dice.choice((10_000, 10_000, 1, 2)),
    )


def play(acts: list[Act], seed: int) -> Counter[str]:
    """Play a history; `seed` chooses the world that it happens in."""
    world = world_of(seed)

    async def history() -> Counter[str]:
        async with world:
            for act in acts:
                world.log.append(f"{asyncio.get_running_loop().time():.3f} {act}")
                await world.do(act)
            await world.recover()
            return world.checks

    return virtual_time(history())


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_the_index_is_true_or_the_worker_has_no_credit(seed: int) -> None:
    checks = play(script(seed, 80), seed)
    assert checks["live"] + checks["quarantined"] > 0
