"""How long what was told of a publisher whose connection is broken may stand, in virtual time."""

import asyncio
from collections import deque

import pytest

from kvherd.core.ids import EngineHash, Rank
from kvherd.core.kv.events import BlocksStored, CacheCleared, SnapshotChunk
from kvherd.core.kv.frames import Connected, Disconnected, Frame, Received, Replayed
from kvherd.core.kv.stream import EpochEnded
from kvherd.services.kv_relay.relay import KvRelay, RelayOptions
from kvherd.testing.kv_feeds import OpenFeed
from kvherd.wire.vllm_kv import encode_batch

RANK = Rank(0)
BATCH = encode_batch(0.0, [BlocksStored((EngineHash(1),), None, (1, 2), 2)], RANK)
BROKEN_S, RESTARTED_S = 10.0, 10.5
OPTIONS = RelayOptions(probe_s=1.0, replay_silence_s=0.2, doubt_s=2.0)


class RestartedEngine(OpenFeed):
    """A feed of an engine that is killed and soon there again, with nothing: it answers replays before its events are
    connected anew.
    """

    can_replay = True
    bad_frames = 0

    def __init__(self, *, connected_again_s: float, noticed_s: float = BROKEN_S) -> None:
        self._changes: deque[tuple[float, Connected | Disconnected]] = deque(
            [(0.0, Connected()), (noticed_s, Disconnected("it is broken")), (connected_again_s, Connected())]
        )

    async def next(self, *, within_s: float) -> Received | Connected | Disconnected | None:
        now_s = asyncio.get_running_loop().time()
        if self._changes and self._changes[0][0] <= now_s + within_s:
            at_s, change = self._changes.popleft()
            await asyncio.sleep(at_s - now_s)
            return change
        await asyncio.sleep(within_s)
        return None

    async def replay(self, start: int, *, silence_s: float) -> Replayed:
        now_s = asyncio.get_running_loop().time()
        if BROKEN_S <= now_s < RESTARTED_S:
            await asyncio.sleep(silence_s)
            return Replayed((), ended=False)
        return Replayed((Frame(0, BATCH),) if now_s < BROKEN_S else (), ended=True)


async def told_at(relay: KvRelay, at_s: float) -> asyncio.Task[None]:
    """Who subscribes then and reads for ever."""
    await asyncio.sleep(at_s - asyncio.get_running_loop().time())
    stream = relay.subscribe()

    async def read() -> None:
        async for _ in stream:
            pass

    return asyncio.ensure_future(read())


async def test_what_is_told_of_a_new_life_has_its_own_time_to_be_in_doubt() -> None:
    """Or whoever came back after one end would be sent away a second time, for nothing."""
    async with KvRelay({RANK: RestartedEngine(connected_again_s=12.5)}, options=OPTIONS) as relay:
        before = await told_at(relay, 5.0)
        after = await told_at(relay, 11.5)
        assert isinstance(before.exception(), EpochEnded)
        await asyncio.sleep(10)
        assert not after.done()
        after.cancel()


async def test_what_is_told_of_a_new_life_is_taken_back_if_its_connection_stays_broken() -> None:
    async with KvRelay({RANK: RestartedEngine(connected_again_s=100.0)}, options=OPTIONS) as relay:
        after = await told_at(relay, 11.5)
        await asyncio.sleep(3.0)
        assert isinstance(after.exception(), EpochEnded)


@pytest.mark.parametrize("at_s", [10.1, 10.3], ids=["while it is asked", "when it has not answered"])
async def test_who_comes_before_a_dead_engine_s_silence_is_explained_is_not_told_what_it_held(at_s: float) -> None:
    """1. An engine is killed. 2. It is asked whether that was all. 3. Its connection is seen to be broken."""
    engine = RestartedEngine(connected_again_s=10.8, noticed_s=10.6)
    async with KvRelay({RANK: engine}, options=OPTIONS) as relay:
        await asyncio.sleep(at_s)
        with pytest.raises(EpochEnded):
            await anext(aiter(relay.subscribe()))
        told = await anext(aiter(relay.subscribe()))
        assert isinstance(told, SnapshotChunk)
        assert told.batch.events == (CacheCleared(),)
