"""Recorded ZMQ messages: a first line `KVZT1`, then records of (time f64, frames u32, {length u32, bytes})."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAGIC: Final = b"KVZT1\n"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One ZMQ message as it was received."""

    received_s: float
    frames: tuple[bytes, ...]

    @property
    def sequence(self) -> int:
        return int.from_bytes(self.frames[-2], "big")

    @property
    def payload(self) -> bytes:
        return self.frames[-1]


def read_recording(path: Path) -> Iterator[Recorded]:
    """Raises `ValueError` for a file of another kind."""
    data = path.read_bytes()
    if not data.startswith(MAGIC):
        raise ValueError(f"{path} is no recording")
    place = len(MAGIC)
    while place < len(data):
        received_s, count = struct.unpack_from(">dI", data, place)
        place += 12
        frames = []
        for _ in range(count):
            (length,) = struct.unpack_from(">I", data, place)
            frames.append(data[place + 4 : place + 4 + length])
            place += 4 + length
        yield Recorded(received_s, tuple(frames))
