"""What an answer cost, read from its bytes as they pass by, untouched: `usage` in a JSON body or an SSE event, or the
`meta_info` that SGLang's own `/generate` has in every event.
"""

from typing import Final

import msgspec

from kvherd.adapters.told_usage import read_told
from kvherd.ports.completions import Usage

_USAGE: Final = b'"usage"'
_META: Final = b'"meta_info"'
_KEPT_BYTES: Final = 1024 * 1024

TOLD: Final = b'_tokens"'
"""No event without it tells a usage."""


class UsageSniffer:
    """Feed it the body's pieces; `usage` is the last one told, None if there was none or it could not be read.

    Of an event stream it keeps an unfinished line, of another body the whole; past 1 MiB it gives up and keeps nothing.
    """

    __slots__ = ("_kept", "_last", "_stream", "_told")

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._kept = b""
        self._last = b""
        self._told: Usage | None = None

    def feed(self, data: bytes) -> None:
        if not self._stream:
            self._keep(self._kept + data if self._kept else data)
            return
        if self._kept:
            data = self._kept + data
            self._kept = b""
        if not data.endswith(b"\n"):
            end = data.rfind(b"\n") + 1
            self._keep(data[end:])
            data = data[:end]
        if data.rfind(TOLD) < 0:  # half of what `in` costs
            return
        if _USAGE in data:
            for line in data.split(b"\n"):
                if _USAGE in line and line.startswith(b"data:"):
                    self._read(line[5:])
        if _META in data:  # in every event: only the last one counts
            begin = data.rfind(b"\n", 0, data.rfind(_META)) + 1
            end = data.find(b"\n", begin)
            self._last = data[begin:end].removeprefix(b"data:")

    @property
    def between_events(self) -> bool:
        """Whether whole events that tell nothing need not be fed next."""
        return self._stream and not self._kept

    def usage(self) -> Usage | None:
        """Call once, when the body is complete."""
        if self._last:
            self._read(self._last)
        if not self._stream and self._kept.rfind(TOLD) >= 0:
            self._read(self._kept)
        return self._told

    def _keep(self, data: bytes) -> None:
        self._kept = data if len(data) <= _KEPT_BYTES else b""

    def _read(self, document: bytes) -> None:
        try:
            answer = read_told(document)
        except (
            msgspec.MsgspecError,
            UnicodeDecodeError,
            RecursionError,
        ):  # not as OpenAI has it: then there is nothing to tell
            return
        usage = answer.usage
        if answer.meta_info is not None and answer.index is None:
            self._told = answer.meta_info.usage() or self._told
        if usage is not None:
            details = usage.prompt_tokens_details
            if details is None:  # stock servers leave it out, or say null, until they are told to report it
                self._told = Usage(usage.prompt_tokens or 0, None, usage.completion_tokens or 0)
                return
            tiers = details.cached_tokens_details
            host, storage = tiers.told if tiers is not None else (0, 0)
            self._told = Usage(usage.prompt_tokens or 0, details.told, usage.completion_tokens or 0, host, storage)
