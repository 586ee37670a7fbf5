"""`kvherd doctor` before a stock SGLang that has nothing wrong, and before some that have: what it says is true.

`make test-sglang` installs it and runs these tests.
"""

from pathlib import Path

import pytest

from kvherd.testing.doctors import OWN, PROBLEM, UNKNOWN, WARNING, Told, examined, model_with_template, running
from kvherd.testing.processes import free_ports
from kvherd.testing.stock_engines import StockServer, sglang

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1200)]


# As seen with 0.5.23: a content of parts gives it other tokens, and its /tokenize takes no prefilled answer.
ITS_WAYS = {"tokenization: parts": WARNING, "tokenization: prefilled answer": UNKNOWN}


def found(told: Told) -> dict[str, str]:
    """What is not fine, but for its ways."""
    return {check: verdict for check, verdict in told.but_ok().items() if ITS_WAYS.get(check) != verdict}


def server_at(port: int, *, replays: bool = True, poor: bool = False) -> StockServer:
    return sglang(
        port,
        events=f"tcp://127.0.0.1:{port + 1}",
        replay=f"tcp://127.0.0.1:{port + 3}" if replays else None,
        report=not poor,
        options=("--api-key", "sesame") if poor else (),
    )


def test_one_with_nothing_wrong_and_what_an_operator_may_get_wrong_of_it(tmp_path: Path) -> None:
    port = free_ports((0, 1, 2, 3))
    with running(server_at(port)) as server:
        told = examined(server.url, *OWN)
        assert (told.status, found(told)) == (0, {}), told
        told = examined(server.url, *OWN, "--events", server.events, "--replay", server.replay or "")
        assert (told.status, found(told)) == (0, {}), told
        told = examined(server.url, *OWN, "--events", server.events, "--bind-events")
        assert found(told) == {"KV events": PROBLEM}, told
        told = examined(server.url, *OWN, "--events", f"tcp://127.0.0.1:{port + 2}")
        assert found(told) == {"KV events": PROBLEM}, told
        assert server.events in told.seen("KV events")
        told = examined(server.url, "--tokenizer", str(model_with_template(tmp_path)))
        assert told.checks["tokenization: chat"][0] == PROBLEM, told
        told = examined(server.url)
        assert found(told) == {"tokenizer": PROBLEM, "tokenization": UNKNOWN}, told


def test_one_that_wants_a_key_tells_little_and_keeps_no_replay() -> None:
    with running(server_at(free_ports((0, 1, 2, 3)), replays=False, poor=True)) as server:
        told = examined(server.url, *OWN)
        assert (told.status, found(told)) == (1, {"API key": PROBLEM}), told
        told = examined(server.url, *OWN, key="wrong")
        assert "does not accept" in told.seen("API key")
        told = examined(server.url, *OWN, key="sesame")
        assert (told.status, found(told)) == (0, {"replay": WARNING, "cached tokens": WARNING}), told
        assert "replay_endpoint" in told.advice("replay")
        assert "--enable-cache-report" in told.advice("cached tokens")


def test_one_whose_events_are_off_says_so_itself() -> None:
    with running(sglang(free_ports((0,)), events="", replay=None)) as server:
        told = examined(server.url, *OWN)
        assert (told.status, found(told)) == (1, {"KV events": PROBLEM}), told
        assert '"bind": true' in told.advice("KV events")


def test_two_ranks_that_connect_are_both_heard_by_whoever_listens_there() -> None:
    port = free_ports((0, 1, 2, 3, 4))
    events, replay = f"tcp://127.0.0.1:{port + 1}", f"tcp://127.0.0.1:{port + 3}"
    with running(sglang(port, events=events, replay=replay, binds=False, ranks=2)) as server:
        told = examined(server.url, *OWN)
        assert found(told) == {"ranks": WARNING, "KV events": PROBLEM}, told
        assert f"--events {events} --bind-events" in told.advice("KV events")
        told = examined(server.url, *OWN, "--events", events, "--replay", replay, "--bind-events")
        assert (told.status, found(told)) == (0, {"ranks": WARNING}), told
        assert "all 2 told" in told.seen("events arrive")
        assert "all 2 ranks answer" in told.seen("replay")


def test_its_grpc_mode_tells_its_events_without_an_epoch() -> None:
    port = free_ports((0, 1, 2, 3))
    server = sglang(port, events=f"tcp://127.0.0.1:{port + 2}", replay=f"tcp://127.0.0.1:{port + 3}", grpc=True)
    with running(server):
        told = examined(server.url)
        assert (told.status, found(told)) == (0, {"KV events": WARNING}), told
        assert "kvherd bridge --engine" in told.advice("KV events")
