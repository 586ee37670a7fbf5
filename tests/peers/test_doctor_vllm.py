"""`kvherd doctor` before a stock vLLM that has nothing wrong, and before some that have: what it says is true.

`make test-vllm` installs it and runs these tests.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvherd.testing.doctors import OWN, PROBLEM, UNKNOWN, WARNING, examined, model_with_template, running
from kvherd.testing.processes import free_ports
from kvherd.testing.stock_engines import StockServer, vllm

pytestmark = [pytest.mark.peers, pytest.mark.timeout(1200)]


@contextmanager
def listening(folder: Path, *, replays: bool = True, dev: bool = True, poor: bool = False) -> Iterator[StockServer]:
    replay = f"ipc://{folder}/replay" if replays else None
    options = ("--api-key", "sesame") if poor else ()
    server = vllm(
        free_ports((0,)),
        events=f"ipc://{folder}/events",
        replay=replay,
        dev_mode=dev,
        details=not poor,
        options=options,
    )
    with running(server):
        yield server


def test_one_with_nothing_wrong_and_what_an_operator_may_get_wrong_of_it(short: Path, tmp_path: Path) -> None:
    with listening(short) as server:
        told = examined(server.url, *OWN)
        assert (told.status, told.but_ok()) == (0, {}), told
        told = examined(server.url, *OWN, "--events", server.events, "--replay", server.replay or "")
        assert (told.status, told.but_ok()) == (0, {}), told
        told = examined(server.url, *OWN, "--events", server.events, "--bind-events")
        assert told.but_ok() == {"KV events": PROBLEM}, told
        told = examined(server.url, *OWN, "--events", f"ipc://{short}/nobody")
        assert told.but_ok() == {"KV events": PROBLEM}, told
        assert server.events in told.seen("KV events")
        told = examined(server.url, "--tokenizer", str(model_with_template(tmp_path)))
        assert told.checks["tokenization: chat"][0] == PROBLEM
        assert "chat_template.jinja" in told.advice("tokenization: chat")
        told = examined(server.url)
        assert told.but_ok() == {"tokenizer": PROBLEM, "tokenization": UNKNOWN}


def test_one_that_wants_a_key_tells_little_and_keeps_no_replay(short: Path) -> None:
    with listening(short, replays=False, dev=False, poor=True) as server:
        told = examined(server.url, *OWN)
        assert (told.status, told.but_ok()) == (1, {"API key": PROBLEM}), told
        assert "KVHERD_ENGINE_API_KEY" in told.advice("API key")
        told = examined(server.url, *OWN, key="wrong")
        assert "does not accept" in told.seen("API key")
        told = examined(server.url, *OWN, "--events", server.events, key="sesame")
        assert told.status == 0, told
        assert told.but_ok() == {"flush": WARNING, "replay": WARNING, "cached tokens": WARNING}, told
        assert "VLLM_SERVER_DEV_MODE=1" in told.advice("flush")
        assert "replay_endpoint" in told.advice("replay")
        assert "--enable-prompt-tokens-details" in told.advice("cached tokens")
        told = examined(server.url, *OWN, key="sesame")
        assert told.but_ok()["KV events"] == UNKNOWN
        told = examined(server.url, *OWN, "--events", server.events, "--replay", f"ipc://{short}/none", key="sesame")
        assert told.but_ok()["replay"] == PROBLEM


def test_one_whose_events_are_off_says_so_itself() -> None:
    with running(vllm(free_ports((0,)), events="", replay=None)) as server:
        told = examined(server.url, *OWN)
        assert (told.status, told.but_ok()) == (1, {"KV events": PROBLEM}), told
        assert "enable_kv_cache_events" in told.advice("KV events")


def test_two_ranks_that_connect_are_both_heard_by_whoever_listens_there() -> None:
    port = free_ports((0, 1, 2, 3, 4))
    events, replay = f"tcp://127.0.0.1:{port + 1}", f"tcp://127.0.0.1:{port + 3}"
    with running(vllm(port, events=events, replay=replay, ranks=2)) as server:
        told = examined(server.url, *OWN)
        assert told.but_ok() == {"ranks": WARNING, "KV events": PROBLEM}, told
        assert f"--events {events} --bind-events" in told.advice("KV events")
        told = examined(server.url, *OWN, "--events", events, "--replay", replay, "--bind-events")
        assert (told.status, told.but_ok()) == (0, {"ranks": WARNING}), told
        assert "all 2 told" in told.seen("events arrive")
        assert "all 2 ranks answer" in told.seen("replay")
