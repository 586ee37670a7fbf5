"""Every error that one room may show another, sorted by who has to act.

    KvherdError
    ├── CallerError      the caller must change the request
    ├── OperatorError    whoever started the process must change an option or the machine
    ├── WorkerError      one worker of the fleet failed; another may serve
    ├── EngineError      this engine cannot serve now
    ├── FrameInvalid     the other side of a connection broke its protocol
    └── FleetError       no worker can serve now; trying later may help

Errors hold fields and derive their sentence. Each leaf has its row in `wire/status.py`.
"""

from dataclasses import dataclass, fields
from typing import Any

from kvherd.core.ids import OrderId, RequestId, WorkerId


@dataclass(eq=False)
class KvherdError(Exception):
    """The root: str() is a sentence for the person who has to act."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))


# --- the caller must change the request ---------------------------------------------------------------


@dataclass(eq=False)
class CallerError(KvherdError):
    """The request cannot be served as it is."""


@dataclass(eq=False)
class BodyNotJson(CallerError):
    line: int
    column: int
    problem: str

    def __str__(self) -> str:
        return f"the body is not JSON: {self.problem} at line {self.line}, column {self.column}"


@dataclass(eq=False)
class FieldInvalid(CallerError):
    """`field` is a path such as `messages[2].content`; `problem` says what would be right."""

    field: str
    problem: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


@dataclass(eq=False)
class PromptTooLong(CallerError):
    """`at_least` says that the prompt was not counted to its end, as it is far too long."""

    prompt_tokens: int
    max_new_tokens: int
    context_tokens: int
    at_least: bool = False

    def __str__(self) -> str:
        asked = f" and {self.max_new_tokens} for the answer" if self.max_new_tokens else ""
        return (
            f"the prompt has {'at least ' * self.at_least}{self.prompt_tokens} tokens{asked}, "
            f"but the context of this model holds {self.context_tokens}; shorten one of them"
        )


@dataclass(eq=False)
class ModelUnknown(CallerError):
    model: str
    served: tuple[str, ...]

    def __str__(self) -> str:
        return f"model {self.model!r} is not served here; served: {', '.join(self.served) or 'none'}"


@dataclass(eq=False)
class WorkerUnknown(CallerError):
    name: str

    def __str__(self) -> str:
        return f"no worker {self.name!r} is registered here; GET /workers lists those that are"


@dataclass(eq=False)
class NotAllowed(CallerError):
    """The caller may not do it; `problem` says what it would need."""

    problem: str

    def __str__(self) -> str:
        return f"this is for operators: {self.problem}"


@dataclass(eq=False)
class BodyTooLarge(CallerError):
    limit_bytes: int

    def __str__(self) -> str:
        return f"the body is larger than {self.limit_bytes} bytes, the limit here"


@dataclass(eq=False)
class HeadTooLarge(CallerError):
    limit: int
    unit: str = "bytes"

    def __str__(self) -> str:
        return f"the request line and headers have more than {self.limit} {self.unit}, the limit here"


@dataclass(eq=False)
class CallerTooSlow(CallerError):
    """`part` is what did not arrive in time: headers or body."""

    part: str
    after_s: float

    def __str__(self) -> str:
        return f"the request's {self.part} did not arrive within {self.after_s:g} s"


@dataclass(eq=False)
class RequestUnknown(CallerError):
    request: RequestId

    def __str__(self) -> str:
        return f"no request {self.request!r} is alive here"


@dataclass(eq=False)
class RequestDuplicate(CallerError):
    request: RequestId

    def __str__(self) -> str:
        return f"a request {self.request!r} is alive here; choose another id or wait for its end"


@dataclass(eq=False)
class OrderRefused(CallerError):
    """Ranks understood an order and said no; `reason` is theirs, `ranks` what each said and whether it did it."""

    reason: str
    ranks: tuple[tuple[int, bool, str], ...] = ()

    def __str__(self) -> str:
        return self.reason


@dataclass(eq=False)
class OrderConflict(OrderRefused):
    """They said no because of what else is going on."""


@dataclass(eq=False)
class Unsupported(CallerError):
    what: str

    def __str__(self) -> str:
        return f"{self.what} is not supported here"


# --- whoever started the process must act ---------------------------------------------------------------


@dataclass(eq=False)
class OperatorError(KvherdError):
    """The process cannot start or run as configured."""


@dataclass(eq=False)
class PortInUse(OperatorError):
    port: int
    option: str

    def __str__(self) -> str:
        return f"port {self.port} is in use; choose another with {self.option}"


@dataclass(eq=False)
class OptionInvalid(OperatorError):
    option: str
    problem: str

    def __str__(self) -> str:
        return f"{self.option}: {self.problem}"


@dataclass(eq=False)
class ModelMissing(OperatorError):
    path: str
    problem: str

    def __str__(self) -> str:
        return f"no model at {self.path}: {self.problem}"


@dataclass(eq=False)
class ModelUnsupported(OperatorError):
    path: str
    problem: str

    def __str__(self) -> str:
        return f"cannot run {self.path}: {self.problem}"


@dataclass(eq=False)
class StartFailed(OperatorError):
    """A part did not come up; `reason` is its own last word."""

    part: str
    reason: str

    def __str__(self) -> str:
        return f"{self.part} did not start: {self.reason}"


@dataclass(eq=False)
class PartDied(OperatorError):
    """A part that was up ended by itself; `reason` is its own last word."""

    part: str
    reason: str

    def __str__(self) -> str:
        return f"{self.part} died: {self.reason}"


@dataclass(eq=False)
class GatewayUnreachable(OperatorError):
    url: str
    reason: str

    def __str__(self) -> str:
        return f"no gateway answers at {self.url}: {self.reason}; start one with `kvherd up`, or name it with --gateway"


# --- one worker of the fleet failed ---------------------------------------------------------------------


@dataclass(eq=False)
class WorkerError(KvherdError):
    worker: WorkerId


@dataclass(eq=False)
class WorkerUnreachable(WorkerError):
    reason: str = "connection failed"

    def __str__(self) -> str:
        return f"{self.worker} cannot be reached: {self.reason}"


@dataclass(eq=False)
class WorkerTimedOut(WorkerError):
    after_s: float

    def __str__(self) -> str:
        return f"{self.worker} gave no answer within {self.after_s:g} s"


@dataclass(eq=False)
class WorkerRefused(WorkerError):
    """The worker understood and said no; `reason` is its own."""

    reason: str

    def __str__(self) -> str:
        return f"{self.worker} refused: {self.reason}"


@dataclass(eq=False)
class WorkerLocked(WorkerError):
    """It wants an API key, or another one if it was `shown` one. `status` is its HTTP answer's."""

    status: int
    shown: bool

    @property
    def wants(self) -> str:
        what = "does not accept the API key that it was shown" if self.shown else "wants an API key"
        return f"{what} (HTTP {self.status})"

    def __str__(self) -> str:
        return f"{self.worker} {self.wants}: set KVHERD_ENGINE_API_KEY to its key"


@dataclass(eq=False)
class WorkerUnsupported(WorkerError):
    what: str

    def __str__(self) -> str:
        return f"{self.worker} does not support {self.what}"


@dataclass(eq=False)
class WorkerFailed(WorkerError):
    """The worker broke down or broke its protocol, possibly in the middle of an answer."""

    reason: str

    def __str__(self) -> str:
        return f"{self.worker} failed: {self.reason}"


# --- this engine cannot serve now -------------------------------------------------------------------------


@dataclass(eq=False)
class EngineError(KvherdError):
    """The engine behind this process cannot do it now."""


@dataclass(eq=False)
class SchedulerDied(EngineError):
    rank: int
    reason: str

    def __str__(self) -> str:
        return f"the scheduler of rank {self.rank} died: {self.reason}"


@dataclass(eq=False)
class EngineStopping(EngineError):
    def __str__(self) -> str:
        return "the engine is stopping"


@dataclass(eq=False)
class OrderTimedOut(EngineError):
    order: OrderId
    silent_ranks: tuple[int, ...]
    after_s: float

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.silent_ranks))
        return f"no answer from rank {ranks} within {self.after_s:g} s"


@dataclass(eq=False)
class QueueFull(EngineError):
    limit: int

    def __str__(self) -> str:
        return f"{self.limit} requests are waiting here already, the limit; try again later"


# --- the other side broke a protocol ----------------------------------------------------------------------


@dataclass(eq=False)
class FrameInvalid(KvherdError):
    """Bytes that the protocol does not allow."""

    protocol: str
    problem: str

    def __str__(self) -> str:
        return f"not a {self.protocol} frame: {self.problem}"


# --- nobody can serve now ------------------------------------------------------------------------------------


@dataclass(eq=False)
class FleetError(KvherdError):
    """The fleet as a whole cannot serve; trying later may help."""


@dataclass(eq=False)
class GatewayStopping(FleetError):
    def __str__(self) -> str:
        return "the gateway is stopping; try again later or elsewhere"


@dataclass(eq=False)
class GatewayFull(FleetError):
    limit: int

    def __str__(self) -> str:
        return f"{self.limit} connections are open here already, the limit; try again later"


@dataclass(eq=False)
class NoWorker(FleetError):
    """`ruled_out` says why for each worker, in words."""

    model: str
    ruled_out: tuple[str, ...]
    retry_after_s: int = 5

    def __str__(self) -> str:
        why = "; ".join(self.ruled_out) or "none is registered"
        return f"no worker can serve {self.model!r} now: {why}"
