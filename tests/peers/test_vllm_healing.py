"""A stock vLLM that was at work before anyone followed it: credit comes back by traffic, and is true.

`make test-vllm` installs it and runs these tests.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvherd.testing.herds import GatewayProcess, Start, begin_gateway
from kvherd.testing.processes import KvherdProcess, free_ports, wait_until
from kvherd.testing.stock_engines import MODEL, StockEngine, StockServer, vllm
from kvherd.testing.stock_herds import chat, chat_until_exact, is_live, kv_of, truth_of
from kvherd.testing.stock_streams import stream_of

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]

CHATS = [
    [{"role": "system", "content": f"You are {name}. " * 20}, {"role": "user", "content": "Who are you?"}]
    for name in ("Ann", "Bob", "Cat")
]


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StockServer, Start]]:
    """An engine that holds chats which its replay does not reach back to."""
    sockets: Path = tmp_path_factory.mktemp("v")
    port = free_ports((0,))
    server = vllm(port, events=f"ipc://{sockets}/events", replay=f"ipc://{sockets}/replay", replay_batches=5)
    with ExitStack() as stack:
        StockEngine(server, stack.enter_context).await_ready()
        for messages in (*CHATS, *([{"role": "user", "content": f"Hello {number}! " * 30}] for number in range(6))):
            body = {"model": MODEL, "messages": messages, "max_tokens": 2}
            assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120).status_code == 200
        yield server, lambda *words: stack.enter_context(KvherdProcess(*words))


def follow(late: tuple[StockServer, Start], *options: str) -> GatewayProcess:
    server, start = late
    gateway = begin_gateway(start, server.direct_worker, up=1, options=options)
    wait_until(lambda: is_live(gateway), within_s=20, what="its events are followed")
    wait_until(lambda: bool(gateway.workers()[0]["tokenization"]), within_s=30, what="its tokens are compared")
    return gateway


def test_chats_from_before_anyone_listened_are_healed_one_by_one(late: tuple[StockServer, Start]) -> None:
    gateway = follow(late)
    wait_until(lambda: kv_of(gateway)["complete"] is False, within_s=5, what="it is known that not all is known")
    for messages in CHATS:
        first, _ = chat(gateway, messages)
        assert first.predicted is not None
        assert first.predicted < first.reported
        chat_until_exact(gateway, messages)
    assert kv_of(gateway)["healings"] >= len(CHATS)
    truth = truth_of(gateway)
    assert truth["wrong"] == 0
    assert truth["decided"] >= 1
    audit = KvherdProcess("audit", "--gateway", gateway.url)
    with audit:
        assert audit.wait(within_s=20) == 0, audit.said


def test_a_sampled_stream_is_what_the_engine_says_unasked(late: tuple[StockServer, Start]) -> None:
    server, _ = late
    gateway = follow(late, "--usage-sample", "1")
    streams: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/chat/completions", {"messages": CHATS[0]}),
        ("/v1/completions", {"prompt": "Once upon a time, " * 10}),
    )
    for path, asked in streams:
        plain = [stream_of(server.url, path, **asked) for _ in range(2)]
        assert plain[0] == plain[1]
        before = judged(gateway)

        def was_sampled(
            path: str = path, asked: dict[str, Any] = asked, said: str = plain[0], before: int = before
        ) -> bool:
            assert stream_of(gateway.url, path, **asked) == said
            return judged(gateway) > before

        wait_until(was_sampled, within_s=60, what="a stream was asked for its usage, and the client did not see it")
    assert truth_of(gateway)["wrong"] == 0


def judged(gateway: GatewayProcess) -> int:
    truth = truth_of(gateway)
    return int(truth["decided"] + truth["undecided"])


def test_an_idle_flush_ends_what_is_not_known(late: tuple[StockServer, Start]) -> None:
    gateway = follow(late, "--heal", "flush")
    wait_until(lambda: kv_of(gateway)["healings"] == 1, within_s=20, what="it is flushed")
    first, _ = chat(gateway, CHATS[0])
    assert (first.predicted, first.reported) == (0, 0)
    wait_until(lambda: kv_of(gateway)["complete"] is True, within_s=5, what="nothing is unknown any more")
    chat_until_exact(gateway, CHATS[0])
