"""What a servicer is told when it is made."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServicerConfig:
    """`tokenizer_zip` is what GetTokenizer hands out. The engine's HTTP door is on `http_port`, its gRPC on `port`,
    and the sidecar on `sidecar_port`; 0 is none. `order_timeout_s` is for orders that bring no time of their own, as
    profiles do; `order_timeout_limit_s` is the most that one may bring.
    """

    model_name: str
    model_path: str
    tokenizer_zip: bytes
    host: str = "127.0.0.1"
    host_names: tuple[str, ...] = ()
    port: int = 51000
    http_port: int = 51002
    sidecar_port: int = 0
    body_limit_bytes: int = 32 * 2**20
    body_within_s: float = 60.0
    message_limit_bytes: int = 64 * 2**20
    drain_s: float = 5.0
    on_ready_within_s: float = 60.0
    order_body_limit_bytes: int = 2**20
    order_timeout_limit_s: float = 3600.0
    order_timeout_s: float = 600.0
