"""Converted weights: once for all starts, whole or not at all."""

from pathlib import Path

import numpy as np
import pytest

from kvherd.core.errors import StartFailed
from kvherd.runtime import weight_cache
from kvherd.runtime.tiny import TINY, random_weights
from kvherd.runtime.weight_cache import WeightCache
from kvherd.runtime.weights import Weights


class Converter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Weights:
        self.calls += 1
        return random_weights(TINY)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF of some kind")
    return path


def same(one: Weights, other: Weights) -> bool:
    names = one.named()
    return names.keys() == other.named().keys() and all(
        np.array_equal(names[name], other.named()[name]) for name in names
    )


def test_the_second_start_maps_what_the_first_converted(tmp_path: Path, model: Path) -> None:
    convert = Converter()
    first = WeightCache(tmp_path / "cache").load(model, convert)
    second = WeightCache(tmp_path / "cache").load(model, convert)
    assert convert.calls == 1
    assert same(first, random_weights(TINY))
    assert same(second, first)
    assert not second.head.flags.writeable
    assert second.layers[0].down.flags.f_contiguous


def test_a_model_file_that_changed_is_converted_anew(tmp_path: Path, model: Path) -> None:
    convert = Converter()
    WeightCache(tmp_path / "cache").load(model, convert)
    model.write_bytes(b"GGUF of another kind")
    WeightCache(tmp_path / "cache").load(model, convert)
    assert convert.calls == 2


@pytest.mark.parametrize("damage", ["cut", "index", "gone"])
def test_a_damaged_entry_is_made_again(tmp_path: Path, model: Path, damage: str) -> None:
    convert = Converter()
    WeightCache(tmp_path / "cache").load(model, convert)
    (arrays,), (index,) = (tmp_path / "cache").glob("*.bin"), (tmp_path / "cache").glob("*.json")
    if damage == "cut":
        arrays.write_bytes(arrays.read_bytes()[:-1])
    elif damage == "index":
        index.write_text('{"layers": 2}')
    else:
        arrays.unlink()
    assert same(WeightCache(tmp_path / "cache").load(model, convert), random_weights(TINY))
    assert convert.calls == 2
    WeightCache(tmp_path / "cache").load(model, convert)
    assert convert.calls == 2


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path, model: Path) -> None:
    def broken() -> Weights:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 - its own, unchanged
        WeightCache(tmp_path / "cache").load(model, broken)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_directory_that_cannot_be_written_costs_the_cache_only(tmp_path: Path, model: Path) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    assert same(WeightCache(tmp_path / "cache").load(model, Converter()), random_weights(TINY))


def test_who_waits_for_a_conversion_in_vain_is_told(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_cache, "LOCK_DEADLINE_S", 0.0)

    def start_again() -> Weights:
        return WeightCache(tmp_path / "cache").load(model, Converter())

    with pytest.raises(StartFailed, match="another process has held"):
        WeightCache(tmp_path / "cache").load(model, start_again)
