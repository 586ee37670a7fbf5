"""The head of a GGUF, byte by byte."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from kvherd.core.errors import FrameInvalid
from kvherd.testing.gguf_files import write_llama
from kvherd.testing.plain_llama import PlainShape, random_tensors
from kvherd.wire.gguf import decode_head

SHAPE = PlainShape(40, 8, 12, layers=1, heads=2, kv_heads=1, head_size=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_llama(path, SHAPE, random_tensors(SHAPE))
    return path


def test_tensors_lie_where_the_package_gguf_finds_them(model: Path) -> None:
    ours = {tensor.name: (tensor.shape, tensor.offset) for tensor in decode_head(model.read_bytes()).tensors}
    theirs = {
        tensor.name: (tuple(int(size) for size in reversed(tensor.shape)), tensor.data_offset)
        for tensor in GGUFReader(model).tensors
    }
    assert ours == theirs
    assert len(ours) == 11


def test_values_of_every_kind_are_read(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "kinds.gguf", "llama")
    expected: dict[str, Any] = {
        "u8": 200, "i8": -3, "u16": 60000, "i16": -300, "u32": 1 << 31, "i32": -5, "u64": 1 << 40, "i64": -(1 << 40),
        "f32": 0.5, "f64": 0.1, "yes": True, "text": "naïve", "many": [1, 2, 3], "words": ["a", "bé"],
    }  # fmt: skip
    add: dict[str, Callable[[str, Any], None]] = {
        "u8": writer.add_uint8, "i8": writer.add_int8, "u16": writer.add_uint16, "i16": writer.add_int16,
        "u32": writer.add_uint32, "i32": writer.add_int32, "u64": writer.add_uint64, "i64": writer.add_int64,
        "f32": writer.add_float32, "f64": writer.add_float64, "yes": writer.add_bool, "text": writer.add_string,
        "many": writer.add_array, "words": writer.add_array,
    }  # fmt: skip
    for name, value in expected.items():
        add[name](name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = decode_head((tmp_path / "kinds.gguf").read_bytes()).metadata
    assert {name: metadata[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "does not begin with the letters GGUF"),
        (b"PK\x03\x04", "does not begin with the letters GGUF"),
        (b"GGUF", "cut short or damaged"),
        (b"GGUF" + struct.pack("<I", 9), "its version is 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "cut short or damaged"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQ1sIQ", 3, 0, 1, 1, b"k", 8, 1 << 20), "cut short or damaged"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 99), "has 99 dimensions"),
    ],
)
def test_what_is_no_gguf_is_refused_with_the_reason(data: bytes, said: str) -> None:
    with pytest.raises(FrameInvalid, match=said):
        decode_head(data)


def test_an_alignment_of_nothing_is_refused(tmp_path: Path) -> None:
    write_llama(tmp_path / "model.gguf", SHAPE, random_tensors(SHAPE), entries={"general.alignment": 0})
    with pytest.raises(FrameInvalid, match="its alignment is 0"):
        decode_head((tmp_path / "model.gguf").read_bytes())


def test_a_head_cut_anywhere_is_refused(model: Path) -> None:
    whole = model.read_bytes()
    end = max(whole.rfind(b"blk.0"), whole.rfind(b"output_norm"))
    for length in range(0, end, 7):
        with pytest.raises(FrameInvalid):
            decode_head(whole[:length])


@given(noise=st.binary(max_size=200))
def test_noise_is_refused_and_does_nothing_else(noise: bytes) -> None:
    with pytest.raises(FrameInvalid):
        decode_head(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + noise[:30])
