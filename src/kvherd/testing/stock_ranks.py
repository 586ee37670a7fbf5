"""What must hold with a stock engine however many ranks it has and however small its pages: a suite that its own tests
inherit.

They supply the fixture `server`, which runs.
"""

import sys

import httpx
import pytest

from kvherd.testing.herds import GatewayProcess, Start, begin_gateway
from kvherd.testing.processes import free_ports
from kvherd.testing.stock_engines import StockServer
from kvherd.testing.stock_herds import LIVE_S, Talks, can_predict, kv_of, settle, truth_of

CHATS = 60


class StockTalks:
    """`block` is what credit goes by where that is not the engine's page."""

    ranks = 1
    block = 1

    def test_chats_are_predicted_through_a_bridge(
        self, server: StockServer, start: Start, capsys: pytest.CaptureFixture[str]
    ) -> None:
        listen = f"127.0.0.1:{free_ports((0,))}"
        start(*server.bridge_words(listen))
        self._talk(begin_gateway(start, f"{server.url},events=grpc://{listen}", up=1), "a bridge", capsys)

    def test_chats_are_predicted_from_the_engine_s_own_sockets(
        self, server: StockServer, start: Start, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._talk(begin_gateway(start, server.direct_worker, up=1), "its own sockets", capsys)

    def _talk(self, gateway: GatewayProcess, way: str, capsys: pytest.CaptureFixture[str]) -> None:
        gateway.process.wait_for(lambda: can_predict(gateway), within_s=LIVE_S, what="it follows the engine")
        (worker,) = gateway.workers()
        assert worker["ranks"] == self.ranks
        talks = Talks(seed=7, block=self.block)
        for number in range(CHATS):
            if number == CHATS // 2:
                (flushed,) = httpx.post(f"{gateway.url}/flush_cache?timeout=10", timeout=30).json()["workers"]
                assert flushed["outcome"] == "done", flushed
                assert kv_of(gateway)["blocks"] == 0
            answered = talks.turn(gateway)
            assert number != CHATS // 2 or (answered.predicted, answered.reported) == (0, 0), "it was flushed"
            settle(gateway)
        truth = truth_of(gateway)
        figures = f"{talks.figures()}; {truth['decided']} decided, {truth['wrong']} of them wrong"
        what = f"{worker['kind']} ({self.ranks} ranks, pages of {worker['block_size']}) through {way}"
        with capsys.disabled():
            sys.stdout.write(f"\n{what}: {figures}\n")
        if self.ranks > 1:
            assert len({one.rank for one in talks.answers}) == self.ranks, "every rank serves"
        assert truth["wrong"] <= 0.01 * truth["decided"], figures
        assert truth["decided"] >= 0.9 * CHATS, figures
        assert sum(one.exact for one in talks.answers) >= 0.95 * CHATS, figures
        assert sum(one.reported > 0 for one in talks.answers) >= 0.5 * CHATS, figures
