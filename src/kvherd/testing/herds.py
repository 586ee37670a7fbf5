"""Engines, gateways and herds as real processes on the tiny model, for tests."""

import http.client
import json
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvherd.testing.processes import ENGINE_OFFSETS, KvherdProcess, OwnedProcess, free_ports

Start = Callable[..., KvherdProcess]
"""Starts a `kvherd` command and sees to its end."""

BeginOdd = Callable[..., "OddWorkerProcess"]
"""Starts a worker of `kvherd.testing.odd_worker`, given its mood and perhaps its port, and sees to its end."""

HERD_OFFSETS = (*ENGINE_OFFSETS, *(100 + offset for offset in ENGINE_OFFSETS))


def get(url: str, *, timeout_s: float = 5.0) -> tuple[int, bytes]:
    """Status and body; 0 if nothing answers."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", parts.path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


@dataclass(frozen=True)
class EngineProcess:
    process: KvherdProcess
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port + 2}"

    @property
    def sidecar_url(self) -> str:
        return f"http://127.0.0.1:{self.port + 1}"

    @property
    def grpc_url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    @property
    def http_worker(self) -> str:
        """As a gateway's option has it: HTTP, with KV events from gRPC."""
        return f"{self.url},events={self.grpc_url}"

    @property
    def events(self) -> tuple[str, ...]:
        """As a bridge's options have it."""
        zmq = (f"tcp://127.0.0.1:{self.port + offset}" for offset in (10, 30))
        return ("--events", next(zmq), "--replay", next(zmq))

    @property
    def ports(self) -> list[int]:
        return [self.port + offset for offset in ENGINE_OFFSETS]

    def kill_rank(self) -> None:
        """SIGKILL to the scheduler process."""
        self.process.kill_member("kvherd.runtime.process")


@dataclass(frozen=True)
class OddWorkerProcess:
    process: OwnedProcess
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class BridgeProcess:
    process: KvherdProcess
    port: int

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class GatewayProcess:
    process: KvherdProcess
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def workers(self) -> list[dict[str, object]]:
        return workers_of(self.url)

    def has_up(self, count: int) -> bool:
        return sum(worker["state"] == "up" for worker in self.workers()) == count


@dataclass(frozen=True)
class HerdProcess:
    process: KvherdProcess
    gateway_port: int
    engine_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway_port}"

    @property
    def engine_urls(self) -> tuple[str, str]:
        return f"http://127.0.0.1:{self.engine_port + 2}", f"http://127.0.0.1:{self.engine_port + 102}"

    @property
    def ports(self) -> list[int]:
        return [self.gateway_port, self.gateway_port + 1, *(self.engine_port + offset for offset in HERD_OFFSETS)]

    @property
    def is_up(self) -> bool:
        return "Three things to try" in self.process.said


def workers_of(gateway_url: str) -> list[dict[str, object]]:
    status, body = get(f"{gateway_url}/workers")
    workers: list[dict[str, object]] = json.loads(body)["workers"] if status == 200 else []
    return workers


def begin_engine(start: Start, *options: str, port: int | None = None) -> EngineProcess:
    """Start an engine and wait until it answers."""
    chosen = port or free_ports()
    words = ("engine", "--model", "tiny", "--port", str(chosen), "--threads", "1")
    engine = EngineProcess(start(*words, *options), chosen)
    engine.process.wait_for(lambda: get(f"{engine.url}/health")[0] == 200, what="the engine answers")
    return engine


def begin_bridge(start: Start, engine_url: str, *options: str, port: int | None = None) -> BridgeProcess:
    """Start a bridge before the engine and wait until it listens; the engine need not be there."""
    chosen = port or free_ports((0,))
    words = ("bridge", "--engine", engine_url, "--listen", f"127.0.0.1:{chosen}")
    bridge = BridgeProcess(start(*words, *options), chosen)
    bridge.process.wait_for(lambda: "serving the KV events" in bridge.process.said, what="the bridge serves")
    return bridge


def begin_gateway(
    start: Start, *workers: str, port: int | None = None, up: int = 0, options: tuple[str, ...] = ()
) -> GatewayProcess:
    """Start a gateway with these workers and wait until it answers and `up` of them are up; with 0, for none."""
    chosen = port or free_ports((0, 1))
    words = [word for worker in workers for word in ("--worker", worker)]
    own = ("--port", str(chosen), "--grpc-port", str(chosen + 1), "--max-retry-s", "0.5")
    gateway = GatewayProcess(start("gateway", *own, *words, *options), chosen)
    gateway.process.wait_for(lambda: get(f"{gateway.url}/health")[0] == 200, what="the gateway answers")
    if up:  # that none is up may be over before anybody looks
        gateway.process.wait_for(lambda: gateway.has_up(up), what=f"{up} workers are up")
    return gateway


def begin_herd(start: Start, *options: str) -> HerdProcess:
    """Start `kvherd up`, and wait for nothing."""
    engine_port, gateway_port = free_ports(HERD_OFFSETS), free_ports((0, 1))
    words = ("--gateway-port", str(gateway_port), "--engine-port", str(engine_port))
    return HerdProcess(start("up", "--model", "tiny", *words, *options), gateway_port, engine_port)
