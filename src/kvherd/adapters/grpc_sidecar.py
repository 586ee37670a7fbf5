"""The HTTP sidecar of an engine on gRPC: what its protocol has no field or call for."""

from collections.abc import Mapping

from kvherd.adapters.grpc_url import grpc_target
from kvherd.adapters.http_exchange import HttpAsker, pool_to
from kvherd.adapters.http_profile import engine_metrics, start_profile, stop_profile
from kvherd.adapters.http_url import HttpAddress
from kvherd.adapters.tls import ClientTls
from kvherd.core.ids import WorkerId
from kvherd.ports.worker import ProfileAnswer, WorkerKind


def beside(target: str) -> HttpAddress:
    """Where the sidecar is unless someone says otherwise; `target` is the engine's gRPC.

    Beside an engine that speaks TLS the sidecar does, too: nothing goes there in the clear unless a label says so.
    """
    address, tls = grpc_target(target)
    host, _, port = address.rpartition(":")
    return HttpAddress(host.strip("[]"), int(port) + 1, tls=tls)


class GrpcSidecar:
    """Every call raises `WorkerUnreachable` where no sidecar listens."""

    def __init__(self, worker: WorkerId, address: HttpAddress, tls: ClientTls | None = None) -> None:
        self._worker = worker
        self.address = address
        self._pool = pool_to(address, tls)
        self._asker = HttpAsker(worker, self.address, self._pool, api_key=None)

    async def start_profile(self, fields: Mapping[str, object]) -> ProfileAnswer:
        return await start_profile(self._worker, self._asker, WorkerKind.SGLANG_HTTP, fields)

    async def stop_profile(self) -> ProfileAnswer:
        return await stop_profile(self._worker, self._asker)

    async def metrics(self) -> bytes:
        return await engine_metrics(self._worker, self._asker)

    async def close(self) -> None:
        await self._pool.close()
