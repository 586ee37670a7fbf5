"""A stock SGLang with pages of one token, its default on CUDA: what the gateway says is true, and how it is healed.

`make test-sglang` installs it and runs these tests.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from kvherd.testing.herds import GatewayProcess, Start, begin_gateway
from kvherd.testing.processes import KvherdProcess, free_ports, wait_until
from kvherd.testing.stock_engines import StockEngine, StockServer, sglang
from kvherd.testing.stock_herds import chat, is_live, kv_of, truth_of
from kvherd.testing.stock_streams import stream_of

pytestmark = [pytest.mark.peers, pytest.mark.timeout(600)]

HELLO = [{"role": "system", "content": "You answer in one word. " * 16}, {"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def stock() -> Iterator[tuple[StockServer, Start]]:
    port = free_ports((0, 1, 2))
    events, replay = (f"tcp://127.0.0.1:{port + offset}" for offset in (1, 2))
    server = sglang(port, events=events, replay=replay, page_size=1, replay_batches=5)
    with ExitStack() as stack:
        StockEngine(server, stack.enter_context).await_ready()
        for number in range(8):
            stream_of(server.url, "/v1/chat/completions", messages=HELLO[:1] + HELLO[1:] * (number + 1))
        yield server, lambda *words: stack.enter_context(KvherdProcess(*words))


def follow(stock: tuple[StockServer, Start], *options: str) -> GatewayProcess:
    server, start = stock
    gateway = begin_gateway(start, server.direct_worker, up=1, options=options)
    wait_until(lambda: is_live(gateway), within_s=20, what="its events are followed")
    wait_until(lambda: bool(gateway.workers()[0]["tokenization"]), within_s=30, what="its tokens are compared")
    return gateway


def test_an_idle_flush_ends_what_is_not_known(stock: tuple[StockServer, Start]) -> None:
    gateway = follow(stock, "--heal", "flush")
    gateway.process.wait_for(lambda: kv_of(gateway)["healings"] == 1, within_s=60, what="it is flushed")
    first, _ = chat(gateway, HELLO)
    assert (first.predicted, first.reported) == (0, 0)
    wait_until(lambda: kv_of(gateway)["complete"] is True, within_s=5, what="nothing is unknown any more")

    def is_predicted() -> bool:
        again, _ = chat(gateway, HELLO)
        assert (again.predicted or 0) <= again.reported
        return again.predicted == again.reported // 16 * 16 > 0

    wait_until(is_predicted, within_s=30, what="what it caches again is predicted")
    truth = truth_of(gateway)
    assert truth["wrong"] == 0
    assert truth["decided"] + truth["undecided"] >= 2


def test_a_sampled_stream_is_what_the_engine_says_unasked(stock: tuple[StockServer, Start]) -> None:
    server, _ = stock
    gateway = follow(stock, "--usage-sample", "1")
    streams: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "Once upon a time, " * 10}),
    )
    for path, asked in streams:
        plain = told(stream_of(server.url, path, **asked))
        before = judged(gateway)

        def was_sampled(
            path: str = path,
            asked: dict[str, Any] = asked,
            said: tuple[str, list[str]] = plain,
            before: int = before,
        ) -> bool:
            assert told(stream_of(gateway.url, path, **asked)) == said
            return judged(gateway) > before

        wait_until(was_sampled, within_s=60, what="a stream was asked for its usage, and the client did not see it")
    assert truth_of(gateway)["wrong"] == 0


def judged(gateway: GatewayProcess) -> int:
    truth = truth_of(gateway)
    return int(truth["decided"] + truth["undecided"])


def told(stream: str) -> tuple[str, list[str]]:
    """The text, and every event without its own: SGLang puts as many tokens into one as it has at that moment."""
    text = re.compile(r'"(content|text)":"([^"]*)"')
    events = [text.sub(r'"\1":…', event) for event in stream.split("\n\n")]
    return "".join(said for _, said in text.findall(stream)), list(dict.fromkeys(events))


def test_what_generate_reports_is_held_against_predictions_too(stock: tuple[StockServer, Start]) -> None:
    gateway = follow(stock)
    wait_until(lambda: chat(gateway, HELLO)[0].predicted is not None, within_s=20, what="its tokenizer is known")
    before = truth_of(gateway)
    for stream in (False, True):
        body = {"text": "Once upon a time, " * 12, "sampling_params": {"max_new_tokens": 4}, "stream": stream}
        assert httpx.post(f"{gateway.url}/generate", json=body, timeout=120).status_code == 200
    truth = truth_of(gateway)
    assert (truth["unavailable"], truth["wrong"]) == (0, 0)
    assert sum(truth[name] - before[name] for name in ("decided", "undecided")) == 2
