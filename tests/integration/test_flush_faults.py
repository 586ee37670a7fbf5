"""Flushes of a real engine at the worst moments: under steady traffic, in a long prefill, while blocks are copied."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from kvherd.testing.engine_client import Address, EngineClient, fresh_prompt
from kvherd.testing.engines_under_test import ENDLESS
from kvherd.testing.herds import begin_engine
from kvherd.testing.processes import KvherdProcess

pytestmark = pytest.mark.engine

PER_SECOND = 60
TIERS = ("--kv-tokens", "2048", "--host-kv-tokens", "16384", "--chunk-tokens", "64")
PROMPT_TOKENS = 1500


@contextmanager
def begun(*options: str) -> Iterator[EngineClient]:
    with ExitStack() as stack:
        process = begin_engine(lambda *words: stack.enter_context(KvherdProcess(*words)), *options)
        yield stack.enter_context(EngineClient(Address("127.0.0.1", process.port, process.port + 1)))


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineClient]:
    with begun(*ENDLESS, "--chunk-tokens", "64") as engine:
        yield engine


@pytest.fixture(scope="module")
def tiered() -> Iterator[EngineClient]:
    """One long prompt fills its cache, the next pushes that out to the host."""
    with begun(*TIERS) as engine:
        yield engine


def flush(engine: EngineClient, timeout_s: float, *, hold: bool = False) -> httpx.Response:
    url = f"{engine.sidecar_url}/flush_cache?timeout={timeout_s:g}&hold={str(hold).lower()}"
    return httpx.post(url, timeout=timeout_s + engine.patience_s)


@contextmanager
def steady_traffic(engine: EngineClient) -> Iterator[list[Future[int]]]:
    """Sixty requests a second from here on, as far as the machine can send them; how many tokens each was given."""
    done = threading.Event()
    asked: list[Future[int]] = []

    def one() -> int:
        return int(engine.complete(fresh_prompt(40), tokens=12).completion_tokens)

    def ask() -> None:
        while not done.wait(1 / PER_SECOND):
            if sum(not each.done() for each in asked) < 200:  # or else the machine cannot keep up
                asked.append(pool.submit(one))

    with ThreadPoolExecutor(201) as pool:
        asking = pool.submit(ask)
        try:
            engine.until(lambda: len(asked) > PER_SECOND // 2, "requests come")
            yield asked
        finally:
            done.set()
            asking.result()
    assert {each.result() for each in asked} == {12}


# --- traffic -----------------------------------------------------------------------------------


def test_a_flush_expires_at_its_time_where_one_answer_runs_and_nobody_else_comes(engine: EngineClient) -> None:
    with engine.running():
        began_s = time.monotonic()
        answer = flush(engine, 0.5)
        took_s = time.monotonic() - began_s
    assert (answer.status_code, answer.json()["timed_out"]) == (400, True)
    assert 0.5 <= took_s < 10


def test_a_flush_expires_at_its_time_under_sixty_requests_a_second_which_are_all_answered(engine: EngineClient) -> None:
    with steady_traffic(engine), engine.running():
        began_s = time.monotonic()
        answer = flush(engine, 1.0)
        took_s = time.monotonic() - began_s
    assert (answer.status_code, answer.json()["timed_out"]) == (400, True)
    assert 1.0 <= took_s < 11


def test_a_flush_that_holds_is_done_under_sixty_requests_a_second_which_are_all_answered(engine: EngineClient) -> None:
    prompt = fresh_prompt()
    engine.complete(prompt)
    with steady_traffic(engine) as asked:
        answer = flush(engine, 60, hold=True)
        before = len(asked)
        engine.until(lambda: len(asked) > before + PER_SECOND // 2, "requests go on")
    assert answer.status_code == 200, answer.text
    assert engine.complete(prompt).cached_tokens == 0


# --- what is busy besides running answers ---------------------------------------------------------------------------


def test_a_flush_in_a_long_prefill_is_refused_expires_and_is_done_after_it(engine: EngineClient) -> None:
    """The prompt is computed in hundreds of pieces; no piece is a moment at which the engine is idle."""
    prompt = fresh_prompt(50_000)
    with ThreadPoolExecutor(1) as pool:
        call = engine.generate(prompt, tokens=2)
        engine.until(lambda: engine.requests() == 1, "it has begun")
        now, later = flush(engine, 0), flush(engine, 0.2)
        waiting = pool.submit(flush, engine, 60)
        assert (now.status_code, later.status_code) == (400, 400)
        assert "running" in now.json()["message"]
        call.cancel()
        assert waiting.result().status_code == 200
    assert engine.complete(prompt[:200], tokens=1).cached_tokens == 0


def test_a_flush_while_blocks_are_written_to_the_host_leaves_nothing_there(tiered: EngineClient) -> None:
    """Whatever it meets: it is done, or says that blocks are being written; then they are gone from both tiers."""
    for _ in range(10):
        prompt = fresh_prompt(PROMPT_TOKENS)
        tiered.complete(prompt, tokens=1)
        at_once = flush(tiered, 0)
        if at_once.status_code != 200:
            assert "writing" in at_once.json()["message"]
            assert flush(tiered, 20).status_code == 200
        assert tiered.complete(prompt, tokens=1).cached_tokens == 0
        assert tiered.loads()[0].num_running_reqs == 0


def test_a_flush_while_blocks_are_loaded_back_waits_for_the_answer_and_leaves_nothing(tiered: EngineClient) -> None:
    """
    1. A prompt is computed, and pushed out to the host by another.
    2. It is asked for again, so that its blocks are loaded back, and a flush comes meanwhile.
    3. The answer comes whole, and after the flush nothing is cached.
    """
    for _ in range(5):
        assert flush(tiered, 20).status_code == 200
        prompt = fresh_prompt(PROMPT_TOKENS)
        tiered.complete(prompt, tokens=8)
        tiered.complete(fresh_prompt(PROMPT_TOKENS), tokens=8)
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(tiered.complete, prompt, tokens=8)
            assert flush(tiered, 20).status_code == 200
            assert again.result().completion_tokens == 8
        assert flush(tiered, 20).status_code == 200
        assert tiered.complete(prompt, tokens=1).cached_tokens == 0
