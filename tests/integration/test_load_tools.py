"""h2load, wrk and curl, as Debian has them, against a real gateway over a worker of either kind: each request they make
is answered, and none of them is confused by an answer. Skipped where they are not installed; `.ci/run` installs them.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvherd.testing.doors import Door
from kvherd.testing.processes import wait_until

pytestmark = pytest.mark.engine

PACKAGES = {"h2load": "nghttp2-client", "wrk": "wrk", "curl": "curl"}
CLIENT_S = 100.0
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "ignore_eos": True}
WRK = """
wrk.method = "POST"
wrk.body = %s
wrk.headers["Content-Type"] = "application/json"
done = function(summary, latency, requests)
  local e = summary.errors
  print(string.format("seen %%d wrong %%d", summary.requests, e.connect + e.read + e.write + e.status + e.timeout))
end
"""


def run(program: str, *words: str) -> str:
    """What it printed; skips the test where it is not installed."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed (Debian, Ubuntu: apt-get install {PACKAGES[program]})")
    ended = subprocess.run([program, *words], capture_output=True, timeout=CLIENT_S, check=False)
    assert ended.returncode == 0, ended.stderr.decode() + ended.stdout.decode()
    return ended.stdout.decode()


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def body(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    written = tmp_path / "chat.json"
    written.write_text(json.dumps(CHAT | {"stream": request.param}))
    return written


def test_h2load_has_every_request_answered(door: Door, body: Path) -> None:
    words = ("--h1", "-n", "120", "-c", "6", "-d", str(body), "-H", "content-type: application/json")
    said = run("h2load", *words, f"{door.gateway.url}/v1/chat/completions")
    assert "120 succeeded, 0 failed, 0 errored, 0 timeout" in said
    assert "status codes: 120 2xx, 0 3xx, 0 4xx, 0 5xx" in said


def test_wrk_has_every_request_answered(door: Door, body: Path, tmp_path: Path) -> None:
    script = tmp_path / "post.lua"
    script.write_text(WRK % json.dumps(body.read_text()))
    words = ("-t", "1", "-c", "4", "-d", "2s", "--timeout", "60s", "-s", str(script))
    said = run("wrk", *words, f"{door.gateway.url}/v1/chat/completions")
    found = re.search(r"^seen (\d+) wrong (\d+)$", said, re.MULTILINE)
    assert found is not None, said
    assert int(found[2]) == 0
    wait_until(lambda: door.running() == 0, within_s=30, what="what wrk left behind is cancelled")


def curl(door: Door, *words: str, path: str = "/v1/chat/completions") -> tuple[str, str]:
    """The body, and `HTTP-VERSION STATUS`."""
    said = run("curl", "-sS", "-m", "60", "-w", "\\n%{http_version} %{http_code}", *words, f"{door.gateway.url}{path}")
    answer, _, how = said.rpartition("\n")
    return answer, how


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--http1.0",),
        ("--http2",),
        ("-H", "Expect: 100-continue"),
        ("-H", "Transfer-Encoding: chunked"),
        ("-H", "Transfer-Encoding: chunked", "-H", "Expect: 100-continue"),
        ("--compressed",),
    ],
    ids=["plain", "HTTP/1.0", "h2c", "asks first", "chunks", "chunks, asks first", "compressed"],
)
def test_curl_is_served_however_it_asks(door: Door, body: Path, words: tuple[str, ...]) -> None:
    sent = ("-H", "content-type: application/json", "--data-binary", f"@{body}")
    answer, how = curl(door, *sent, *words)
    assert how == "1.1 200"
    if b'"stream": true' in body.read_bytes():
        assert answer.endswith("data: [DONE]\n\n")
    else:
        assert json.loads(answer)["choices"][0]["finish_reason"] == "length"


def test_curl_is_told_what_it_may_not(door: Door) -> None:
    assert curl(door, "-I", path="/v1/models")[1] == "1.1 200"
    assert curl(door, "-X", "OPTIONS")[1] == "1.1 204"
    assert curl(door)[1] == "1.1 405"
    answer, how = curl(door, "-d", "{")
    assert how == "1.1 400"
    assert json.loads(answer)["error"]["code"] == "invalid_json"


def test_curl_sends_a_long_body_only_when_it_may(door: Door, tmp_path: Path) -> None:
    """It asks first of itself; that the body is too long is said before any of it was sent."""
    long = tmp_path / "long"
    with long.open("wb") as file:
        file.truncate(40 * 1024 * 1024)
    counted = ("-w", "\\n%{http_version} %{http_code} %{size_upload}")
    sent = ("-H", "Expect: 100-continue", "--expect100-timeout", "60", "--data-binary", f"@{long}")
    answer, how = curl(door, *sent, *counted)
    assert how == "1.1 413 0"
    assert json.loads(answer)["error"]["code"] == "body_too_large"
