"""A worker's tokenizer, fetched from the worker itself by `GetTokenizer`."""

import asyncio
import hashlib
import threading
from typing import Any, Final
from weakref import WeakValueDictionary

import grpc.aio
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2_grpc, vllm_engine_pb2_grpc

from kvherd.adapters.grpc_channel import open_channel, rpc_errors
from kvherd.adapters.tls import ClientTls
from kvherd.adapters.tokenizer import ARCHIVE_LIMIT_BYTES, ModelTokenizer, tokenizer_from_zip
from kvherd.core.errors import KvherdError, WorkerError, WorkerFailed, WorkerTimedOut, WorkerUnsupported
from kvherd.core.ids import WorkerId

_living: Final[WeakValueDictionary[str, ModelTokenizer]] = WeakValueDictionary()
"""By the digest of the archive: a fleet of one model has one tokenizer, not one a worker of 15 MB or more each."""
_building: Final = threading.Lock()


async def fetch_tokenizer(target: str, deadline_s: float, tls: ClientTls | None = None) -> ModelTokenizer:
    """The tokenizer of the engine at that target of `open_channel`. Raises `WorkerError`."""
    worker = WorkerId(target if "://" in target else f"grpc://{target}")
    channel = open_channel(target, tls)
    try:
        async with asyncio.timeout(deadline_s):
            return await tokenizer_over(channel, worker)
    except TimeoutError:
        raise WorkerTimedOut(worker, deadline_s) from None
    finally:
        await channel.close()


async def tokenizer_over(channel: grpc.aio.Channel, worker: WorkerId) -> ModelTokenizer:
    """As `fetch_tokenizer`, on a channel that is open already. The deadline is the caller's."""
    try:
        archive, digest = await _archive(sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel), worker)
    except WorkerUnsupported:
        archive, digest = await _archive(vllm_engine_pb2_grpc.VllmEngineStub(channel), worker)
    # unpacking and building take a few hundred milliseconds
    return await asyncio.to_thread(_checked, worker, bytes(archive), digest)


async def _archive(stub: Any, worker: WorkerId) -> tuple[bytearray, str]:  # noqa: ANN401 - generated stubs have no types
    """With the digest that came with it."""
    archive, digest = bytearray(), ""
    with rpc_errors(worker, "GetTokenizer"):
        call = stub.GetTokenizer(common_pb2.GetTokenizerRequest())
        try:
            async for chunk in call:
                archive += chunk.data
                digest = chunk.sha256 or digest
                if len(archive) > ARCHIVE_LIMIT_BYTES:
                    raise WorkerFailed(worker, f"its tokenizer is larger than {ARCHIVE_LIMIT_BYTES} bytes")
        finally:
            call.cancel()
    return archive, digest


def _checked(worker: WorkerId, archive: bytes, digest: str) -> ModelTokenizer:
    if hashlib.sha256(archive).hexdigest() != digest.lower():
        raise WorkerFailed(worker, "its tokenizer arrived damaged: the SHA-256 differs")
    try:
        with _building:  # workers of one model come together; it takes less than a second
            made = _living.get(digest.lower())
            if made is None:
                made = _living[digest.lower()] = tokenizer_from_zip(archive)
            return made
    except WorkerError:
        raise
    except KvherdError as error:
        raise WorkerFailed(worker, f"its tokenizer cannot be used: {error}") from error
