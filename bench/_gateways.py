"""The gateways that `gateway.py` measures: how each is found, started and stopped; what is missing has a name, too."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from _proxies import free_port, nginx_conf, wait_for_port

from kvherd import compiled

START_LIMIT_S = 60.0
STOP_LIMIT_S = 5.0
HERE = Path(__file__).parent
KVHERD, INTERPRETED = "kvherd", "kvherd, interpreted"
NGINX, SMG, VLLM_ROUTER, SGLANG_ROUTER = "nginx", "SMG", "vllm-router", "sglang-router"


class Absent(Exception):
    """It cannot be measured here; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a gateway is put in front of. `cores` are those it may use. `tokenizer` is set where prompts are read."""

    urls: tuple[str, ...]
    cores: frozenset[int]
    live: tuple[str, ...] = ()
    replay: tuple[str, ...] = ()
    tokenizer: Path | None = None

    @property
    def by_cache(self) -> bool:
        return self.tokenizer is not None

    @property
    def ports(self) -> list[int]:
        return [int(url.rpartition(":")[2]) for url in self.urls]


@dataclass
class Running:
    name: str
    pid: int
    port: int
    log: Path

    @property
    def pids(self) -> list[int]:
        return family(self.pid)


@dataclass(frozen=True, slots=True)
class Contender:
    """`command` makes the command line for a port and a folder of its own; it raises `Absent`."""

    name: str
    command: Callable[[Fleet, int, Path], list[str]]
    version: Callable[[], str]
    ready: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    found, left = [], [pid]
    while left:
        one = left.pop()
        found.append(one)
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                left += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def resident_mb(pids: Sequence[int], *, peak: bool = False) -> float:
    name, total = "VmHWM:" if peak else "VmRSS:", 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
        total += next(int(line.split()[1]) for line in lines if line.startswith(name))
    return total * 1024 / 1e6


@contextmanager
def on(cores: frozenset[int]) -> Iterator[None]:
    """What is started within the block has these cores, and sees no others."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


@contextmanager
def pinned(command: Sequence[str], cores: frozenset[int], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run it within the block on these cores; all that it starts is stopped with it."""
    with log.open("wb") as output, on(cores):
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield child
    finally:
        pids = family(child.pid)
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        for pid in pids[1:]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@contextmanager
def running(contender: Contender, fleet: Fleet) -> Iterator[Running]:
    """Raises `Absent` where it cannot be started."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command, log = contender.command(fleet, port, Path(folder)), Path(folder, "log")
        with pinned(command, fleet.cores, log) as child:
            try:
                await_ready(child, contender.ready, port)
            except TimeoutError:
                raise Absent(f"{contender.name} did not start: {last_words(log)}") from None
            yield Running(contender.name, child.pid, port, log)


def last_words(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][-300:] if lines else "it said nothing"


def await_ready(child: subprocess.Popen[bytes], path: str | None, port: int) -> None:
    """Raises TimeoutError, also where it has ended."""
    if path is None:
        wait_for_port(port)
        return
    end_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end_s and child.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (OSError, urllib.error.HTTPError):
            pass
        time.sleep(0.1)
    raise TimeoutError


def program(name: str, variable: str, *places: str) -> str:
    named = os.environ.get(variable)
    for place in (named,) if named else places:
        if found := shutil.which(place):
            return found
    where = f"{variable} names {named}, which is no program" if named else f"no {' or '.join(places)}"
    raise Absent(f"{name} is not installed ({where})")


def package_version(path: str, package: str) -> str:
    """As the environment that the program is in says."""
    sites = Path(path).absolute().parent.parent.glob(f"lib/python*/site-packages/{package}-*.dist-info")
    return next((site.name.removesuffix(".dist-info").rpartition("-")[2] for site in sites), "of unknown version")


# --- each of them --------------------------------------------------------------------------------------------------


def kvherd_command(fleet: Fleet, port: int, _folder: Path) -> list[str]:
    command = [sys.executable, "-m", "kvherd.cli.main", "gateway", "--port", str(port), "--log-level", "warning"]
    command += ["--grpc-port", str(free_port()), "--policy", "kv" if fleet.by_cache else "round_robin"]
    for number, url in enumerate(fleet.urls):
        word = url
        if fleet.by_cache:
            word += f",events={fleet.live[number]},replay={fleet.replay[number]},tokenizer={fleet.tokenizer}"
        command += ["--worker", word]
    return command


def interpreted_command(fleet: Fleet, port: int, folder: Path) -> list[str]:
    return ["env", f"{compiled.SWITCH}=0", *kvherd_command(fleet, port, folder)]


def nginx_command(fleet: Fleet, port: int, folder: Path) -> list[str]:
    path = program("nginx", "KVHERD_NGINX", "nginx", "/usr/sbin/nginx")
    conf = folder / "nginx.conf"
    conf.write_text(nginx_conf(folder, port, fleet.ports, processes=len(fleet.cores)))
    return [path, "-p", str(folder), "-c", str(conf)]


def smg_path() -> str:
    return program("SMG", "KVHERD_SMG", ".venv-smg/bin/smg")


def smg_command(fleet: Fleet, port: int, _folder: Path) -> list[str]:
    command = [smg_path(), "launch", "--host", "127.0.0.1", "--port", str(port), "--log-level", "warn"]
    command += ["--policy", "cache_aware" if fleet.by_cache else "round_robin", "--prometheus-port", str(free_port())]
    return [*command, "--worker-urls", *fleet.urls]


def vllm_router_path() -> str:
    return program("vllm-router", "KVHERD_VLLM_ROUTER", ".venv-routers/bin/vllm-router")


def vllm_router_command(fleet: Fleet, port: int, _folder: Path) -> list[str]:
    command = [vllm_router_path(), "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    command += ["--policy", "cache_aware" if fleet.by_cache else "round_robin", "--prometheus-port", str(free_port())]
    return [*command, "--worker-urls", *fleet.urls]


def sglang_router_path() -> str:
    return program("sglang-router", "KVHERD_SGLANG_ROUTER", ".venv-routers/bin/sglang-router")


def sglang_router_command(fleet: Fleet, port: int, _folder: Path) -> list[str]:
    command = [sglang_router_path(), "launch", "--host", "127.0.0.1", "--port", str(port), "--log-level", "warn"]
    command += ["--policy", "cache_aware" if fleet.by_cache else "round_robin", "--prometheus-port", str(free_port())]
    return [*command, "--worker-urls", *fleet.urls]


def kvherd_version() -> str:
    from importlib.metadata import version  # noqa: PLC0415

    return f"{version('kvherd')} on Python {platform.python_version()}"


def interpreted_version() -> str:
    if not compiled.count():
        raise Absent("kvherd is interpreted as it is (`make compile`)")
    return kvherd_version()


def nginx_version() -> str:
    path = program("nginx", "KVHERD_NGINX", "nginx", "/usr/sbin/nginx")
    said = subprocess.run([path, "-v"], capture_output=True, text=True, check=False).stderr
    return said.strip().rpartition("/")[2]


ALL = (
    Contender(KVHERD, kvherd_command, kvherd_version, ready="/ready"),
    Contender(INTERPRETED, interpreted_command, interpreted_version, ready="/ready"),
    Contender(NGINX, nginx_command, nginx_version),
    Contender(SMG, smg_command, lambda: package_version(smg_path(), "smg"), ready="/v1/models"),
    Contender(
        VLLM_ROUTER,
        vllm_router_command,
        lambda: package_version(vllm_router_path(), "vllm_router"),
        ready="/v1/models",
    ),
    Contender(
        SGLANG_ROUTER,
        sglang_router_command,
        lambda: package_version(sglang_router_path(), "sglang_router"),
        ready="/v1/models",
    ),
)


# --- the engines ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Engines:
    pid: int
    ports: list[int]
    live: tuple[str, ...]
    replay: tuple[str, ...]

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(f"http://127.0.0.1:{port}" for port in self.ports)


@contextmanager
def engines(cores: frozenset[int], *, tick_ms: float, events: Path | None = None) -> Iterator[Engines]:
    command = [sys.executable, str(HERE / "_engine.py"), "--tick-ms", str(tick_ms)]
    command += ["--events", str(events)] if events else []
    with on(cores):
        starting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with starting as child:
        try:
            assert child.stdout is not None
            said = json.loads(child.stdout.readline())
            yield Engines(child.pid, said["http"], tuple(said["live"]), tuple(said["replay"]))
        finally:
            child.kill()
