"""One gateway over engines of every make at once: stock vLLM and SGLang, and kvherd's own, over HTTP and over gRPC."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from kvherd.testing.herds import EngineProcess, GatewayProcess, Start, begin_engine, begin_gateway
from kvherd.testing.processes import KvherdProcess, OwnedProcess, free_ports
from kvherd.testing.stock_engines import MODEL, StockEngine, StockServer, sglang, vllm

READY_S = 500.0
NAMES = ("bridged", "ranked", "sglang", "on_grpc", "ours", "ours_http")


@dataclass(slots=True)
class StockFleet:
    """Six workers of one model, named as the fields are and `ours_http`, and a gateway.

    bridged   vLLM with a bridge, in its development mode and without a profiler: it can be flushed, not profiled
    ranked    vLLM of two ranks, read from its own sockets, the other way round
    sglang    SGLang over HTTP, read from its own sockets
    on_grpc   SGLang in its gRPC mode, which tells its events itself
    ours      kvherd's engine of two ranks over gRPC; `ours_http` over HTTP
    """

    folder: Path
    keep: Callable[[OwnedProcess], OwnedProcess]
    start: Start
    bridged: StockEngine = field(init=False)
    ranked: StockEngine = field(init=False)
    sglang: StockEngine = field(init=False)
    on_grpc: StockEngine = field(init=False)
    ours: EngineProcess = field(init=False)
    ours_http: EngineProcess = field(init=False)
    gateway: GatewayProcess = field(init=False)
    urls: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        """All that takes long starts at the same time."""
        self.bridged = StockEngine(self._bridged(), self.keep)
        self.ranked = StockEngine(self._ranked(), self.keep)
        self.sglang = StockEngine(self._sglang(grpc=False), self.keep)
        self.on_grpc = StockEngine(self._sglang(grpc=True), self.keep)
        self.ours = begin_engine(self.start, "--model", MODEL, "--dp-size", "2")
        self.ours_http = begin_engine(self.start, "--model", MODEL)
        for engine in (self.bridged, self.ranked, self.sglang, self.on_grpc):
            engine.await_ready(within_s=READY_S)
        listen = f"127.0.0.1:{free_ports((0,))}"
        self.start(*self.bridged.server.bridge_words(listen))
        workers = (
            f"{self.bridged.server.url},events=grpc://{listen}",
            self.ranked.server.direct_worker,
            self.sglang.server.direct_worker,
            self.on_grpc.server.url,
            self.ours.grpc_url,
            self.ours_http.http_worker,
        )
        self.urls = {name: worker.partition(",")[0] for name, worker in zip(NAMES, workers, strict=True)}
        self.gateway = begin_gateway(self.start, *workers, up=len(workers))
        self.gateway.process.wait_for(self.is_followed, within_s=60, what="it follows all of them")

    def _bridged(self) -> StockServer:
        return vllm(free_ports((0,)), events=f"ipc://{self.folder}/events", replay=f"ipc://{self.folder}/replay")

    def _ranked(self) -> StockServer:
        port = free_ports((0, 1, 2, 3, 4))
        told = {"profiler": "torch", "torch_profiler_dir": f"{self.folder}/vllm", "torch_profiler_with_stack": False}
        profiler = ("--profiler-config", json.dumps(told))
        events, replay = f"tcp://127.0.0.1:{port + 1}", f"tcp://127.0.0.1:{port + 3}"
        return vllm(port, events=events, replay=replay, ranks=2, dev_mode=False, options=profiler)

    def _sglang(self, *, grpc: bool) -> StockServer:
        """An idle scheduler of SGLang's would else keep a core busy."""
        port = free_ports((0, 1, 2, 3))
        events, replay = f"tcp://127.0.0.1:{port + 2}", f"tcp://127.0.0.1:{port + 3}"
        server = sglang(port, events=events, replay=replay, grpc=grpc, options=("--sleep-on-idle",))
        traces = {"SGLANG_TORCH_PROFILER_DIR": f"{self.folder}/sglang"}
        return replace(server, environment=server.environment | traces)

    def is_followed(self) -> bool:
        return all(worker["kv"]["state"] == "live" for worker in self.workers().values())

    def workers(self) -> dict[str, dict[str, Any]]:
        """As GET /workers has them, by name; of those that are members."""
        by_url: dict[Any, dict[str, Any]] = {worker["url"]: worker for worker in self.gateway.workers()}
        return {name: by_url[url] for name, url in self.urls.items() if url in by_url}

    def ordered(
        self, path: str, *, timeout_s: float, **body: object
    ) -> tuple[httpx.Response, dict[str, dict[str, Any]]]:
        """Give an order, and return the answer and each worker's result by name."""
        answer = httpx.post(f"{self.gateway.url}{path}", json=body or None, timeout=timeout_s)
        results = {result["url"]: result for result in answer.json().get("workers", ())}
        return answer, {name: results[url] for name, url in self.urls.items() if url in results}


@contextmanager
def stock_fleet(folder: Path) -> Iterator[StockFleet]:
    with ExitStack() as stack:

        def keep(process: OwnedProcess) -> OwnedProcess:
            return stack.enter_context(process)

        yield StockFleet(folder, keep, lambda *words: stack.enter_context(KvherdProcess(*words)))
