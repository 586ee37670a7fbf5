"""KV events from an engine's socket to the index: blocks a second, processor time a block, lag.

    .venv/bin/python bench/kv_feed.py [--blocks 64000] [--lag-s 5] [--rounds 3]

A publisher in a process of its own sends vLLM's frames over ZeroMQ, as fast as they are read: chains of 64 blocks of 16
tokens, each batch storing so many blocks and removing as many old ones. Readers, each in processes of their own:

    direct   an engine's sockets → relay → index, in one process
    bridge   the same with `kvherd bridge`'s stream of gRPC between relay and index, two processes
    peer     `SelectionService` of ai-dynamo-runtime, compiled, on the same frames

The time is from the first frame to the moment when a look-up finds the last block. Ratios are to the peer of the same
run. Prints tables, writes bench/out/kv_feed.json. The index is pure Python: it is what a compiled one starts from.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc.aio
import msgspec
import uvloop
from _kv_frames import CHAIN, MARKER, SIZE, publish, tokens_of
from smg_grpc_proto.generated import common_pb2 as pb

from kvherd.adapters.grpc_kv_feed import METHODS, GrpcKvFeed
from kvherd.adapters.zmq_kv_feed import ZmqFrameFeed
from kvherd.cli.process_limits import prepare_process
from kvherd.core.errors import KvherdError
from kvherd.core.ids import Rank, WorkerId
from kvherd.core.kv.events import KvEventBatch, SnapshotChunk
from kvherd.core.kv.hashing import PrefixHasher, prefix_chain
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.ports.kv_feed import KvFeed
from kvherd.services.gateway.following.follow import Followers
from kvherd.services.gateway.following.follow_stream import Following
from kvherd.services.kv_relay.direct import DirectKvFeed
from kvherd.services.kv_relay.event_streams import EventStreams
from kvherd.services.kv_relay.grpc_edge import refuse
from kvherd.services.kv_relay.relay import KvRelay

OUT = Path(__file__).parent / "out" / "kv_feed.json"
MODEL, WORKER, RANK, KEY = "m", WorkerId("http://engine:1"), Rank(0), b"bench"
HISTORY_TOKENS = 100_000_000
"""So much that no subscriber of a burst is cut off: what is measured is work, not patience."""
DEADLINE_S = 300.0
LAG_GOAL_MS = 5.0
SETTLE_S = 1.0
"""A new connection is proved by replays; what is measured is what comes after."""


# --- who reads ----------------------------------------------------------------------------------------------


@contextmanager
def lags_noted() -> Iterator[list[float]]:
    """How long ago each batch was published when it can be looked up, in seconds."""
    lags_s: list[float] = []
    take = Following.take

    def timed(following: Following, item: KvEventBatch | SnapshotChunk, *, now_s: float) -> None:
        take(following, item, now_s=now_s)
        if isinstance(item, KvEventBatch):
            lags_s.append(time.time() - item.timestamp_s)

    with patch.object(Following, "take", timed):
        yield lags_s


@cache
def chain_names(chain: int) -> list[Any]:
    return prefix_chain(tokens_of(chain), block_size=SIZE, model=MODEL, key=KEY)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await holds():  # noqa: ASYNC110 (a look-up is what is measured)
            await asyncio.sleep(0.005)


@asynccontextmanager
async def followed(feed: KvFeed) -> AsyncIterator[Callable[[int], Awaitable[bool]]]:
    index = PrefixIndex(PrefixHasher(KEY))
    async with Followers(index) as followers:
        followers.add(WORKER, feed, model=MODEL)

        async def visible(chain: int) -> bool:
            return followers.match(chain_names(chain)).get(Holder(WORKER, RANK), 0) == CHAIN

        yield visible


def frames(events: str, replay: str) -> dict[Rank, ZmqFrameFeed]:
    return {RANK: ZmqFrameFeed(events, replay)}


async def measure(visible: Callable[[int], Awaitable[bool]], last: int, lags_s: list[float], *, lag: bool) -> None:
    """Ready once the marker is seen; told to go, take the time until the last chain is."""
    await until(lambda: visible(MARKER))
    await asyncio.sleep(SETTLE_S)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    lags_s.clear()
    begin_s, begin_cpu_s = time.monotonic(), cpu_s()
    await until(lambda: visible(last))
    seconds, used_s = time.monotonic() - begin_s, cpu_s() - begin_cpu_s
    print(json.dumps({"seconds": seconds, "cpu_s": used_s, "lags_ms": [1000 * one for one in lags_s] if lag else []}))


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def read(feed: KvFeed, last: int, *, lag: bool) -> None:
    noted: AbstractContextManager[list[float]] = lags_noted() if lag else nullcontext([])
    with noted as lags_s:
        async with followed(feed) as visible:
            await measure(visible, last, lags_s, lag=lag)


async def serve_bridge(events: str, replay: str) -> None:
    """The bridge's own parts, without an engine to pass calls to."""
    from kvherd.services.kv_relay.relay import RelayOptions  # noqa: PLC0415 - only this role needs it

    async with AsyncExitStack() as stack:
        relay = await stack.enter_async_context(
            KvRelay(frames(events, replay), options=RelayOptions(history_tokens=HISTORY_TOKENS))
        )
        streams = EventStreams(relay)

        async def subscribe(request: pb.SubscribeKvEventsRequest, context: Any) -> None:  # noqa: ANN401 - grpc has no types
            try:
                await streams.serve(request.start_sequence_number, context)
            except KvherdError as error:  # a follower tells a refusal from a broken connection by its status
                await refuse(context, error)

        _, service, call = METHODS[0].split("/")
        handler = grpc.unary_stream_rpc_method_handler(
            subscribe,
            request_deserializer=pb.SubscribeKvEventsRequest.FromString,
            response_serializer=pb.KvEventBatch.SerializeToString,
        )
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {call: handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        begin_cpu_s = cpu_s()
        print(json.dumps(port), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print(json.dumps({"cpu_s": cpu_s() - begin_cpu_s}), flush=True)
        streams.close()
        await server.stop(0)


async def read_peer(events: str, last: int) -> None:
    from dynamo._core import SelectionService  # type: ignore[import-not-found]  # noqa: PLC0415 - installed for this alone

    service = SelectionService(indexer_threads=1)
    await service.upsert_worker(
        {
            "worker_id": 1,
            "model_name": MODEL,
            "block_size": SIZE,
            "endpoint": "http://127.0.0.1:1",
            "kv_events_endpoint": events,
        }
    )

    async def visible(chain: int) -> bool:
        told = await service.overlap_scores({"model_name": MODEL, "token_ids": tokens_of(chain)})
        return any(one["device_blocks"] == CHAIN for one in told["workers"])

    await measure(visible, last, [], lag=False)
    await service.shutdown_async()


async def receive_only(events: str) -> None:
    """The lag of the sockets alone."""
    import zmq.asyncio  # noqa: PLC0415 - only this role needs it

    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as sub:
        sub.subscribe(b"")
        sub.connect(events)
        await sub.recv_multipart()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        lags_ms: list[float] = []
        with suppress(TimeoutError):
            while True:
                async with asyncio.timeout(1.0):
                    parts = await sub.recv_multipart()
                (stamped_s, _, _) = msgspec.msgpack.decode(parts[2], type=tuple[float, msgspec.Raw, int])
                lags_ms.append(1000 * (time.time() - stamped_s))
        print(json.dumps({"lags_ms": lags_ms[1:]}))


# --- the run ------------------------------------------------------------------------------------------------


class Role:
    """This file in another role, as a process: lines out, lines in."""

    def __init__(self, *words: str) -> None:
        self._words = " ".join(words)
        environment = os.environ | {"DYN_LOG": "error", "RUST_LOG": "error"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def line(self) -> Any:  # noqa: ANN401 - JSON
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise SystemExit(f"{self._words} ended early")
        return text.strip() if text[:1].isalpha() else json.loads(text)

    def go(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()

    def end(self) -> None:
        self.go()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(timeout=30)


def run(reader: str, *, blocks: int, batch: int, rate: float = 0.0, seconds: float = 0.0) -> dict[str, Any]:
    publisher = Role("--publish", str(blocks), str(batch), str(rate), str(seconds))
    events, replay = publisher.line()
    total = int(rate * seconds) * batch if rate else blocks
    last, lag = str(total // CHAIN - 1), "lag" if rate else "-"
    bridge: Role | None = None
    if reader == "bridge":
        bridge = Role("--bridge", events, replay)
        follower = Role("--follow", f"127.0.0.1:{bridge.line()}", last, lag)
    elif reader == "direct":
        follower = Role("--direct", events, replay, last, lag)
    elif reader == "peer":
        follower = Role("--peer", events, last)
    else:
        follower = Role("--bare", events)
    assert follower.line() == "ready"
    follower.go()
    publisher.go()
    told: dict[str, Any] = follower.line()
    follower.end()
    if bridge is not None:
        bridge.go()
        told["bridge_cpu_s"] = bridge.line()["cpu_s"]
        bridge.end()
    publisher.end()
    return told


def throughput(blocks: int, rounds: int) -> list[dict[str, Any]]:
    rows = []
    print(f"{'batch':>5}  {'reader':<7} {'blocks/s':>10} {'µs CPU/block':>13}  rate ÷ peer  CPU ÷ peer")
    for batch in (1, 8, 64):
        figures: dict[str, list[dict[str, float]]] = {"peer": [], "direct": [], "bridge": []}
        for _ in range(rounds):
            for reader, seen in figures.items():
                seen.append(run(reader, blocks=blocks, batch=batch))
        peer = middle(figures["peer"], blocks)
        for reader, seen in figures.items():
            rate, cpu = middle(seen, blocks)
            rows.append({"batch": batch, "reader": reader, "blocks_per_s": rate, "cpu_us_per_block": cpu})
            ratios = "" if reader == "peer" else f"{rate / peer[0]:>11.2f}x {cpu / peer[1]:>10.1f}x"
            print(f"{batch:>5}  {reader:<7} {rate:>10,.0f} {cpu:>13.1f}  {ratios}", flush=True)
    return rows


def middle(seen: list[dict[str, float]], blocks: int) -> tuple[float, float]:
    """Median blocks a second, and microseconds of processor time a block, of all reading processes."""
    rate = statistics.median(blocks / one["seconds"] for one in seen)
    cpu = statistics.median((one["cpu_s"] + one.get("bridge_cpu_s", 0.0)) / blocks * 1e6 for one in seen)
    return rate, cpu


def lags(seconds: float) -> dict[str, list[float]]:
    print(f"\nlag at 1,000 batches of 8 blocks a second, ms (goal: p99 of direct ≤ {LAG_GOAL_MS:g})")
    print(f"{'reader':<14} {'p50':>7} {'p99':>7} {'worst':>8}")
    told: dict[str, list[float]] = {}
    for reader in ("sockets alone", "direct", "bridge"):
        found = sorted(run(reader, blocks=0, batch=8, rate=1000.0, seconds=seconds)["lags_ms"])
        told[reader] = [found[len(found) // 2], found[int(len(found) * 0.99)], found[-1]]
        print(f"{reader:<14} {told[reader][0]:>7.2f} {told[reader][1]:>7.2f} {told[reader][2]:>8.2f}", flush=True)
    return told


def main(blocks: int, lag_s: float, rounds: int) -> None:
    rows = throughput(blocks, rounds)
    told = {"blocks": blocks, "throughput": rows, "lag_ms": lags(lag_s)}
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(told, indent=2), encoding="utf-8")


def play(role: str, words: list[str]) -> None:
    if role in {"--direct", "--bridge", "--follow"}:
        prepare_process()  # as the gateway and the bridge do
    match role, words:
        case "--publish", [blocks, batch, rate, seconds]:
            publish(int(blocks), int(batch), float(rate), float(seconds))
        case "--direct", [events, replay, last, lag]:
            uvloop.run(read(DirectKvFeed(lambda: frames(events, replay)), int(last), lag=lag == "lag"))
        case "--bridge", [events, replay]:
            uvloop.run(serve_bridge(events, replay))
        case "--follow", [target, last, lag]:
            uvloop.run(read(GrpcKvFeed(target), int(last), lag=lag == "lag"))
        case "--peer", [events, last]:
            asyncio.run(read_peer(events, int(last)))
        case "--bare", [events]:
            uvloop.run(receive_only(events))
        case _:
            raise SystemExit(f"no role {role} {words}")


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in {
        "--publish",
        "--direct",
        "--bridge",
        "--follow",
        "--peer",
        "--bare",
    }:
        play(sys.argv[1], sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--blocks", type=int, default=64_000)
        parser.add_argument("--lag-s", type=float, default=5.0)
        parser.add_argument("--rounds", type=int, default=3)
        given = parser.parse_args()
        main(given.blocks // CHAIN * CHAIN, given.lag_s, given.rounds)
