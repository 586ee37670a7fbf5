"""Files of weights as stock engines read them, in bfloat16, without their library."""

import json
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def write_safetensors(path: Path, tensors: Iterable[tuple[str, Floats]]) -> None:
    """A length, a JSON head, and the arrays one after the other."""
    entries: dict[str, object] = {}
    arrays, end = [], 0
    for name, array in tensors:
        data = _bfloat16(array)
        entries[name] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [end, end + len(data)]}
        arrays.append(data)
        end += len(data)
    head = json.dumps(entries).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.writelines(arrays)


def _bfloat16(array: Floats) -> bytes:
    """The upper half of each float32, rounded to the nearest, to even where two are as near."""
    bits = np.ascontiguousarray(array).view(np.uint32)
    rounded = bits + ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    return (rounded >> np.uint32(16)).astype("<u2").tobytes()
