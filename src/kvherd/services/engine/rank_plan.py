"""Which ranks an engine has, and where each of them listens."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvherd.wire.rank_config import IPC_PATH_LIMIT, RankConfig

EVENTS_OFFSET = 10
REPLAY_OFFSET = 30
MOST_RANKS = REPLAY_OFFSET - EVENTS_OFFSET
"""More would publish where the first ones replay."""
LONGEST_NAME = len("/rank999.in")


@contextmanager
def ipc_directory() -> Iterator[Path]:
    """A new directory that only its owner may enter, for the sockets between processes; gone when this is left."""
    room = IPC_PATH_LIMIT - LONGEST_NAME - len("/kvherd-12345678")
    parent = tempfile.gettempdir() if len(tempfile.gettempdir().encode()) <= room else "/tmp"
    path = Path(tempfile.mkdtemp(prefix="kvherd-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def rank_configs(
    model: str,
    *,
    ranks: int,
    port: int,
    ipc_dir: Path,
    threads: int = 1,
    pool_blocks: int = 1024,
    chunk_tokens: int = 512,
    max_running: int = 32,
    max_waiting: int = 1024,
    max_context_tokens: int | None = None,
    seed: int = 0,
) -> list[RankConfig]:
    """One configuration a rank of the engine at `port`, which is also where KV events and replays are counted from.

    With port 0 the kernel chooses every port; each rank tells its own in `RankFacts`.
    """
    return [
        RankConfig(
            model=model,
            rank=rank,
            ipc_dir=str(ipc_dir),
            events_endpoint=f"tcp://127.0.0.1:{port + EVENTS_OFFSET + rank if port else 0}",
            replay_endpoint=f"tcp://127.0.0.1:{port + REPLAY_OFFSET + rank if port else 0}",
            threads=threads,
            pool_blocks=pool_blocks,
            chunk_tokens=chunk_tokens,
            max_running=max_running,
            max_waiting=max_waiting,
            max_context_tokens=max_context_tokens,
            seed=seed,
        )
        for rank in range(ranks)
    ]
