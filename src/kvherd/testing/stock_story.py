"""What must hold with any stock engine that publishes KV events: a suite that its own tests inherit.

They supply the fixture `herd`, whose state every test leaves in working order.
"""

import signal
import sys
from collections import Counter
from itertools import cycle

import httpx
import pytest

from kvherd.testing.processes import wait_until
from kvherd.testing.stock_engines import CACHE_TOKENS, MODEL
from kvherd.testing.stock_herds import StockHerd, Talks, chat, chat_until_exact, is_live, kv_of, settle, truth_of

SYSTEM = {"role": "system", "content": "You answer in one word. " * 16}
HELLO = [SYSTEM, {"role": "user", "content": "Hello!"}]


class StockStory:
    kind: str
    block_size: int

    def test_it_is_known_for_what_it_is_and_followed(self, herd: StockHerd) -> None:
        for gateway in herd.gateways:
            chat(gateway, HELLO)
            (worker,) = gateway.workers()
            assert (worker["kind"], worker["models"]) == (self.kind, [MODEL])
            assert (worker["block_size"], worker["capacity_tokens"]) == (self.block_size, CACHE_TOKENS)
            assert kv_of(gateway)["state"] == "live"
            wait_until(lambda g=gateway: kv_of(g)["blocks"] > 0, within_s=5, what="its blocks are known")  # type: ignore[misc]

    def test_a_hundred_chats_are_predicted_through_evictions_a_flush_and_a_restart(
        self, herd: StockHerd, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Each of the two gateways routes every other chat, and knows of the rest from the events only.

        A prediction is decided where nothing came in between, such as an event of the chat before it, and where the
        engine told last that it runs nothing of others.
        """
        talks = Talks(seed=3, at_once=8)
        turns = cycle(herd.gateways)
        for _ in range(60):
            talks.turn(next(turns))
            settle(*herd.gateways)
        stored = sum(one.prompt_tokens - one.reported for one in talks.answers)
        assert stored > 1.25 * CACHE_TOKENS >= 1.25 * self.block_size * kv_of(herd.bridged)["blocks"], (
            "some were evicted"
        )
        assert herd.flush(herd.bridged, 10)["outcome"] == "done"
        # The other gateway did not order it, and a stock vLLM tells of it with its next step only.
        assert talks.turn(herd.bridged).reported == 0
        for _ in range(29):
            settle(*herd.gateways)
            talks.turn(next(turns))
        herd.restart_engine()
        for number in range(30):
            settle(*herd.gateways)
            answered = talks.turn(next(turns))
            assert number > 0 or (answered.predicted, answered.reported) == (0, 0), "a new process holds nothing"
        told = [truth_of(gateway) for gateway in herd.gateways]
        decided, wrong = (sum(one[name] for one in told) for name in ("decided", "wrong"))
        undecided = sum((Counter(one["undecided_by"]) for one in told), Counter[str]())
        figures = f"{talks.figures()}; {decided} decided, {wrong} of them wrong; undecided: {dict(undecided)}"
        with capsys.disabled():
            sys.stdout.write(f"\n{self.kind}, through the bridge and directly by turns: {figures}\n")
        assert wrong <= 0.01 * decided, figures
        assert decided >= 0.9 * len(talks.answers), figures
        assert sum(one.exact for one in talks.answers) >= 0.95 * len(talks.answers), figures
        assert sum(one.reported > 0 for one in talks.answers) >= 0.5 * len(talks.answers), figures

    def test_an_idle_engine_is_flushed_and_the_next_prompt_predicted_cold(self, herd: StockHerd) -> None:
        for gateway in herd.gateways:
            warm = chat_until_exact(gateway, HELLO)
            assert herd.flush(gateway, 10)["outcome"] == "done"
            first, _ = chat(gateway, HELLO)
            assert (first.predicted, first.reported) == (0, 0)
            assert chat_until_exact(gateway, HELLO).reported == warm.reported

    def test_a_busy_engine_refuses_a_flush_and_obeys_once_it_is_idle(self, herd: StockHerd) -> None:
        chat(herd.bridged, HELLO)
        refused = herd.flush_while_busy(herd.bridged, 0)
        assert refused["outcome"] == "refused", refused
        late = herd.flush_while_busy(herd.bridged, 0.3)
        assert late["outcome"] == "timed_out", late
        wait_until(lambda: herd.engine.running() == 0, within_s=10, what="the engine runs nothing else")
        with herd.generating(herd.bridged, 300) as answer:
            done = herd.flush(herd.bridged, 60)
            assert done["outcome"] == "done", done
            assert "[DONE]" in answer.read().decode(), "the chat was not cut short"
        assert chat(herd.bridged, HELLO)[0].reported == 0

    def test_a_client_that_leaves_ends_its_request_on_the_engine(self, herd: StockHerd) -> None:
        for gateway in herd.gateways:
            with herd.generating(gateway, 900):
                pass
            wait_until(lambda: herd.engine.running() == 0, within_s=10, what="the engine runs nothing")

    def test_an_engine_that_hangs_costs_a_flush_its_time_and_no_more(self, herd: StockHerd) -> None:
        herd.engine.signal(signal.SIGSTOP)
        try:
            result = herd.flush(herd.bridged, 2)
            assert result["outcome"] == "timed_out", result
            assert result["seconds"] < 2 + 5 + 0.5
        finally:
            herd.engine.signal(signal.SIGCONT)
        for gateway in herd.gateways:
            wait_until(lambda g=gateway: is_live(g), within_s=30, what="it is well again")  # type: ignore[misc]
            chat_until_exact(gateway, HELLO)

    def test_a_killed_engine_is_told_at_once_and_comes_back_without_its_past(self, herd: StockHerd) -> None:
        for gateway in herd.gateways:
            chat(gateway, HELLO)
        epochs = herd.epochs()
        herd.engine.kill()
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 2}
        for gateway in herd.gateways:
            answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=10)
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) > 0
            assert herd.engine.server.url in answer.json()["error"]["message"]
            wait_until(lambda g=gateway: g.workers()[0]["state"] == "down", within_s=10, what="it is down")  # type: ignore[misc]
        herd.engine.begin()
        herd.await_return(epochs)
        first, _ = chat(herd.bridged, HELLO)
        assert (first.predicted, first.reported) == (0, 0)
        for gateway in herd.gateways:
            chat_until_exact(gateway, HELLO)

    def test_a_killed_bridge_comes_back_with_what_the_engine_replays(self, herd: StockHerd) -> None:
        chat(herd.bridged, HELLO)
        epoch, _ = herd.epochs()
        herd.bridge.signal(signal.SIGKILL)
        herd.bridge.wait(within_s=5)
        assert not self._credited_too_much(herd)
        herd.begin_bridge()
        wait_until(lambda: herd.epochs()[0] != epoch and is_live(herd.bridged), within_s=30, what="it is followed")
        chat_until_exact(herd.bridged, HELLO)

    def test_a_killed_gateway_knows_again_what_the_engine_holds(self, herd: StockHerd) -> None:
        chat(herd.bridged, HELLO)
        for gateway in herd.gateways:
            again = herd.restart(gateway)
            wait_until(lambda g=again: kv_of(g)["blocks"] > 0, within_s=10, what="the blocks are told again")  # type: ignore[misc]
            chat_until_exact(again, HELLO)

    def _credited_too_much(self, herd: StockHerd) -> bool:
        answered, _ = chat(herd.bridged, HELLO)
        return (answered.predicted or 0) > answered.reported
