"""The head of a GGUF file: what the model is, its vocabulary, and where its tensors lie.

    "GGUF" · version u32 · tensors u64 · entries u64 · entries · tensor descriptions · padding · tensor data

All little-endian, versions 2 and 3. The package `gguf` reads the same, but makes an array of every token of the
vocabulary: seconds where this takes a tenth of one, and every process of an engine reads the head once.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from kvherd.core.errors import FrameInvalid

Value = int | float | bool | str | list["Value"]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST = 1 << 28  # no count or length in a sane file is larger; a torn file has any


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """`shape` in rows-first order (the file has the fastest dimension first); `offset` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHead:
    metadata: Mapping[str, Value]
    tensors: tuple[GgufTensor, ...]


def decode_head(file: bytes | memoryview) -> GgufHead:
    """Read the head from a buffer that begins with it. Raises `FrameInvalid` and nothing else."""
    cursor = _Cursor(memoryview(file))
    try:
        return _head(cursor)
    except (struct.error, UnicodeDecodeError, RecursionError) as error:
        raise FrameInvalid("GGUF", f"it is cut short or damaged near byte {cursor.at}") from error


class _Cursor:
    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.at = 0

    def number(self, code: str) -> int:
        layout = struct.Struct("<" + code)
        (value,) = layout.unpack_from(self.buffer, self.at)
        self.at += layout.size
        return int(value)

    def count(self) -> int:
        value = self.number("Q")
        if value > _LONGEST:
            raise struct.error("a length beyond reason")
        return value

    def string(self) -> str:
        length = self.count()
        if self.at + length > len(self.buffer):
            raise struct.error("a string beyond the end")
        text = bytes(self.buffer[self.at : self.at + length]).decode()
        self.at += length
        return text

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, length = self.number("I"), self.count()
            if element in (_STRING, _ARRAY):
                return [self.value(element) for _ in range(length)]
            return list(self.scalars(element, length))
        return self.scalars(kind, 1)[0]

    def scalars(self, kind: int, length: int) -> tuple[int | float | bool, ...]:
        if kind not in _SCALARS:
            raise FrameInvalid("GGUF", f"it has a value of unknown type {kind} near byte {self.at}")
        layout = struct.Struct(f"<{length}{_SCALARS[kind]}")
        values = layout.unpack_from(self.buffer, self.at)
        self.at += layout.size
        return values


def _head(cursor: _Cursor) -> GgufHead:
    if bytes(cursor.buffer[:4]) != b"GGUF":
        raise FrameInvalid("GGUF", "it does not begin with the letters GGUF")
    cursor.at = 4
    version = cursor.number("I")
    if version not in (2, 3):
        raise FrameInvalid("GGUF", f"its version is {version}; 2 and 3 can be read")
    tensors, entries = cursor.count(), cursor.count()
    metadata: dict[str, Value] = {}
    for _ in range(entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    described = [_tensor(cursor) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise FrameInvalid("GGUF", f"its alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    return GgufHead(
        metadata,
        tuple(GgufTensor(tensor.name, tensor.shape, tensor.ggml_type, start + tensor.offset) for tensor in described),
    )


def _tensor(cursor: _Cursor) -> GgufTensor:
    name = cursor.string()
    dimensions = cursor.number("I")
    if dimensions > 8:
        raise FrameInvalid("GGUF", f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.count() for _ in range(dimensions))
    ggml_type, offset = cursor.number("I"), cursor.number("Q")
    return GgufTensor(name, shape[::-1], ggml_type, offset)
