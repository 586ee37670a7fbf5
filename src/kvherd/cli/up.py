"""`kvherd up`: a whole herd on one machine."""

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from kvherd.cli.gateway_client import ADMIN_KEY, ask
from kvherd.cli.lifetime import until_stopped
from kvherd.cli.logs import LogLevel
from kvherd.cli.ports import require_free
from kvherd.cli.up_screen import Screen
from kvherd.cli.up_supervisor import Part, Supervisor
from kvherd.core.errors import GatewayUnreachable, OptionInvalid
from kvherd.core.routing.policy import POLICY_NAMES, make_policy
from kvherd.services.servicer.profiles import DIRECTORY_VARIABLES as PROFILE_VARIABLES

HOST = "127.0.0.1"
ENGINES = ("engine-a", "engine-b")
GATEWAY = "gateway"
ENGINE_STRIDE = 100
"""Between the ports of two engines; each uses P (gRPC), P+1 (sidecar), P+2 (HTTP), P+10 (KV events), P+30 (replay)."""
ENGINE_PORTS = (0, 1, 2, 10, 30)
READY_DEADLINE_S = 300.0
"""The first start of all converts the weights."""
STOP_GRACE_S = 10.0
PROBE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Herd:
    """What to start. The first engine is the gateway's gRPC worker, the second its HTTP worker."""

    model: str
    engine_port: int
    gateway_port: int
    policy: str
    logs: Path
    log_level: LogLevel
    engine_options: tuple[str, ...]
    admin_key: str | None

    @property
    def gateway_url(self) -> str:
        return f"http://{HOST}:{self.gateway_port}"

    @property
    def workers(self) -> tuple[str, str]:
        first, second = (self.engine_port + index * ENGINE_STRIDE for index in range(2))
        return f"grpc://{HOST}:{first}", f"http://{HOST}:{second + 2},events=grpc://{HOST}:{second}"

    def require_free_ports(self) -> None:
        """Raise `OptionInvalid` or `PortInUse` before anything is started."""
        bases = [self.engine_port + index * ENGINE_STRIDE for index in range(len(ENGINES))]
        of_engines = {base + offset for base in bases for offset in ENGINE_PORTS}
        shared = of_engines & {self.gateway_port, self.gateway_port + 1}
        if shared:
            raise OptionInvalid(
                "--gateway-port", f"{min(shared)} would be an engine's port too; choose one further off"
            )
        require_free(HOST, (self.gateway_port, self.gateway_port + 1), option="--gateway-port")
        for index in range(len(ENGINES)):
            base = self.engine_port + index * ENGINE_STRIDE
            require_free(HOST, [base + offset for offset in ENGINE_PORTS], option="--engine-port")

    def parts(self, temporary: str) -> list[Part]:
        """What to start. Temporary files go into a folder of ours: a part that is killed cannot clear its own away.

        Profiles outlast it, beside the logs.
        """
        environment = {"TMPDIR": temporary}
        if not any(os.environ.get(name) for name in PROFILE_VARIABLES):
            environment[PROFILE_VARIABLES[0]] = str(self.logs / "profiles")
        return [replace(part, environment=environment) for part in self._parts()]

    def _parts(self) -> list[Part]:
        engines = [self._engine(name, self.engine_port + index * ENGINE_STRIDE) for index, name in enumerate(ENGINES)]
        workers = [word for worker in self.workers for word in ("--worker", worker)]
        ports = ["--port", str(self.gateway_port), "--grpc-port", str(self.gateway_port + 1)]
        # The engines come up in the time of a few tries; a pause that grew meanwhile would be waited for in vain.
        options = [*workers, *ports, "--policy", self.policy, "--max-retry-s", "0.5"]
        return [*engines, self._part(GATEWAY, "gateway", options, self._herd_serves)]

    def _engine(self, name: str, port: int) -> Part:
        options = ["--model", self.model, "--port", str(port), *self.engine_options]
        return self._part(name, "engine", options, lambda: _says_ok(f"http://{HOST}:{port + 2}", "/health"))

    def _part(self, name: str, command: str, options: list[str], answers: Callable[[], bool]) -> Part:
        common = ["--host", HOST, "--supervised", "--log-level", self.log_level.value]
        line = (sys.executable, "-m", "kvherd.cli.main", command, *options, *common)
        return Part(name, line, self.logs / f"{name}.log", answers)

    def _herd_serves(self) -> bool:
        """Whether the gateway has every engine as a worker that is up."""
        try:
            answer = ask("GET", self.gateway_url, "/workers", timeout_s=PROBE_TIMEOUT_S, admin_key=self.admin_key)
        except GatewayUnreachable:
            return False
        if answer.status != 200:
            return False
        workers = json.loads(answer.body)["workers"]
        return len(workers) == len(ENGINES) and all(worker["state"] == "up" for worker in workers)

    def things_to_try(self) -> str:
        tool = "kvherd" if shutil.which("kvherd") else os.path.relpath(Path(sys.executable).with_name("kvherd"))
        other = "" if self.gateway_port == 8080 else f" --gateway {self.gateway_url}"
        body = json.dumps(
            {
                "model": Path(self.model).stem,
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "stream": True,
            }
        )
        return (
            f"\nThe herd is up at {self.gateway_url}. Three things to try in another terminal:\n\n"
            f"  curl {self.gateway_url}/v1/chat/completions -d '{body}'\n"
            f"  {tool} workers{other}\n"
            f"  {tool} flush --timeout 30{other}\n\n"
            f"Logs: {self.logs}. Ctrl-C stops everything.\n"
        )


def _says_ok(url: str, path: str) -> bool:
    try:
        return ask("GET", url, path, timeout_s=PROBE_TIMEOUT_S).status == 200
    except GatewayUnreachable:
        return False


def default_log_folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "kvherd"


def command(
    *,
    model: Annotated[
        str, typer.Option(help="smollm2, tiny (random, for tests) or the path of a Llama-family GGUF file.")
    ] = "smollm2",
    gateway_port: Annotated[int, typer.Option(help="Port of the gateway's HTTP; its gRPC is the next one.")] = 8080,
    engine_port: Annotated[
        int, typer.Option(help="First port of engine-a; engine-b is 100 above. Each uses P, P+2, P+10 and P+30.")
    ] = 51000,
    policy: Annotated[str, typer.Option(help=f"How the gateway routes: {', '.join(POLICY_NAMES)}.")] = "kv",
    kv_tokens: Annotated[
        int | None, typer.Option("--kv-tokens", min=64, help="Tokens each engine's KV cache holds.")
    ] = None,
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder of the parts' logs.", show_default="~/.local/state/kvherd")
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="Least level that the parts log.")] = LogLevel.INFO,
) -> None:
    """Run a whole herd on this machine: two engines with a real model, and a gateway that knows what they hold.

    One engine is reached over gRPC, the other over HTTP, as in a real fleet. Shows the progress, waits until both
    engines answer, and prints three things to try. Everything listens on this machine only. Ctrl-C stops everything;
    so does a part that fails, with its reason.
    """
    threads = max(1, (os.cpu_count() or 1) // len(ENGINES))
    options = ["--threads", str(threads)]
    if kv_tokens is not None:
        options += ["--kv-tokens", str(kv_tokens)]
    logs = log_dir or default_log_folder()
    herd = Herd(model, engine_port, gateway_port, policy, logs, log_level, tuple(options), os.environ.get(ADMIN_KEY))
    make_policy(policy)  # refuses a name that is none
    herd.require_free_ports()
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionInvalid("--log-dir", f"cannot make the folder {logs}: {error.strerror}") from error
    asyncio.run(until_stopped(run_herd(herd, Console(stderr=True, highlight=False))))


async def run_herd(herd: Herd, console: Console) -> None:
    """Start the herd and stay until cancelled. Raises `StartFailed` or `PartDied`, with nothing left running."""
    with (
        TemporaryDirectory(prefix="kvherd-up-", ignore_cleanup_errors=True) as temporary,
        Screen(console, (*ENGINES, GATEWAY)) as screen,
    ):
        supervisor = Supervisor(on_line=lambda child, line: screen.line(child.part.name, line), grace_s=STOP_GRACE_S)
        async with supervisor:
            try:
                children = []
                for part in herd.parts(temporary):
                    screen.starting(part.name)
                    children.append(await supervisor.start(part))
                await supervisor.wait_ready(
                    children, deadline_s=READY_DEADLINE_S, ready=lambda child: screen.ready(child.part.name)
                )
                screen.all_ready(herd.things_to_try())
                raise await supervisor.first_death()
            finally:
                screen.stopping()
