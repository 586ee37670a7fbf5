"""Takes the usage that a client did not ask for out of an event stream again, so that it sees what it would have seen.

With `include_usage` vLLM, SGLang and kvherd end a stream with one more event: no choices, and the usage. vLLM moves its
`system_fingerprint` there too, from the event with the finish reason: it is put back.

Whole events pass at once. An unfinished one waits for its end, unless it is longer than any usage; the event with the
finish reason waits for the next, which an engine sends with it.
"""

import re
from typing import Final

import msgspec

_EVENT_END: Final = re.compile(rb"(?>\r\n|\n|\r){2}")  # atomic: \r\n is one line end
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_FINISHED: Final = re.compile(rb'"finish_reason"\s*:\s*"')
_MOST_BYTES: Final = 64 * 1024


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: msgspec.Raw = msgspec.Raw()
    system_fingerprint: msgspec.Raw = msgspec.Raw()

    @property
    def extra(self) -> bool:
        return self.choices == [] and bytes(self.usage) not in (b"", b"null")


_decoder = msgspec.json.Decoder(_Event)


class TakenUsage:
    """Feed it the stream's bytes in any pieces; what it returns goes to the client."""

    __slots__ = ("_finished", "_in_long_event", "_kept", "_open_end", "_removed")

    def __init__(self) -> None:
        self._kept = b""
        self._finished = b""
        self._in_long_event = False
        self._open_end = False
        self._removed = False

    def feed(self, data: bytes) -> bytes:
        passed: list[bytes] = []
        if self._open_end and data.startswith(b"\n"):
            passed.append(self._other_half())
            data = data[1:]
        self._open_end = self._open_end and not data
        data = self._kept + data
        place = 0
        for found in _EVENT_END.finditer(data):
            passed.append(self._event(data[place : found.end()]))
            place = found.end()
            # What ended with \r at the end of a piece may be half of \r\n.
            self._open_end = place == len(data) and data.endswith(b"\r")
        self._kept = data[place:]
        if len(self._kept) > _MOST_BYTES:
            passed += (self._release(), self._pass_on_but_the_end())
        return b"".join(passed)

    def end(self) -> bytes:
        """What is left when the stream is over, whether it was complete or not."""
        left = self._release() + self._kept
        self._kept = b""
        return left

    def _other_half(self) -> bytes:
        """A newline that belongs to the event before it, and goes its way."""
        if self._finished:
            self._finished += b"\n"
        return b"" if self._finished or self._removed else b"\n"

    def _event(self, event: bytes) -> bytes:
        self._removed = False
        if self._in_long_event:
            self._in_long_event = False
            return event
        read = _read(event) if b'"usage"' in event else None
        if read is not None and read.extra:
            self._removed = True
            return self._release(bytes(read.system_fingerprint)) + _comments(event)
        released = self._release()
        if _FINISHED.search(event):
            self._finished = event
            return released
        return released + event

    def _release(self, fingerprint: bytes = b"") -> bytes:
        finished, self._finished = self._finished, b""
        if not finished or fingerprint in (b"", b"null"):
            return finished
        read = _read(finished)
        if read is None or bytes(read.system_fingerprint):
            return finished
        end = finished.rindex(b"}")
        return finished[:end] + b',"system_fingerprint":' + fingerprint + finished[end:]

    def _pass_on_but_the_end(self) -> bytes:
        """Too long for a usage: all but what may be the first half of the event's end."""
        self._in_long_event = True
        kept = self._kept[-3:]
        passed, self._kept = self._kept[: -len(kept)], kept
        return passed


def _read(event: bytes) -> _Event | None:
    """The JSON of an event of one data line; None if it is another kind of event."""
    data = [line[5:] for line in _LINE_END.split(event) if line.startswith(b"data:")]
    if len(data) != 1:
        return None
    try:
        return _decoder.decode(data[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _comments(event: bytes) -> bytes:
    """Comments that stood in a removed event, and a blank line after them."""
    lines = [line for line in _LINE_END.split(event) if line.startswith(b":")]
    return b"\n".join((*lines, b"", b"")) if lines else b""
