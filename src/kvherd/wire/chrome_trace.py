"""Chrome's trace event format, as Perfetto and chrome://tracing open it: JSON, an array of events, one a line.

The array's end may be missing, so a trace that was cut off still opens. Times go in as nanoseconds of one clock and
stand there in microseconds. A process is a rank, a thread a track of it. A viewer takes a track whose number is that of
its process for the main thread, so no track may have a rank's number.
"""

from typing import Any

import msgspec

BEGIN = b"[\n"
BETWEEN = b",\n"
END = b"\n]\n"

_encode = msgspec.json.Encoder().encode

Arguments = dict[str, Any]


def process_name(rank: int, name: str) -> bytes:
    return _encode({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}})


def process_place(rank: int) -> bytes:
    """Ranks one below the other in their order, which is not that of their first events."""
    return _encode({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})


def track_name(rank: int, track: int, name: str) -> bytes:
    return _encode({"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}})


def span(rank: int, track: int, name: str, *, category: str, begin_ns: int, end_ns: int, args: Arguments) -> bytes:
    return _encode(
        {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": rank,
            "tid": track,
            "ts": begin_ns / 1000,
            "dur": (end_ns - begin_ns) / 1000,
            "args": args,
        }
    )


def counter(rank: int, name: str, *, at_ns: int, values: dict[str, int]) -> bytes:
    return _encode({"ph": "C", "name": name, "pid": rank, "tid": 0, "ts": at_ns / 1000, "args": values})


def note(rank: int, track: int, name: str, *, at_ns: int, args: Arguments) -> bytes:
    """A moment with something to say."""
    return _encode({"ph": "i", "s": "p", "name": name, "pid": rank, "tid": track, "ts": at_ns / 1000, "args": args})
