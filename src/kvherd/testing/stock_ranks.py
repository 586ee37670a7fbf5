"""What must hold with any stock engine of two data-parallel ranks: a suite that its own tests inherit.

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


class StockRanks:
    def test_chats_are_predicted_by_rank_through_a_bridge(
        self, server: StockServer, start: Start, capsys: pytest.CaptureFixture[str]
    ) -> None:
        listen = f"127.0.0.1:{free_ports((0,))}"
        start(*server.bridge_words(listen))
        self._talk(begin_gateway(start, f"{server.url},events=grpc://{listen}", up=1), "a bridge", capsys)

    def test_chats_are_predicted_by_rank_from_the_engine_s_own_sockets(
        self, server: StockServer, start: Start, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._talk(begin_gateway(start, server.direct_worker, up=1), "its own sockets", capsys)

    def _talk(self, gateway: GatewayProcess, way: str, capsys: pytest.CaptureFixture[str]) -> None:
        gateway.process.wait_for(lambda: can_predict(gateway), within_s=LIVE_S, what="it follows the engine")
        (worker,) = gateway.workers()
        assert worker["ranks"] == 2
        talks = Talks(seed=7)
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
        with capsys.disabled():
            sys.stdout.write(f"\n{worker['kind']} with two ranks, through {way}: {figures}\n")
        assert {one.rank for one in talks.answers} == {"0", "1"}, "both ranks serve"
        assert truth["wrong"] <= 0.01 * truth["decided"], figures
        assert truth["decided"] >= 0.9 * CHATS, figures
        assert sum(one.exact for one in talks.answers) >= 0.95 * CHATS, figures
        assert sum(one.reported > 0 for one in talks.answers) >= 0.5 * CHATS, figures
