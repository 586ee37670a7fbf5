"""What was asked of `kvherd gateway`, as plain values: all that passes from who read the words to who serves."""

from pathlib import Path

import msgspec

from kvherd.cli.logs import LogLevel
from kvherd.core.routing.late import LateBounds
from kvherd.services.gateway.settings import AdmissionBounds, HealMode


class GatewayOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Of a compiled class among them only plain types survive: it says `type` where its source says `float | None`."""

    workers: tuple[str, ...]
    config: str | None
    policy: str
    host: str
    host_names: tuple[str, ...]
    port: int
    grpc_port: int
    admin_key: str | None
    data_key: str | None
    engine_key: str | None
    tls_cert: str | None
    tls_key: str | None
    tls_client_ca: str | None
    worker_ca: str | None
    worker_cert: str | None
    worker_key: str | None
    worker_tls_name: str | None
    resolve_s: float
    usage_sample: float
    heal: HealMode
    max_retry_s: float
    probe_period_s: float
    probe_deadline_s: float | None
    first_byte_s: float
    admission: AdmissionBounds
    late: LateBounds
    log_level: LogLevel
    access_log: str | None
    supervised: bool

    def __repr__(self) -> str:
        """Without the keys."""
        return f"GatewayOptions({self.host}:{self.port})"


def encode(options: GatewayOptions) -> bytes:
    return msgspec.msgpack.encode(options)


def decode(data: bytes) -> GatewayOptions:
    return msgspec.msgpack.decode(data, type=GatewayOptions)


def text_of(path: Path | None) -> str | None:
    return None if path is None else str(path)


def path_of(text: str | None) -> Path | None:
    return None if text is None else Path(text)
