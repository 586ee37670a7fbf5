"""The one table of statuses: each error that may leave a process, by HTTP and by gRPC.

gRPC codes are names here (`grpc.StatusCode[name]` at the edge); `wire` knows no gRPC. An error that is not in the
table is a defect and leaves as 500 / INTERNAL without its text.
"""

import re
from dataclasses import dataclass

from kvherd.core import errors
from kvherd.core.fleet import host_names, keyring, refusals, spec
from kvherd.core.ids import WorkerId
from kvherd.core.kv import stream


@dataclass(frozen=True, slots=True)
class Status:
    """`kind` and `code` are the `type` and `code` of an OpenAI error body."""

    http: int
    grpc: str
    kind: str
    code: str


TABLE: dict[type[errors.KvherdError], Status] = {
    errors.BodyNotJson: Status(400, "INVALID_ARGUMENT", "invalid_request_error", "invalid_json"),
    errors.FieldInvalid: Status(400, "INVALID_ARGUMENT", "invalid_request_error", "invalid_value"),
    errors.PromptTooLong: Status(400, "INVALID_ARGUMENT", "invalid_request_error", "context_length_exceeded"),
    errors.Unsupported: Status(400, "UNIMPLEMENTED", "invalid_request_error", "unsupported"),
    errors.ModelUnknown: Status(404, "NOT_FOUND", "invalid_request_error", "model_not_found"),
    errors.WorkerUnknown: Status(404, "NOT_FOUND", "invalid_request_error", "worker_not_found"),
    host_names.HostUnknown: Status(421, "PERMISSION_DENIED", "invalid_request_error", "host_unknown"),
    host_names.PageElsewhere: Status(403, "PERMISSION_DENIED", "permission_error", "page_elsewhere"),
    errors.NotAllowed: Status(403, "PERMISSION_DENIED", "permission_error", "not_allowed"),
    keyring.KeyUnknown: Status(401, "UNAUTHENTICATED", "authentication_error", "invalid_api_key"),
    keyring.KeyLimitReached: Status(429, "RESOURCE_EXHAUSTED", "rate_limit_error", "rate_limit_exceeded"),
    errors.RequestUnknown: Status(404, "NOT_FOUND", "invalid_request_error", "request_not_found"),
    errors.RequestDuplicate: Status(409, "ALREADY_EXISTS", "invalid_request_error", "request_exists"),
    errors.OrderRefused: Status(400, "FAILED_PRECONDITION", "invalid_request_error", "order_refused"),
    errors.OrderConflict: Status(409, "FAILED_PRECONDITION", "invalid_request_error", "order_conflict"),
    errors.BodyTooLarge: Status(413, "RESOURCE_EXHAUSTED", "invalid_request_error", "body_too_large"),
    errors.HeadTooLarge: Status(431, "RESOURCE_EXHAUSTED", "invalid_request_error", "headers_too_large"),
    errors.CallerTooSlow: Status(408, "DEADLINE_EXCEEDED", "invalid_request_error", "request_timed_out"),
    errors.PortInUse: Status(500, "INTERNAL", "server_error", "port_in_use"),
    errors.OptionInvalid: Status(400, "INVALID_ARGUMENT", "invalid_request_error", "option_invalid"),
    spec.ConfigInvalid: Status(400, "INVALID_ARGUMENT", "invalid_request_error", "config_invalid"),
    errors.ModelMissing: Status(500, "INTERNAL", "server_error", "model_missing"),
    errors.ModelUnsupported: Status(500, "INTERNAL", "server_error", "model_unsupported"),
    errors.StartFailed: Status(500, "INTERNAL", "server_error", "start_failed"),
    errors.PartDied: Status(500, "INTERNAL", "server_error", "part_died"),
    errors.GatewayUnreachable: Status(502, "UNAVAILABLE", "server_error", "gateway_unreachable"),
    errors.WorkerUnreachable: Status(502, "UNAVAILABLE", "server_error", "worker_unreachable"),
    errors.WorkerTimedOut: Status(504, "DEADLINE_EXCEEDED", "server_error", "worker_timed_out"),
    refusals.WorkerBusy: Status(503, "UNAVAILABLE", "server_error", "worker_busy"),
    errors.WorkerRefused: Status(502, "FAILED_PRECONDITION", "server_error", "worker_refused"),
    errors.WorkerLocked: Status(502, "FAILED_PRECONDITION", "server_error", "worker_locked"),
    errors.WorkerUnsupported: Status(501, "UNIMPLEMENTED", "server_error", "worker_unsupported"),
    errors.WorkerFailed: Status(502, "UNAVAILABLE", "server_error", "worker_failed"),
    errors.SchedulerDied: Status(503, "UNAVAILABLE", "server_error", "scheduler_died"),
    errors.EngineStopping: Status(503, "UNAVAILABLE", "server_error", "engine_stopping"),
    errors.OrderTimedOut: Status(504, "DEADLINE_EXCEEDED", "server_error", "order_timed_out"),
    errors.QueueFull: Status(503, "RESOURCE_EXHAUSTED", "server_error", "queue_full"),
    errors.FrameInvalid: Status(400, "INVALID_ARGUMENT", "invalid_request_error", "frame_invalid"),
    errors.GatewayStopping: Status(503, "UNAVAILABLE", "server_error", "gateway_stopping"),
    errors.GatewayFull: Status(503, "UNAVAILABLE", "server_error", "gateway_full"),
    refusals.DeadlinePassed: Status(504, "DEADLINE_EXCEEDED", "invalid_request_error", "deadline_passed"),
    refusals.GatewayBusy: Status(429, "RESOURCE_EXHAUSTED", "rate_limit_error", "gateway_busy"),
    refusals.BodiesFull: Status(503, "RESOURCE_EXHAUSTED", "server_error", "bodies_full"),
    refusals.WaitedInVain: Status(503, "UNAVAILABLE", "server_error", "waited_in_vain"),
    refusals.NameUnknown: Status(404, "NOT_FOUND", "invalid_request_error", "not_found"),
    refusals.KeeperSilent: Status(503, "UNAVAILABLE", "server_error", "keeper_silent"),
    refusals.DescriptorsExhausted: Status(503, "UNAVAILABLE", "server_error", "descriptors_exhausted"),
    errors.NoWorker: Status(503, "UNAVAILABLE", "server_error", "no_worker"),
    stream.EventsUnsupported: Status(501, "UNIMPLEMENTED", "server_error", "kv_events_unsupported"),
    stream.ResumeOutOfRange: Status(409, "OUT_OF_RANGE", "invalid_request_error", "kv_resume_out_of_range"),
    stream.StreamForbidden: Status(403, "PERMISSION_DENIED", "invalid_request_error", "kv_events_forbidden"),
    stream.EpochEnded: Status(503, "DATA_LOSS", "server_error", "kv_epoch_ended"),
    stream.SubscriberTooSlow: Status(503, "RESOURCE_EXHAUSTED", "server_error", "kv_subscriber_too_slow"),
    stream.StreamUntranslatable: Status(502, "FAILED_PRECONDITION", "server_error", "kv_events_untranslatable"),
    stream.StreamBroken: Status(502, "UNAVAILABLE", "server_error", "kv_stream_broken"),
    stream.BatchUntranslatable: Status(502, "FAILED_PRECONDITION", "server_error", "kv_batch_untranslatable"),
}

MOST_CHARACTERS = 8192
"""Of a sentence to a stranger."""
_UNTRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED: (.+?)(?:: OK)?$")
_DEFECT = Status(500, "INTERNAL", "server_error", "internal")


def status_of(error: BaseException) -> Status:
    """The row of the error's own class or nearest parent; 500 for anything that is not ours."""
    for cls in type(error).__mro__:
        if cls in TABLE:
            return TABLE[cls]
    return _DEFECT


def public_message(error: BaseException) -> str:
    """What a stranger may read: our own sentence, or nothing of an unforeseen error's text."""
    if isinstance(error, errors.KvherdError):
        sentence = str(error)  # some repeat what the client wrote
        return sentence if len(sentence) <= MOST_CHARACTERS else sentence[:MOST_CHARACTERS] + "…"
    return "an unforeseen error occurred; the log of this process has it under the request id"


def worker_error(worker: WorkerId, grpc: str, details: str, *, what: str, after_s: float | None) -> errors.WorkerError:
    """What a worker's gRPC status means for whoever called `what` on it.

    `after_s` is the time the worker was given; None: it was given none, so that its own time-out is its failure.
    """
    untrusted = _UNTRUSTED.search(details)
    reason = f"its certificate is not trusted: {untrusted[1]}" if untrusted else details or f"status {grpc}"
    match grpc:
        case "UNAVAILABLE":
            return errors.WorkerUnreachable(worker, reason)
        case "DEADLINE_EXCEEDED" if after_s is not None:
            return errors.WorkerTimedOut(worker, after_s)
        case "UNIMPLEMENTED":
            return errors.WorkerUnsupported(worker, what)
        case "INTERNAL" | "UNKNOWN" | "DATA_LOSS" | "CANCELLED" | "DEADLINE_EXCEEDED":
            return errors.WorkerFailed(worker, reason)
        case _:
            return errors.WorkerRefused(worker, reason)
