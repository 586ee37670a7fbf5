"""`kvherd workers`, `flush` and `audit` against a gateway that says what the test wants."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvherd.cli.drain import progress_line
from kvherd.cli.main import main
from kvherd.cli.watching import busy_line
from kvherd.testing.processes import can_bind, wait_until

pytestmark = pytest.mark.net

ANN: dict[str, Any] = {
    "id": "grpc://127.0.0.1:51000",
    "url": "grpc://127.0.0.1:51000",
    "kind": "sglang-grpc",
    "models": ["smollm2"],
    "state": "up",
    "running": 2,
    "waiting": 0,
    "kv": {"state": "live", "blocks": 94, "epoch": "ab" * 16, "lag_s": 0.0021, "worst_lag_s": 0.04},
    "truth": {"decided": 150, "undecided": 0, "unavailable": 3, "error_rate": 0.005},
}
BOB: dict[str, Any] = {
    "id": "http://b",
    "url": "http://b",
    "kind": None,
    "models": [],
    "state": "down",
    "running": 0,
    "kv": None,
}
CAT: dict[str, Any] = ANN | {"kv": {"state": "quarantined", "blocks": 0, "reason": "a gap"}}
DAN: dict[str, Any] = ANN | {"kv": {"state": "live", "blocks": 3, "complete": False}}

Says = Callable[[int, object], str]


@pytest.fixture
def gateway_that_says() -> Iterator[Says]:
    """Answers every request with one status and body, and keeps the paths that were asked in `asked`."""
    servers: list[ThreadingHTTPServer] = []

    def says(status: int, body: object) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(f"{self.command} {self.path}")
                keys.append(self.headers.get("Authorization", ""))
                payload = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            do_PATCH = do_DELETE = do_POST = do_GET  # noqa: N815 - the base class looks for this name

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    asked.clear()
    keys.clear()
    yield says
    for server in servers:
        server.shutdown()
        server.server_close()


asked: list[str] = []
keys: list[str] = []


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


def test_workers_are_a_table_with_a_row_each(gateway_that_says: Says, capsys: pytest.CaptureFixture[str]) -> None:
    url = gateway_that_says(200, {"workers": [ANN]})
    assert run("workers", "--gateway", url) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split("  ")[0] == "WORKER"
    assert heading.split()[-5:] == ["EPOCH", "BLOCKS", "LAG", "MS", "TRUTH"]
    assert row.split()[:8] == ["grpc://127.0.0.1:51000", "sglang-grpc", "smollm2", "up", "2", "0", "live", "abababab"]
    assert row.split()[8:10] == ["94", "2.1/40.0"]
    assert row.endswith("  150 decided, 0.5% wrong, 3 unavailable")


def test_a_worker_that_is_down_is_shown_and_costs_the_exit_code(
    gateway_that_says: Says, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("workers", "--gateway", gateway_that_says(200, {"workers": [ANN, BOB]})) == 1
    assert capsys.readouterr().out.splitlines()[-1].split() == ["http://b", "-", "-", "down", "0", *"------"]


def test_a_cache_that_is_not_known_is_shown_with_its_reason(
    gateway_that_says: Says, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("workers", "--gateway", gateway_that_says(200, {"workers": [CAT]})) == 0
    assert "quarantined: a gap" in capsys.readouterr().out


def test_a_worker_that_may_hold_more_than_was_told_is_shown_as_incomplete(
    gateway_that_says: Says, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("workers", "--gateway", gateway_that_says(200, {"workers": [DAN]})) == 0
    assert "live, incomplete" in capsys.readouterr().out


def test_a_program_gets_the_gateway_s_own_json(gateway_that_says: Says, capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"workers": [ANN]}
    assert run("workers", "--json", "--gateway", gateway_that_says(200, answer)) == 0
    assert json.loads(capsys.readouterr().out) == answer


def test_the_environment_names_the_gateway(gateway_that_says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHERD_GATEWAY", gateway_that_says(200, {"workers": [ANN]}))
    assert run("workers") == 0


AUDITED: dict[str, Any] = {
    "url": "http://a",
    "decided": 200,
    "wrong": 1,
    "undecided": 2,
    "unavailable": 3,
    "error_rate": 0.005,
    "rebuilds": 0,
    "last_wrong": {"predicted_tokens": 64, "reported_tokens": 32, "at_s": 0},
    "differing_prompts": ["chat with tools"],
    "advice": "",
}
SILENT: dict[str, Any] = {"url": "http://b", "advice": "start it with --enable-cache-report"}


def test_a_flush_may_hold_what_comes_meanwhile(gateway_that_says: Says) -> None:
    url = gateway_that_says(200, flushed("done", success=True))
    assert run("flush", "--timeout", "2.5", "--hold", "--gateway", url) == 0
    assert asked == ["POST /flush_cache?timeout=2.5&hold=1"]


def test_who_is_busy_is_one_line() -> None:
    busy = [{"url": f"http://w{n}", "running": n, "waiting": 1} for n in range(6)]
    line = busy_line([*busy, {"url": "http://idle", "running": 0, "waiting": 0}])
    assert line.startswith("waiting for 6 of 7 workers to be idle. http://w0: 0 running, 1 waiting; http://w1")
    assert line.endswith("; and 2 more")
    assert busy_line([]) == "waiting for the workers; none says that it is busy"


@pytest.mark.parametrize("fine", [True, False])
def test_an_audit_is_a_table_and_its_exit_code_the_verdict(
    fine: bool, gateway_that_says: Says, capsys: pytest.CaptureFixture[str]
) -> None:
    url = gateway_that_says(200, {"fine": fine, "workers": [AUDITED, SILENT]})
    assert run("audit", "--gateway", url) == (0 if fine else 1)
    assert asked == ["GET /audit"]
    _, ann, bob = capsys.readouterr().out.splitlines()
    assert ann.split()[:7] == ["http://a", "200", "1", "2", "3", "0.5%", "0"]
    assert "64 predicted, 32 reported at " in ann
    assert "chat with tools" in ann
    assert bob.endswith("start it with --enable-cache-report")


def test_an_audit_for_programs_is_the_gateway_s_own_json(
    gateway_that_says: Says, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = {"fine": True, "workers": [AUDITED]}
    assert run("audit", "--json", "--gateway", gateway_that_says(200, answer)) == 0
    assert json.loads(capsys.readouterr().out) == answer


def flushed(*outcomes: str, success: bool) -> dict[str, Any]:
    workers = [
        {"url": f"http://w{n}", "kind": "kvherd-http", "outcome": outcome, "message": "so it was", "seconds": 0.25}
        for n, outcome in enumerate(outcomes)
    ]
    done = outcomes.count("done")
    return {"success": success, "message": f"{done} of {len(outcomes)} workers flushed", "workers": workers}


def test_a_flush_that_all_obeyed_ends_with_0(gateway_that_says: Says, capsys: pytest.CaptureFixture[str]) -> None:
    url = gateway_that_says(200, flushed("done", "done", success=True))
    assert run("flush", "--timeout", "2.5", "--gateway", url) == 0
    assert asked == ["POST /flush_cache?timeout=2.5"]
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 2 workers flushed"


@pytest.mark.parametrize("status", [207, 502, 503])
def test_a_flush_that_some_did_not_obey_ends_with_1(
    status: int, gateway_that_says: Says, capsys: pytest.CaptureFixture[str]
) -> None:
    url = gateway_that_says(status, flushed("done", "timed_out", success=False))
    assert run("flush", "--gateway", url) == 1
    assert "http://w1  kvherd-http  timed_out     0.25  so it was" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["workers", "flush", "audit"])
def test_an_error_of_the_gateway_is_told_in_its_words(
    command: str, gateway_that_says: Says, capsys: pytest.CaptureFixture[str]
) -> None:
    url = gateway_that_says(401, {"error": {"message": "give the admin key"}})
    assert run(command, "--gateway", url) == 1
    assert capsys.readouterr().err == "kvherd: give the admin key\n"


def test_the_admin_key_travels_as_a_bearer_token(gateway_that_says: Says) -> None:
    assert run("workers", "--admin-key", "s3cret", "--gateway", gateway_that_says(200, {"workers": [ANN]})) == 0
    assert keys == ["Bearer s3cret"]


@pytest.mark.parametrize("value", ["-1", "nan", "inf"])
def test_a_time_that_is_none_is_a_usage_error(value: str) -> None:
    assert run("flush", "--timeout", value) == 2


def test_no_gateway_is_exit_code_3_and_a_way_out(unused_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("workers", "--gateway", f"http://127.0.0.1:{unused_port}") == 3
    assert "Connection refused; start one with `kvherd up`" in capsys.readouterr().err


def test_something_else_on_that_port_is_not_taken_for_a_gateway(
    gateway_that_says: Says, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("workers", "--gateway", gateway_that_says(200, b"<html>hello</html>")) == 3
    assert "is not a kvherd gateway" in capsys.readouterr().err


def test_a_profile_begins_and_ends_with_an_outcome_for_each_worker(
    gateway_that_says: Says, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = {"url": "http://a", "kind": "kvherd-http", "outcome": "done", "message": "recorded 5 steps"}
    body = {"success": True, "message": "1 of 1 worker stopped", "files": ["/tmp/a.trace.json"], "workers": [worker]}
    url = gateway_that_says(200, body)
    assert run("profile", "start", "--worker", "all", "--num-steps", "5", "--gateway", url) == 0
    assert run("profile", "stop", "--gateway", url) == 0
    assert asked == ["POST /start_profile?worker=all", "POST /stop_profile"]
    assert capsys.readouterr().out.splitlines()[-1] == "/tmp/a.trace.json"
    assert run("profile", "stop", "--gateway", gateway_that_says(207, body | {"success": False})) == 1


def test_a_trace_is_served_to_the_viewer_once_and_to_nobody_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "a b.trace.json"
    trace.write_text("[]")
    opening = threading.Thread(target=run, args=("profile", "open", str(trace), "--no-browser"))
    opening.start()
    wait_until(lambda: not can_bind(9001), within_s=10, what="the trace is served")
    assert httpx.get("http://127.0.0.1:9001/etc/passwd", timeout=5).status_code == 404
    answer = httpx.get("http://127.0.0.1:9001/a%20b.trace.json", timeout=5)
    opening.join(10)
    assert not opening.is_alive()
    assert (answer.text, answer.headers["access-control-allow-origin"]) == ("[]", "https://ui.perfetto.dev")
    assert "url=http://127.0.0.1:9001/a%20b.trace.json" in capsys.readouterr().out


def test_a_trace_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("profile", "open", "/nowhere.json") == 2
    assert capsys.readouterr().err == "kvherd: TRACE: there is no file /nowhere.json\n"


def test_a_drain_waits_and_tells_how_it_ended(gateway_that_says: Says, capsys: pytest.CaptureFixture[str]) -> None:
    url = gateway_that_says(200, {"id": "a", "url": "http://a", "drained": True})
    assert run("drain", "http://a", "--timeout", "2.5", "--gateway", url) == 0
    assert asked == ["DELETE /workers/http%3A%2F%2Fa?timeout=2.5"]
    assert capsys.readouterr().out == "http://a has left: every request there has ended\n"
    assert run("drain", "a", "--gateway", gateway_that_says(200, {"url": "http://a", "drained": False})) == 1


def test_a_drained_worker_may_stay_and_come_back(gateway_that_says: Says, capsys: pytest.CaptureFixture[str]) -> None:
    url = gateway_that_says(200, {"url": "http://a", "outstanding": 3})
    assert run("drain", "a", "--keep", "--gateway", url) == 0
    assert run("drain", "a", "--undo", "--gateway", url) == 0
    assert asked == ["PATCH /workers/a", "PATCH /workers/a"]
    kept, back = capsys.readouterr().out.splitlines()
    assert kept.startswith("http://a takes no new request; 3 under way there")
    assert back == "http://a takes requests again"
    assert run("drain", "a", "--undo", "--keep", "--gateway", url) == 2


def test_the_progress_of_a_drain_is_one_line() -> None:
    under_way = [{"request": f"r{n}", "seconds": 40.4 - n} for n in range(5)]
    worker = {"url": "http://a", "outstanding": 5, "under_way": under_way, "leaves_in_s": 12.2}
    line = "http://a: 5 under way (r0 for 40 s, r1 for 39 s, r2 for 38 s and 2 more); cut off in 12 s"
    assert progress_line(worker) == line
    assert progress_line({"url": "http://a", "outstanding": 0}) == "http://a: nothing is under way"
