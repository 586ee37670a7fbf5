"""Errors as OpenAI's clients read them."""

import msgspec

from kvherd.core.errors import FieldInvalid, ModelUnknown, OptionInvalid
from kvherd.wire.status import public_message, status_of

_MOST_CHARACTERS = 256


def error_body(error: BaseException) -> tuple[int, bytes]:
    """The HTTP status and the JSON body that say what went wrong; a defect of ours says nothing of itself."""
    status = status_of(error)
    return status.http, msgspec.json.encode({"error": error_object(error)})


def error_object(error: BaseException) -> dict[str, str | int | None]:
    """What stands under `error`, in a body as in a stream's event."""
    status = status_of(error)
    return {
        "message": public_message(error),
        "type": status.kind,
        "param": _param(error),
        "code": status.code,
    }


def _param(error: BaseException) -> str | None:
    if isinstance(error, FieldInvalid):
        return error.field[:_MOST_CHARACTERS]
    if isinstance(error, OptionInvalid) and not error.option.startswith("-"):  # a field of POST /workers
        return error.option[:_MOST_CHARACTERS]
    return "model" if isinstance(error, ModelUnknown) else None
