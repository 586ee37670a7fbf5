"""What a status of `SubscribeKvEvents` means: the table of `wire/status.py`, read the other way round."""

from typing import Final

from kvherd.core.ids import Epoch
from kvherd.core.kv import stream
from kvherd.wire.status import TABLE

_WITH_REASON: Final = (
    stream.EventsUnsupported,
    stream.StreamForbidden,
    stream.EpochEnded,
    stream.SubscriberTooSlow,
    stream.StreamUntranslatable,
)
_BY_CODE: Final[dict[str, type[stream.KvStreamError]]] = {TABLE[error].grpc: error for error in _WITH_REASON}


def stream_error(code: str, details: str, epoch: Epoch | None = None) -> stream.KvStreamError:
    """The error that a gRPC status stands for, by its name; a status of no meaning here is a broken connection.

    `epoch` is what the trailers told of the publisher's present life.
    """
    if code == TABLE[stream.ResumeOutOfRange].grpc:
        return stream.ResumeOutOfRange(_reason(stream.ResumeOutOfRange, details), epoch)
    error = stream.StreamForbidden if code == "UNAUTHENTICATED" else _BY_CODE.get(code)
    if error in _WITH_REASON:
        return error(_reason(error, details))
    return stream.StreamBroken(f"{code}: {details}")


def _reason(error: type[stream.KvStreamError], details: str) -> str:
    """Without the sentence that kvherd's own servers have put around it already."""
    before, after = str(error("\0")).split("\0")
    return details.removeprefix(before).removesuffix(after)
