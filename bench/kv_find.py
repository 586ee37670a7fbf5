"""Look-ups in the index and the hashing of prompts, beside a compiled peer's.

    .venv/bin/python bench/kv_find.py [--rounds 5]

Each worker holds the first so many blocks of one prompt, a different number each; a look-up says how many of each. The
peer is `RadixTree` of ai-dynamo-runtime, and its `compute_block_hash_for_seq`. Processor time of one call, the least of
several rounds, in turns. Prints tables with the ratio to the peer, writes bench/out/kv_find.json. The index is pure
Python: it is what a compiled one starts from.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamo._core import (  # type: ignore[import-not-found,unused-ignore]
    RadixTree,
    compute_block_hash_for_seq,
)

from kvherd.core.ids import EngineHash, Rank, WorkerId
from kvherd.core.kv.events import BlocksStored
from kvherd.core.kv.hashing import PrefixHasher, prefix_chain
from kvherd.core.kv.index import Holder, PrefixIndex

OUT = Path(__file__).parent / "out" / "kv_find.json"
SIZE, MODEL, KEY = 16, "m", b"bench"
DEPTHS, WORKERS, PROMPTS = (64, 512, 4096), (8, 64, 512), (8_192, 131_072)
CALL_S = 0.05
"""About how long each round of calls takes."""


def tokens(count: int) -> list[int]:
    return [(position * 31) % 50_000 for position in range(count)]


def held_by(worker: int, workers: int, blocks: int) -> int:
    return max(1, blocks * (worker + 1) // workers)


def index_call(blocks: int, workers: int) -> tuple[Callable[[], object], list[int]]:
    index = PrefixIndex(PrefixHasher(KEY))
    for number in range(workers):
        count, worker = held_by(number, workers, blocks), WorkerId(f"http://w{number}")
        hashes = tuple(EngineHash(block + 1) for block in range(count))
        index.enrol(worker, model=MODEL)
        index.apply_events(Holder(worker, Rank(0)), [BlocksStored(hashes, None, tuple(tokens(count * SIZE)), SIZE)])
    chain = prefix_chain(tokens(blocks * SIZE), block_size=SIZE, model=MODEL, key=KEY)
    return lambda: index.match(chain), sorted(index.match(chain).values())


def peer_call(blocks: int, workers: int) -> tuple[Callable[[], object], list[int]]:
    tree = RadixTree()
    local = compute_block_hash_for_seq(tokens(blocks * SIZE), SIZE)
    for number in range(workers):
        count = held_by(number, workers, blocks)
        told = [{"block_hash": block + 1, "tokens_hash": local[block]} for block in range(count)]
        event = {"event_id": 0, "data": {"stored": {"parent_hash": None, "blocks": told}}, "dp_rank": 0}
        tree.apply_event(number, json.dumps(event).encode())
    return lambda: tree.find_matches(local), sorted(tree.find_matches(local).scores.values())


def call_us(call: Callable[[], object], calls: int) -> float:
    begin_s = time.process_time()
    for _ in range(calls):
        call()
    return (time.process_time() - begin_s) / calls * 1e6


def compared(ours: Callable[[], object], peers: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Microseconds of a call of each; other work on the machine only ever adds to them."""
    counts = [max(1, int(CALL_S * 1e6 / max(call_us(one, 2), 1.0))) for one in (ours, peers)]
    seen = [(call_us(ours, counts[0]), call_us(peers, counts[1])) for _ in range(rounds)]
    return min(one for one, _ in seen), min(one for _, one in seen)


def main(rounds: int) -> None:
    rows: list[dict[str, Any]] = []
    print(f"{'what':<22} {'kvherd µs':>10} {'peer µs':>10}  time ÷ peer")

    def row(what: str, ours: Callable[[], object], peers: Callable[[], object]) -> None:
        own_us, peer_us = compared(ours, peers, rounds)
        rows.append({"what": what, "kvherd_us": own_us, "peer_us": peer_us})
        print(f"{what:<22} {own_us:>10.1f} {peer_us:>10.1f} {own_us / peer_us:>11.2f}x", flush=True)

    for blocks in DEPTHS:
        for workers in WORKERS:
            ours, found = index_call(blocks, workers)
            peers, told = peer_call(blocks, workers)
            assert found == told, "the two do not agree"
            row(f"find {blocks} × {workers}", ours, peers)
    for count in PROMPTS:
        prompt = tokens(count)
        row(
            f"hash {count} tokens",
            lambda prompt=prompt: prefix_chain(prompt, block_size=SIZE, model=MODEL, key=KEY),  # type: ignore[misc]
            lambda prompt=prompt: compute_block_hash_for_seq(prompt, SIZE),  # type: ignore[misc]
        )
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(rows, indent=2), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    main(parser.parse_args().rounds)
