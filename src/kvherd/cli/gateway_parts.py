"""What a gateway is put together from, each part with the libraries that it needs, when it is first needed.

A gateway before workers on HTTP needs none of them, and each has its megabytes: tokenizers and jinja2 come with the
first model whose tokenizer is read, zmq with the first engine whose sockets are followed, grpc with the first worker on
gRPC. This module is the only one of the commands where an import may stand in a function.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from kvherd.adapters.http_worker import HttpWorker
from kvherd.adapters.tls import ClientTls, trusting_this_machine
from kvherd.core.fleet.spec import DIRECT, GRPC
from kvherd.core.ids import WorkerId
from kvherd.ports.completions import Tokenizer
from kvherd.ports.kv_feed import EventSource, KvFeed
from kvherd.ports.loop_turn import LoopTurn
from kvherd.ports.worker import Worker

TOKENIZER_DEADLINE_S: Final = 30.0


def worker_at(
    url: str,
    own_key: str | None,
    *,
    engine_api_key: str | None = None,
    tls: ClientTls | None = None,
    turn: LoopTurn | None = None,
) -> Worker:
    if url.startswith(GRPC):
        from kvherd.adapters.grpc_worker import GrpcWorker

        return GrpcWorker(WorkerId(url), tls=tls)
    return HttpWorker(WorkerId(url), url, api_key=own_key or engine_api_key, tls=tls, turn=turn)


def feed_of(source: EventSource, *, tls: ClientTls | None = None) -> KvFeed:
    """Raises `OptionInvalid` for endpoints that cannot be."""
    return _engine_feed(source) if source.direct else _grpc_feed(source, tls)


def _grpc_feed(source: EventSource, tls: ClientTls | None) -> KvFeed:
    from kvherd.adapters.grpc_kv_feed import GrpcKvFeed
    from kvherd.adapters.grpc_url import grpc_target

    address, secured = grpc_target(source.events)
    return GrpcKvFeed(address, tls=(tls or trusting_this_machine()) if secured else None)


def _engine_feed(source: EventSource) -> KvFeed:
    from kvherd.adapters.zmq_endpoints import rank_endpoints, require_apart
    from kvherd.adapters.zmq_kv_feed import ZmqFrameFeed
    from kvherd.services.kv_relay.direct import DirectKvFeed

    live = rank_endpoints(source.events, source.ranks, option="events", listens=source.bind)
    past = rank_endpoints(source.replay, source.ranks, option="replay") if source.replay else {}
    require_apart(live, past)
    return DirectKvFeed(
        lambda: {rank: ZmqFrameFeed(at, past.get(rank), bind_events=source.bind) for rank, at in live.items()}
    )


async def tokenizer_from(source: str, *, tls: ClientTls | None = None) -> Tokenizer:
    """From a worker, or from a directory. Raises a `KvherdError`."""
    if not source.startswith(GRPC):
        return await asyncio.to_thread(_tokenizer_in, Path(source))
    await asyncio.to_thread(prepare, [source])
    from kvherd.adapters.grpc_tokenizer import fetch_tokenizer

    return await fetch_tokenizer(source, TOKENIZER_DEADLINE_S, tls)


def _tokenizer_in(directory: Path) -> Tokenizer:
    from kvherd.adapters.tokenizer import tokenizer_from_directory

    return tokenizer_from_directory(directory)


def prepare(urls: Iterable[str]) -> None:
    """Import what workers and events at these URLs need. It takes up to a second: not to be done on the event loop."""
    for url in urls:
        if url.startswith(GRPC):
            import kvherd.adapters.grpc_kv_feed
            import kvherd.adapters.grpc_worker
        elif url.startswith(DIRECT):
            import kvherd.adapters.zmq_endpoints
            import kvherd.adapters.zmq_kv_feed
            import kvherd.services.kv_relay.direct  # noqa: F401
