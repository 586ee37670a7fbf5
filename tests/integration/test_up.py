"""`kvherd up` starts everything or nothing, and ends everything."""

import signal
import socket

import httpx
import pytest

from kvherd.testing.herds import HERD_OFFSETS, HerdProcess, Start, begin_herd
from kvherd.testing.processes import free_ports, wait_until

pytestmark = pytest.mark.engine


def herd_that_is_up(start: Start) -> HerdProcess:
    herd = begin_herd(start)
    herd.process.wait_for(lambda: herd.is_up, what="the herd is up")
    return herd


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_herd_answers_and_a_signal_leaves_nothing_of_it(start: Start, number: signal.Signals) -> None:
    herd = herd_that_is_up(start)
    assert len(herd.process.family()) == 6, "up, two engines with a scheduler each, and the gateway"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    assert httpx.post(f"{herd.url}/v1/chat/completions", json=body, timeout=20).status_code == 200
    herd.process.signal(number)
    assert herd.process.wait(within_s=15) == 0
    herd.process.assert_nothing_left(ports=herd.ports)
    assert "stopping" in herd.process.said
    assert "Traceback" not in herd.process.said


@pytest.mark.parametrize("option", ["--gateway-port", "--engine-port"])
def test_a_port_in_use_is_one_line_with_port_and_option(start: Start, option: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        process = start("up", "--model", "tiny", option, str(port), *other_port(option))
        assert process.wait(within_s=20) == 1
        assert process.said == f"kvherd: port {port} is in use; choose another with {option}\n"
        process.assert_nothing_left()


def other_port(option: str) -> tuple[str, str]:
    if option == "--gateway-port":
        return "--engine-port", str(free_ports(HERD_OFFSETS))
    return "--gateway-port", str(free_ports((0, 1)))


def test_a_model_that_is_not_there_stops_the_start_with_its_reason(start: Start) -> None:
    herd = begin_herd(start, "--model", "/nowhere/model.gguf")
    assert herd.process.wait(within_s=60) == 1
    assert "did not start: no model at /nowhere/model.gguf: there is no such file" in herd.process.said
    assert "Traceback" not in herd.process.said
    herd.process.assert_nothing_left(ports=herd.ports)


def test_an_engine_that_is_killed_ends_the_herd_with_its_name(start: Start) -> None:
    herd = herd_that_is_up(start)
    herd.process.kill_member(f"engine --model tiny --port {herd.engine_port + 100} ")
    assert herd.process.wait(within_s=15) == 1
    last = herd.process.said.splitlines()[-1]
    assert last.startswith("kvherd: engine-b died: ")
    assert "killed by SIGKILL" in last
    herd.process.assert_nothing_left(ports=herd.ports)


def test_a_herd_whose_starter_is_killed_ends_by_itself(start: Start) -> None:
    herd = herd_that_is_up(start)
    herd.process.signal(signal.SIGKILL)
    wait_until(lambda: not herd.process.family(), within_s=15, what="every part has noticed")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--policy", "best"), "--policy: 'best' is none of kv,"),
        (("--engine-port", "21000", "--gateway-port", "21002"), "--gateway-port: 21002 would be an engine's port too"),
        (("--engine-port", "21000", "--gateway-port", "21099"), "--gateway-port: 21100 would be an engine's port too"),
    ],
)
def test_a_herd_that_could_not_come_up_is_not_begun(start: Start, options: tuple[str, ...], sentence: str) -> None:
    process = start("up", "--model", "tiny", *options)
    assert process.wait(within_s=20) == 2
    assert process.said.startswith(f"kvherd: {sentence}")
    assert process.said.count("\n") == 1
    process.assert_nothing_left()
