"""A gateway process without a descriptor left, with more requests than it may have, with a file that is wrong."""

import os
import resource
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvherd.testing.herds import BeginOdd, GatewayProcess, Start, begin_gateway, get
from kvherd.testing.processes import KvherdProcess, OwnedProcess
from kvherd.testing.raw_http import RawClient

pytestmark = pytest.mark.engine

PATIENCE_S = 60.0
CALL = {"model": "m", "prompt": "hello", "max_tokens": 4}
LARGE = CALL | {"prompt": "x" * 65_536}
IN_TURN = ("--policy", "round_robin")


def metric(gateway: GatewayProcess, name: str) -> float:
    families = text_string_to_metric_families(get(f"{gateway.url}/metrics")[1].decode())
    return next(sample.value for family in families for sample in family.samples if sample.name == name)


def memory_kb(gateway: GatewayProcess) -> int:
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


def test_a_process_without_a_descriptor_left_says_so_and_serves_again_when_it_has_one(
    start: Start, begin: BeginOdd
) -> None:
    gateway = begin_gateway(start, begin("well-once").url, up=1, options=IN_TURN)
    with httpx.Client(base_url=gateway.url, timeout=PATIENCE_S) as client:
        assert client.post("/v1/completions", json=CALL).status_code == 200
        before = resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE, (3, before[1]))  # it keeps those that it has
        answer = client.post("/v1/completions", json=CALL)
        resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE, before)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] in ("descriptors_exhausted", "no_worker"), "probes need some, too"
        assert int(answer.headers["retry-after"]) > 0
        gateway.process.wait_for(
            lambda: client.post("/v1/completions", json=CALL).status_code == 200, what="it serves again"
        )
    assert httpx.post(f"{gateway.url}/v1/completions", json=CALL, timeout=PATIENCE_S).status_code == 200
    assert "Traceback" not in gateway.process.said


def test_a_flood_past_the_bound_is_told_to_return_and_leaves_memory_flat(start: Start, begin: BeginOdd) -> None:
    bounds = ("--max-requests", "4", "--max-waiting", "8", "--max-wait-s", "600")
    gateway = begin_gateway(start, begin("hang").url, up=1, options=(*IN_TURN, *bounds))
    with ExitStack() as stack:
        for _ in range(12):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", gateway.port), timeout=PATIENCE_S))
            body = b'{"model":"m","prompt":"x"}'
            one.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
            )
        gateway.process.wait_for(
            lambda: metric(gateway, "kvherd_gateway_waiting_requests") == 8.0, what="as many wait as may"
        )
        with httpx.Client(base_url=gateway.url, timeout=PATIENCE_S) as client:

            def flood(count: int) -> None:
                for _ in range(count):
                    answer = client.post("/v1/completions", json=LARGE)
                    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "gateway_busy")
                    assert int(answer.headers["retry-after"]) > 0

            flood(300)
            before_kb = memory_kb(gateway)
            flood(1_000)
            assert memory_kb(gateway) - before_kb < 16_384, "64 KB each would be 64,000"
        assert metric(gateway, "kvherd_gateway_running_requests") == 4.0
    gateway.process.wait_for(
        lambda: metric(gateway, "kvherd_gateway_running_requests") == 0.0, what="its clients have left"
    )


def test_a_file_that_turns_wrong_while_it_runs_is_told_and_changes_nothing(
    start: Start, begin: BeginOdd, tmp_path: Path
) -> None:
    first, second = begin("well"), begin("well")
    config = tmp_path / "herd.toml"
    config.write_text(f'[[workers]]\nurl = "{first.url}"\n')
    gateway = begin_gateway(start, up=1, options=(*IN_TURN, "--config", str(config)))

    def problem() -> str:
        return str(httpx.get(f"{gateway.url}/server_info", timeout=PATIENCE_S).json()["config"]["problem"] or "")

    def serves() -> set[str]:
        answers = [httpx.post(f"{gateway.url}/v1/completions", json=CALL, timeout=PATIENCE_S) for _ in range(2)]
        assert {answer.status_code for answer in answers} == {200}
        return {answer.headers["x-kvherd-worker"] for answer in answers}

    assert serves() == {first.url}
    config.write_text(f'[[workers]]\nurl = "{second.url}"\nwieght = 2\n')
    gateway.process.wait_for(lambda: problem() != "", what="it sees what is wrong")
    assert "line 3" in problem()
    assert "wieght" in problem()
    assert problem() in gateway.process.said
    assert metric(gateway, "kvherd_gateway_config_problem") == 1.0
    assert serves() == {first.url}, "all is as it was"
    config.write_text(f'[[workers]]\nurl = "{second.url}"\nweight = 2\n[late_binding]\nbacklog_s = 1\n')
    gateway.process.wait_for(
        lambda: [(one["url"], one["state"]) for one in gateway.workers()] == [(second.url, "up")],
        what="what it says is true",
    )
    assert problem() == ""
    assert serves() == {second.url}


NOBODY = b'{"model":"nobody","prompt":"x"}'
REFUSED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: %b\r\nContent-Length: %d\r\n\r\n%b" % (
    b"x" * 128,
    len(NOBODY),
    NOBODY,
)


@pytest.mark.parametrize(("log", "options", "lines"), [("log", (), 4_000), ("access", ("--access-log", "-"), 12_000)])
async def test_a_pipe_that_nobody_reads_stops_no_request_and_no_stop(
    log: str, options: tuple[str, ...], lines: int
) -> None:
    """Standard output and standard error are one full pipe, as of a container whose log nobody collects."""
    reads, writes = os.pipe()
    with ExitStack() as stack:
        stack.callback(os.close, reads)

        def start(*words: str) -> KvherdProcess:
            return stack.enter_context(KvherdProcess(*words, says_to=writes))

        gateway = begin_gateway(start, options=(*IN_TURN, *options))
        os.close(writes)
        async with RawClient(gateway.port) as client:
            for _ in range(lines // 100):
                answers = [await client.answer_to(REFUSED * 100, within_s=PATIENCE_S)]
                answers += [await client.answer(within_s=PATIENCE_S) for _ in range(99)]
                assert {answer.status for answer in answers} == {503}, "no worker"
        told = get(f"{gateway.url}/metrics")[1].decode()
        families = text_string_to_metric_families(told)
        lost = {one.labels["log"]: one.value for each in families for one in each.samples if "lost_log" in one.name}
        assert lost[log] > 0
        gateway.process.signal(signal.SIGTERM)
        assert gateway.process.wait(within_s=PATIENCE_S) == 0
        assert len(os.read(reads, 1 << 20)) >= 4096, "what it could say, it said"


def test_a_gateway_whose_standard_error_is_closed_serves_and_stops() -> None:
    with ExitStack() as stack:

        def start(*words: str) -> OwnedProcess:
            command = ["sh", "-c", 'exec "$0" -m kvherd.cli.main "$@" 2>&-', sys.executable, *words]
            return stack.enter_context(OwnedProcess(command))

        gateway = begin_gateway(start, options=IN_TURN)  # type: ignore[arg-type]
        assert httpx.post(f"{gateway.url}/v1/completions", json=CALL, timeout=PATIENCE_S).status_code == 503
        gateway.process.signal(signal.SIGTERM)
        assert gateway.process.wait(within_s=PATIENCE_S) == 0
