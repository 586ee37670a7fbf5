"""Stock vLLM and SGLang servers as processes on a CPU, with KV events: what `make test-vllm` and `test-sglang` install.

Their cache holds about 2,000 tokens, so that a hundred chats push blocks out of it.
"""

import json
import os
import signal
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx

from kvherd.testing.certificates import IssuedFiles
from kvherd.testing.herds import get
from kvherd.testing.processes import OwnedProcess, can_bind, wait_until

READY_S = 400.0
MODEL = "smollm2"
CACHE_TOKENS = 2048
STUBS = Path(__file__).parents[3] / "tests" / "peers" / "sglang_stubs"
# The engine must not starve what watches it; threads that wait for each other by spinning would.
_POLITE = ("nice", "-n", "5")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, slots=True)
class StockServer:
    """How one is started: its command, and where it is then. `bind_events`: who reads its events must listen.

    In `grpc` mode it serves its engine protocol at its port; SGLang, metrics at the next. With `authority` it speaks
    TLS, with a certificate from there.
    """

    kind: str
    command: tuple[str, ...]
    environment: dict[str, str]
    port: int
    events: str
    replay: str | None
    bind_events: bool = False
    grpc: bool = False
    ranks: int = 1
    authority: Path | None = None

    def secured(self, files: IssuedFiles, key: str) -> "StockServer":
        """The same over TLS, answering who brings the key."""
        words = ("--ssl-certfile", str(files.certificate), "--ssl-keyfile", str(files.key), "--api-key", key)
        return replace(self, command=(*self.command, *words), authority=files.authority)

    @property
    def url(self) -> str:
        return f"{'grpc' if self.grpc else 'https' if self.authority else 'http'}://127.0.0.1:{self.port}"

    @property
    def metrics_url(self) -> str:
        return f"http://127.0.0.1:{self.port + self.grpc}/metrics"

    @property
    def direct_worker(self) -> str:
        """As a gateway's option has it: the engine's own sockets."""
        replay = f",replay={self.replay}" if self.replay else ""
        bind = ",bind=1" if self.bind_events else ""
        return f"{self.url},events={self.events}{replay}{bind},tokenizer={model_directory()}"

    def bridge_words(self, listen: str) -> tuple[str, ...]:
        words = ("bridge", "--engine", self.url, "--events", self.events, "--listen", listen)
        replay = ("--replay", self.replay) if self.replay else ()
        bind = ("--bind-events",) if self.bind_events else ()
        ranks = ("--ranks", str(self.ranks)) if self.ranks > 1 else ()
        trust = ("--engine-ca", str(self.authority)) if self.authority else ()
        return (*words, *replay, *bind, *ranks, *trust, "--tokenizer", str(model_directory()))


@dataclass(slots=True)
class StockEngine:
    """A stock server that can be killed, stopped and started again at the same addresses. `keep` sees to its end."""

    server: StockServer
    keep: Callable[[OwnedProcess], OwnedProcess]
    process: OwnedProcess = field(init=False)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start it, and wait for nothing."""
        self.process = self.keep(OwnedProcess(self.server.command, environment=self.server.environment))

    def await_ready(self, *, within_s: float = READY_S) -> None:
        self.process.wait_for(self.answers, within_s=within_s, what=f"{self.server.kind} answers")

    def answers(self) -> bool:
        server = self.server
        if server.kind == "vllm-grpc":  # it has no HTTP, and listens when all else is done
            return not can_bind(server.port)
        if server.authority:
            return _is_well(f"{server.url}/health", server.authority)
        return get(server.metrics_url if server.grpc else f"{server.url}/health")[0] == 200

    def kill(self) -> None:
        """SIGKILL to every process of it."""
        self.signal(signal.SIGKILL)
        self.process.wait(within_s=10)
        wait_until(lambda: not self.process.family(), within_s=10, what="all its processes ended")

    def signal(self, number: signal.Signals) -> None:
        for pid in self.process.family():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def metric(self, name: str) -> float:
        """The sum over its labels; 0 if it is absent."""
        lines = get(self.server.metrics_url)[1].decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def running(self) -> float:
        return self.metric("vllm:num_requests_running") + self.metric("sglang:num_running_reqs")


def vllm(
    port: int,
    *,
    events: str,
    replay: str | None,
    dev_mode: bool = True,
    details: bool = True,
    ranks: int = 1,
    grpc: bool = False,
    options: tuple[str, ...] = (),
    replay_batches: int = 10_000,
    name: str = MODEL,
) -> StockServer:
    """vLLM listens at an `events` of `ipc://`, and connects to one of `tcp://`; it publishes none if that is empty.
    `details`: its answers say how many tokens were cached.
    """
    kv_events: dict[str, object] = {"enable_kv_cache_events": bool(events)}
    if events:
        kv_events |= {"publisher": "zmq", "endpoint": events, "topic": "kv-events"}
    if replay:
        kv_events |= {"replay_endpoint": replay, "buffer_steps": replay_batches}
    words = {
        "model": str(model_directory()),
        "served-model-name": name,
        "host": "127.0.0.1",
        "port": str(port),
        "max-model-len": "1024",
        "max-num-seqs": "4",
        "block-size": "32",
        "num-gpu-blocks-override": str(CACHE_TOKENS // 32),
        "kv-cache-memory-bytes": "16M",
        "kv-events-config": json.dumps(kv_events),
    }
    flags = ("--enforce-eager", *(("--enable-prompt-tokens-details",) if details and not grpc else ()))
    # `vllm serve` wants the metadata of a package that the CPU build has under another name.
    module = f"vllm.entrypoints.{'launchers.grpc_server' if grpc else 'openai.api_server'}"
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"} | _ONE_THREAD
    if ranks > 1:
        words["data-parallel-size"] = str(ranks)
    if dev_mode:
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    command = (*_POLITE, stock_python("VLLM"), "-m", module, *_words(words), *flags, *options)
    connects = events.startswith("tcp://")
    kind = "vllm-grpc" if grpc else "vllm-http"
    return StockServer(kind, command, environment, port, events, replay, connects, grpc, ranks)


def sglang(
    port: int,
    *,
    events: str,
    replay: str | None,
    binds: bool = True,
    page_size: int = 16,
    layout: str = "default",
    grpc: bool = False,
    report: bool = True,
    ranks: int = 1,
    options: tuple[str, ...] = (),
    replay_batches: int = 10_000,
    name: str = MODEL,
) -> StockServer:
    """It listens at `events` where `binds`, and publishes none if that is empty. `layout` of its events. `report`: its
    answers say how many tokens were cached.
    """
    kv_events: dict[str, object] = {"publisher": "zmq", "endpoint": events, "bind": binds, "format": layout}
    if replay:
        kv_events |= {"replay_endpoint": replay, "buffer_steps": replay_batches}
    words = {
        "model-path": str(model_directory()),
        "served-model-name": name,
        "host": "127.0.0.1",
        "port": str(port),
        "device": "cpu",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "grammar-backend": "none",
        "mem-fraction-static": "0.1",
        "context-length": "1024",
        "max-total-tokens": str(CACHE_TOKENS),
        "page-size": str(page_size),
    } | ({"kv-events-config": json.dumps(kv_events)} if events else {})
    flags = ["--disable-overlap-schedule", "--skip-server-warmup", "--enable-metrics"]
    if report:
        flags.append("--enable-cache-report")
    environment = {"PYTHONPATH": str(STUBS), "SGLANG_USE_CPU_ENGINE": "1"} | _ONE_THREAD
    if ranks > 1:
        words["dp-size"] = str(ranks)
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            str(rank % (os.cpu_count() or 1)) for rank in range(ranks)
        )
    if grpc:
        options = ("--smg-grpc-mode", *options)
    command = (*_POLITE, stock_python("SGLANG"), "-m", "sglang.launch_server", *_words(words), *flags, *options)
    kind = "sglang-grpc" if grpc else "sglang-http"
    return StockServer(kind, command, environment, port, events, replay, not binds, grpc, ranks)


def _is_well(url: str, authority: Path) -> bool:
    try:
        return httpx.get(url, verify=ssl.create_default_context(cafile=authority)).status_code == 200
    except httpx.TransportError:
        return False


def model_directory() -> Path:
    """Where `tests/peers/model_directory.py` wrote the model."""
    return Path(os.environ.get("KVHERD_STOCK_MODEL", "build/stock-model")).absolute()


def stock_python(name: str) -> str:
    """The interpreter of the environment that `make test-NAME` installs."""
    venv = Path(os.environ.get(f"KVHERD_{name}", f".venv-{name.lower()}"))
    python = venv / "bin" / "python"
    assert python.is_file(), f"there is no {python}; `make test-{name.lower()}` installs it and runs these tests"
    assert (model_directory() / "config.json").is_file(), f"there is no model in {model_directory()}"
    return str(python.absolute())


def _words(options: dict[str, str]) -> tuple[str, ...]:
    return tuple(word for name, value in options.items() for word in (f"--{name}", value))
