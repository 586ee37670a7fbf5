"""A real rank process on the tiny model, driven over its sockets as a servicer does."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvherd.core.engine.generation import FinishReason
from kvherd.core.engine.reports import RankLoad
from kvherd.core.kv.events import BlocksStored, CacheCleared, Tier
from kvherd.services.engine.rank_plan import ipc_directory, rank_configs
from kvherd.services.engine.ranks import RankProcesses
from kvherd.testing.rank_client import RankClient
from kvherd.wire import scheduler_ipc as ipc
from kvherd.wire.vllm_kv import decode_batch

pytestmark = pytest.mark.engine

PROMPT = [5 + n % 50 for n in range(100)]


@dataclass
class Rank:
    client: RankClient
    processes: RankProcesses
    exits: asyncio.Queue[str]

    @property
    def pid(self) -> int:
        return next(iter(self.processes.pids.values()))

    async def exited(self) -> str:
        async with asyncio.timeout(20):
            return await self.exits.get()


@asynccontextmanager
async def tiny_rank(
    *, pool_blocks: int = 64, host_blocks: int = 0, storage_dir: Path | None = None
) -> AsyncIterator[Rank]:
    exits: asyncio.Queue[str] = asyncio.Queue()
    with ipc_directory() as directory:
        configs = rank_configs("tiny", ranks=1, port=0, ipc_dir=directory, pool_blocks=pool_blocks)
        storage = str(storage_dir or "")
        configs = [msgspec.structs.replace(each, host_blocks=host_blocks, storage_dir=storage) for each in configs]
        async with (
            RankClient(directory) as client,
            RankProcesses(configs, on_exit=lambda _, reason: exits.put_nowait(reason)) as processes,
        ):
            yield Rank(client, processes, exits)


@asynccontextmanager
async def dealer(endpoint: str) -> AsyncIterator[zmq.asyncio.Socket]:
    context = zmq.asyncio.Context()
    peer = context.socket(zmq.DEALER)
    try:
        peer.connect(endpoint)
        yield peer
    finally:
        context.destroy(linger=0)


async def replay(endpoint: str, first: int) -> list[list[bytes]]:
    async with dealer(endpoint) as peer, asyncio.timeout(10):
        await peer.send_multipart([b"", first.to_bytes(8, "big")])
        frames = []
        while (frame := await peer.recv_multipart())[2] != b"\xff" * 8:
            frames.append(frame)
        assert frame == [b"", b"", b"\xff" * 8, b""]
        return frames


async def test_a_rank_answers_and_takes_a_repeated_prompt_from_its_cache() -> None:
    async with tiny_rank() as rank:
        facts = await rank.client.ready()
        assert (facts.rank, facts.pid, facts.block_size, facts.capacity_tokens) == (0, rank.pid, 16, 1024)
        await rank.client.submit("first", PROMPT, 6)
        first = await rank.client.end("first")
        await rank.client.submit("again", PROMPT, 6)
        again = await rank.client.end("again")
        assert [each.token_ids for each in again] == [each.token_ids for each in first]
        assert sum(len(each.token_ids) for each in first) == 6
        assert (first[-1].cached_tokens, again[-1].cached_tokens) == (0, 96)
        load = await rank.client.load("state")
        assert (load.requests_total, load.generated_tokens_total, load.cached_tokens_total) == (2, 12, 96)


async def test_a_prompt_that_was_evicted_comes_back_from_the_host_with_the_same_answer() -> None:
    async with tiny_rank(pool_blocks=7, host_blocks=64) as rank:
        facts = await rank.client.ready()
        await rank.client.submit("first", PROMPT, 6)
        first = await rank.client.end("first")
        await _until_load(rank, lambda load: load.host_used_tokens == 96)
        await rank.client.submit("other", [9] * 100, 6)
        await rank.client.end("other")
        await rank.client.submit("again", PROMPT, 6)
        again = await rank.client.end("again")
        assert [each.token_ids for each in again] == [each.token_ids for each in first]
        assert (again[-1].cached_tokens, again[-1].host_tokens) == (96, 96)
        assert (await rank.client.load("loaded")).host_loaded_tokens_total == 96
        await rank.client.flush("flush", 5.0)
        assert (await rank.client.answer("flush")).done
        assert (await rank.client.load("flushed")).host_used_tokens == 0
        frames = await replay(facts.replay_endpoint, 0)
        events = [event for frame in frames for event in decode_batch(frame[3]).events]
        tiers = {event.tier for event in events if isinstance(event, BlocksStored)}
        assert tiers == {Tier.DEVICE, Tier.HOST}


async def test_what_one_engine_computed_another_reads_from_their_store_bit_by_bit(tmp_path: Path) -> None:
    async with tiny_rank(host_blocks=64, storage_dir=tmp_path / "store") as rank:
        await rank.client.ready()
        await rank.client.submit("first", PROMPT, 6)
        first = await rank.client.end("first")
        await _until_load(rank, lambda load: load.store_put_tokens_total == 96)
    files = sorted((tmp_path / "store").glob("??/*.kv"))
    assert len(files) == 6
    async with tiny_rank(host_blocks=64, storage_dir=tmp_path / "store") as rank:
        await rank.client.ready()
        await rank.client.submit("again", PROMPT, 6)
        again = await rank.client.end("again")
        assert [each.token_ids for each in again] == [each.token_ids for each in first]
        assert (again[-1].cached_tokens, again[-1].host_tokens, again[-1].storage_tokens) == (96, 0, 96)
        await rank.client.flush("flush", 20.0)
        assert (await rank.client.answer("flush")).done
        assert sorted((tmp_path / "store").glob("??/*.kv")) == files
        for path in files[:5]:
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        files[5].unlink()
        await rank.client.submit("damaged", PROMPT, 6)
        damaged = await rank.client.end("damaged")
        assert [each.token_ids for each in damaged] == [each.token_ids for each in first]


async def test_a_store_of_another_model_is_no_store_of_this_one(tmp_path: Path) -> None:
    for block_size, cached in ((16, 0), (8, 0), (16, 96)):
        with ipc_directory() as directory:
            [config] = rank_configs("tiny", ranks=1, port=0, ipc_dir=directory, pool_blocks=64)
            config = msgspec.structs.replace(
                config, block_size=block_size, host_blocks=64, storage_dir=str(tmp_path / "store")
            )
            async with RankClient(directory) as client, RankProcesses([config], on_exit=lambda *_: None):
                await client.ready()
                await client.submit("first", PROMPT, 2)
                assert (await client.end("first"))[-1].cached_tokens == cached
                await _until(client, lambda load: load.store_put_tokens_total >= 96 or load.cached_tokens_total == 96)


async def test_orders_and_aborts_are_heard_while_a_request_runs() -> None:
    async with tiny_rank() as rank:
        await rank.client.ready()
        await rank.client.submit("long", PROMPT, 900)
        await rank.client.started("long")
        await rank.client.flush("now")
        refused = await rank.client.answer("now")
        assert not refused.done
        assert [blocker.kind for blocker in refused.blockers] == ["running"]
        await rank.client.flush("soon", 0.1)
        await rank.client.flush("later", 30.0)
        assert (await rank.client.answer("soon")).timed_out
        await rank.client.send(ipc.Abort(rank.client.said("long")[0].request, "client left"))
        finish = (await rank.client.end("long"))[-1].finish
        assert finish is not None
        assert (finish.reason, finish.message) == (FinishReason.ABORT, "client left")
        done = await rank.client.answer("later")
        assert done.done
        assert done.cleared_blocks >= 6
        assert (await rank.client.load("state")).used_tokens == 0


async def test_the_events_tell_what_is_cached_and_can_be_replayed() -> None:
    async with tiny_rank() as rank:
        facts = await rank.client.ready()
        await rank.client.submit("one", PROMPT, 1)
        await rank.client.end("one")
        await rank.client.flush("flush")
        await rank.client.answer("flush")
        frames = await replay(facts.replay_endpoint, 0)
        assert [frame[1] for frame in frames] == [b"kv-events"] * 2
        assert [int.from_bytes(frame[2], "big") for frame in frames] == [0, 1]
        batches = [decode_batch(frame[3]) for frame in frames]
        events = [event for batch in batches for event in batch.events]
        assert isinstance(events[0], BlocksStored)
        assert events[0].token_ids == tuple(PROMPT[:96])
        assert events[0].parent_hash is None
        assert events[1:] == [CacheCleared()]
        assert len(await replay(facts.replay_endpoint, 1)) == 1
        assert await replay(facts.replay_endpoint, 2) == []
        assert await replay(facts.replay_endpoint, 2**64 - 1) == []


async def test_a_subscriber_hears_what_the_replay_tells() -> None:
    async with tiny_rank() as rank:
        facts = await rank.client.ready()
        context = zmq.asyncio.Context()
        try:
            subscriber = context.socket(zmq.SUB)
            subscriber.subscribe(b"kv-events")
            monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            subscriber.connect(facts.events_endpoint)
            async with asyncio.timeout(10):
                await monitor.recv_multipart()
                await asyncio.sleep(0.05)  # the subscription follows the handshake, and nothing tells of its arrival
                await rank.client.submit("one", PROMPT, 1)
                live = await subscriber.recv_multipart()
            assert [live] == [frame[1:] for frame in await replay(facts.replay_endpoint, 0)]
        finally:
            context.destroy(linger=0)


async def test_junk_and_a_live_id_cost_a_line_in_the_log_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    async with tiny_rank() as rank:
        await rank.client.ready()
        await rank.client.send_raw(b"junk")
        await rank.client.send_raw(b"\x81\xa4type\xa4what")
        await rank.client.submit("id", PROMPT, 200)
        await rank.client.submit("id", [1], 1)
        assert sum(len(each.token_ids) for each in await rank.client.end("id")) == 200
        assert caplog.text.count("dropped bad frame") == 2
        assert "a request 'id' is alive here" in caplog.text
        assert "Traceback" not in caplog.text


async def test_an_idle_rank_says_so_each_second_and_burns_nothing() -> None:
    async with tiny_rank() as rank:
        await rank.client.ready()

        def beats() -> int | None:
            count = sum(isinstance(message, ipc.Stepped) for message in rank.client.heard)
            return count if count >= 3 else None

        started_s = time.monotonic()
        used_s = _cpu_s(rank.pid)
        await rank.client.until(beats)
        assert time.monotonic() - started_s > 1.5
        assert _cpu_s(rank.pid) - used_s < 0.2


async def test_a_kill_is_noticed_at_once_with_its_name() -> None:
    async with tiny_rank() as rank:
        await rank.client.ready()
        os.kill(rank.pid, signal.SIGKILL)
        assert await rank.exited() == "killed by SIGKILL"


async def test_ctrl_c_does_not_reach_a_rank() -> None:
    async with tiny_rank() as rank:
        os.kill(rank.pid, signal.SIGINT)
        await rank.client.ready()
        os.kill(rank.pid, signal.SIGINT)
        await rank.client.submit("one", PROMPT, 1)
        await rank.client.end("one")
        assert rank.exits.empty()


async def test_stop_ends_the_requests_and_then_the_process() -> None:
    async with tiny_rank() as rank:
        await rank.client.ready()
        await rank.client.submit("long", PROMPT, 900)
        await rank.client.started("long")
        await rank.client.send(ipc.Stop("the engine is stopping"))
        finish = (await rank.client.end("long"))[-1].finish
        assert finish is not None
        assert finish.message == "the engine is stopping"
        assert await rank.exited() == "it ended with status 0"


async def test_a_rank_whose_parent_is_gone_ends_by_itself() -> None:
    async with tiny_rank() as rank:
        await rank.client.ready()
        process = next(iter(rank.processes._processes.values()))
        assert process.stdin is not None
        process.stdin.close()
        assert await rank.exited() == "it ended with status 0"


async def test_a_port_taken_after_the_start_began_is_the_last_word_of_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launcher looks at the ports first; here somebody takes one between that look and the rank's own bind."""
    with ipc_directory() as directory, socket.socket() as thief:
        thief.bind(("127.0.0.1", 0))
        thief.listen()
        port = thief.getsockname()[1]
        [config] = rank_configs("tiny", ranks=1, port=0, ipc_dir=directory)
        exits: asyncio.Queue[str] = asyncio.Queue()
        configs = [msgspec.structs.replace(config, events_endpoint=f"tcp://127.0.0.1:{port}")]
        monkeypatch.setattr("kvherd.services.engine.ranks.port_is_free", lambda *_: True)
        async with (
            RankClient(directory) as client,
            RankProcesses(configs, on_exit=lambda _, reason: exits.put_nowait(reason)),
        ):
            said = f"port {port} is in use; choose another with --port"
            assert await client.fatal() == said
            async with asyncio.timeout(10):
                assert await exits.get() == said


def _cpu_s(pid: int) -> float:
    """Processor time of all threads, as the kernel counts it."""
    with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _until_load(rank: Rank, holds: Callable[[RankLoad], bool]) -> None:
    await _until(rank.client, holds)


async def _until(client: RankClient, holds: Callable[[RankLoad], bool]) -> None:
    async with asyncio.timeout(30):
        for number in count():
            if holds(await client.load(f"load-{number}")):
                return
            await asyncio.sleep(0.01)
