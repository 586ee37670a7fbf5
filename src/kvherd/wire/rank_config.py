"""How a scheduler process is told what to be: one JSON line on its standard input."""

from typing import Annotated

import msgspec

from kvherd.core.errors import OptionInvalid

Count = Annotated[int, msgspec.Meta(ge=1)]
Endpoint = Annotated[str, msgspec.Meta(pattern="^(tcp|ipc)://.+")]

IPC_PATH_LIMIT = 107
"""What the kernel allows for the path of a Unix socket, in bytes."""


class RankConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank of an embedded engine. `model` is `tiny` or the path of a GGUF.

    `threads` is for the launcher, which sets OPENBLAS_NUM_THREADS before the process starts. `port_option` is the
    option that an operator would change when a port of this rank is in use. `storage_dir` empty is no store of blocks.
    """

    model: str
    rank: Annotated[int, msgspec.Meta(ge=0)] = 0
    ipc_dir: str
    events_endpoint: Endpoint
    replay_endpoint: Endpoint
    events_topic: str = "kv-events"
    port_option: str = "--port"
    block_size: Count = 16
    pool_blocks: Count = 1024
    host_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    storage_dir: str = ""
    storage_bytes: Count = 1 << 32
    max_context_tokens: Count | None = None
    max_running: Count = 32
    max_waiting: Count = 1024
    chunk_tokens: Count = 512
    replay_batches: Count = 10_000
    threads: Count = 1
    seed: int = 0

    @property
    def orders_endpoint(self) -> str:
        """Where the rank listens to its servicer."""
        return f"ipc://{self.ipc_dir}/rank{self.rank}.in"

    @property
    def news_endpoint(self) -> str:
        """Where the servicer listens to all ranks."""
        return f"ipc://{self.ipc_dir}/out"


def encode_rank_config(config: RankConfig) -> bytes:
    """One line, its end included."""
    return msgspec.json.encode(config) + b"\n"


def decode_rank_config(line: bytes) -> RankConfig:
    """Read and check it. Raises `OptionInvalid`, naming what is wrong."""
    try:
        config = msgspec.json.decode(line, type=RankConfig)
    except msgspec.MsgspecError as error:
        raise OptionInvalid("rank configuration", str(error)) from error
    if config.chunk_tokens < config.block_size:
        raise OptionInvalid(
            "chunk_tokens",
            f"{config.chunk_tokens} is less than the block size {config.block_size}; give it at least that",
        )
    path = config.orders_endpoint.removeprefix("ipc://")
    if len(path.encode()) > IPC_PATH_LIMIT:
        raise OptionInvalid("ipc_dir", f"{path} is longer than the {IPC_PATH_LIMIT} bytes of a Unix socket's path")
    return config
