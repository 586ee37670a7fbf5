"""Memory of what is known of KV caches: the index, the relay's state, and a peer's tree, in bytes a block.

    .venv/bin/python bench/kv_memory.py [--blocks 300000]

Each in a process of its own, by the growth of its resident memory: blocks of 16 tokens in chains of 64, held by one
worker, and the same ones held by eight. The peer is `RadixTree` of ai-dynamo-runtime. Prints a table, writes
bench/out/kv_memory.json.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from kvherd.core.ids import EngineHash, Rank, WorkerId
from kvherd.core.kv.events import BlocksStored
from kvherd.core.kv.hashing import PrefixHasher
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.core.kv.live_state import LiveState

OUT = Path(__file__).parent / "out" / "kv_memory.json"
SIZE, CHAIN, SHARERS = 16, 64, 8


def stores(worker: int, chains: int) -> Iterator[BlocksStored]:
    """The same prefixes for every worker, under hashes of its own."""
    for chain in range(chains):
        hashes = tuple(
            EngineHash(((chain + 2) * 1_000_003 + number) * 2_654_435_761 % 2**64 ^ worker) for number in range(CHAIN)
        )
        tokens = tuple((chain * 7919 + at * 31) % 50_000 if at else chain for at in range(CHAIN * SIZE))
        yield BlocksStored(hashes, None, tokens, SIZE)


def fill_index(workers: int, chains: int) -> object:
    index = PrefixIndex(PrefixHasher(b"bench"))
    for number in range(workers):
        worker = WorkerId(f"http://w{number}")
        index.enrol(worker, model="m")
        index.apply_events(Holder(worker, Rank(0)), stores(number, chains))
    return index


def fill_relay(workers: int, chains: int) -> object:
    states = [LiveState() for _ in range(workers)]
    for number, state in enumerate(states):
        state.apply(stores(number, chains))
    return states


def fill_peer(workers: int, chains: int) -> object:
    from dynamo._core import (  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415 - installed for this alone
        RadixTree,
        compute_block_hash_for_seq,
    )

    tree = RadixTree()
    for worker in range(workers):
        for number, store in enumerate(stores(worker, chains)):
            local = compute_block_hash_for_seq(list(store.token_ids), SIZE)
            pairs = zip(store.block_hashes, local, strict=True)
            blocks = [{"block_hash": own, "tokens_hash": tokens} for own, tokens in pairs]
            event = {"event_id": number, "data": {"stored": {"parent_hash": None, "blocks": blocks}}, "dp_rank": 0}
            tree.apply_event(worker, json.dumps(event).encode())
    return tree


FILLS: dict[str, Callable[[int, int], object]] = {"index": fill_index, "relay": fill_relay, "peer": fill_peer}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(what: str, workers: int, blocks: int) -> float:
    """Bytes for each block of each worker."""
    chains = blocks // CHAIN // workers
    FILLS[what](1, 1)  # what is imported for it is not the blocks' memory
    before = resident_bytes()
    kept = FILLS[what](workers, chains)
    grown = resident_bytes() - before
    del kept
    return grown / (chains * CHAIN * workers)


def main(blocks: int) -> None:
    told: dict[str, float] = {}
    print(f"{'what':<7} {'held by':>8} {'bytes a block':>14} {'MB a million':>13}   ÷ peer")
    for workers in (1, SHARERS):
        for what in ("peer", "index", "relay"):
            words = [sys.executable, __file__, "--measure", what, str(workers), "--blocks", str(blocks)]
            told[f"{what} {workers}"] = found = float(subprocess.check_output(words, text=True))
            ratio = found / told[f"peer {workers}"]
            print(f"{what:<7} {workers:>8} {found:>14.0f} {found:>13.0f}   {ratio:.2f}x", flush=True)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"blocks": blocks, "bytes_per_block": told}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=300_000)
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "WORKERS"))
    given = parser.parse_args()
    if given.measure:
        print(measure(given.measure[0], int(given.measure[1]), given.blocks))
    else:
        main(given.blocks)
