"""An engine behind TLS is asked as one in the clear is, by who is told whom to trust."""

from pathlib import Path

import pytest

from kvherd.testing.certificates import Authority
from kvherd.testing.doctors import examined
from kvherd.testing.herds import Start
from kvherd.testing.processes import free_ports

pytestmark = pytest.mark.engine


def test_the_doctor_and_the_bridge_reach_a_server_whose_authority_they_are_told(start: Start, tmp_path: Path) -> None:
    """The server is a gateway over TLS, without workers: to them it is one more that speaks OpenAI's API."""
    files = Authority().issue(tmp_path, "server", names=("engine.test",), addresses=())
    port = free_ports((0, 1, 2, 3, 4))
    own = ("--port", str(port), "--grpc-port", str(port + 1))
    served = start("gateway", *own, "--tls-cert", str(files.certificate), "--tls-key", str(files.key))
    served.wait_for(lambda: "serving at https" in served.said, what="it serves")
    url, trust = f"https://127.0.0.1:{port}", ("--engine-ca", str(files.authority))
    told = examined(url, "--no-requests", *trust, "--engine-tls-name", "engine.test")
    assert told.checks["reachable"][0] == "ok", told
    for words in ((), trust):
        told = examined(url, "--no-requests", *words)
        assert told.status == 3, told
        assert "certificate" in told.seen("reachable"), told
    where = ("--listen", f"127.0.0.1:{port + 2}", "--metrics-port", str(port + 3))
    events = ("--events", f"tcp://127.0.0.1:{port + 4}")
    names = ("--engine-tls-name", "engine.test")
    served_by = (
        "--tls-cert",
        str(files.certificate),
        "--tls-key",
        str(files.key),
        "--tls-client-ca",
        str(files.authority),
    )
    bridge = start("bridge", "--engine", url, *events, *where, *trust, *names, *served_by)
    bridge.wait_for(lambda: "openai-http" in bridge.said, what="it says what the engine is")
    assert f"at grpcs://127.0.0.1:{port + 2}" in bridge.said
