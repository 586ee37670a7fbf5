"""Recorded ZMQ messages: a first line `KVZT1`, then records of (time f64, frames u32, {length u32, bytes})."""

import struct
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import zmq

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


def write_recording(path: Path, messages: Iterable[Recorded]) -> None:
    with path.open("wb") as file:
        file.write(MAGIC)
        for message in messages:
            file.write(struct.pack(">dI", message.received_s, len(message.frames)))
            for frame in message.frames:
                file.write(struct.pack(">I", len(frame)) + frame)


class Recorder:
    """Keeps what a publisher sends, in a thread. A context manager; `messages` may be read at any time."""

    def __init__(self, endpoint: str) -> None:
        self.messages: list[Recorded] = []
        self._endpoint = endpoint
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="recorder")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _listen(self) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as socket:
            socket.set(zmq.RCVHWM, 0)
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RECONNECT_IVL, 20)
            socket.subscribe(b"")
            socket.connect(self._endpoint)
            while not self._over.is_set():
                if socket.poll(50):
                    frames = socket.recv_multipart()
                    self.messages.append(Recorded(time.time(), tuple(frames)))


def ask_replay(endpoint: str, start: int, *, silence_ms: int = 1000) -> list[Recorded]:
    """Every message of the answer, the end marker too if it came."""
    answers: list[Recorded] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.connect(endpoint)
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        while socket.poll(silence_ms):
            answers.append(Recorded(time.time(), tuple(socket.recv_multipart())))
    return answers
