"""Converted weights: once for all starts, whole or not at all."""

import threading
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


def names(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()}


def test_the_entry_of_a_file_that_changed_is_removed_and_stays_readable_where_it_is_mapped(
    tmp_path: Path, model: Path
) -> None:
    cache = tmp_path / "cache"
    mapped = WeightCache(cache).load(model, Converter())
    before = names(cache)
    model.write_bytes(b"GGUF of another kind")
    WeightCache(cache).load(model, Converter())
    assert len(names(cache)) == len(before) == 3
    assert not names(cache) & before
    assert same(mapped, random_weights(TINY))


def test_entries_of_other_models_stay(tmp_path: Path, model: Path) -> None:
    cache, other = tmp_path / "cache", tmp_path / "other.gguf"
    other.write_bytes(b"GGUF of a friend")
    WeightCache(cache).load(other, Converter())
    kept = names(cache)
    WeightCache(cache).load(model, Converter())
    assert kept < names(cache)


@pytest.mark.parametrize(
    ("index", "stays"),
    [
        ('{"layers": 1, "size_bytes": 1, "arrays": {}}', False),  # as format 1 was
        ('{"layers": 1, "size_bytes": 1, "arrays": {}, "format": 99}', True),
        ('{"a later": "format"}', True),
        (None, False),
    ],
    ids=["older", "later", "unknown", "half made"],
)
def test_entries_that_nobody_reads_any_more_are_removed(
    tmp_path: Path, model: Path, index: str | None, *, stays: bool
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "weights-00ff.bin").write_text("1")
    (cache / "weights-00ff.binq8_x2").write_text("as a killed conversion leaves it")
    (cache / "notes.txt").write_text("somebody else's")
    if index is not None:
        (cache / "weights-00ff.json").write_text(index)
    WeightCache(cache).load(model, Converter())
    assert (cache / "weights-00ff.bin").exists() is stays
    assert any(name.startswith("weights-00ff") for name in names(cache)) is stays
    assert "notes.txt" in names(cache)


def test_what_a_killed_conversion_left_of_the_same_model_is_removed(tmp_path: Path, model: Path) -> None:
    cache = tmp_path / "cache"
    WeightCache(cache).load(model, Converter())
    entry, (index,) = names(cache), cache.glob("*.json")
    index.with_suffix(".binq8_x2").write_text("half of it")
    index.unlink()
    WeightCache(cache).load(model, Converter())
    assert names(cache) == entry


def test_an_entry_that_another_process_is_making_is_left_to_it(tmp_path: Path, model: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    making = cache / "weights-00ff.binabcdefgh"
    making.write_text("half of it")
    with weight_cache._locked(cache / "weights-00ff.lock"):
        WeightCache(cache).load(model, Converter())
        assert making.exists()


def test_a_lock_that_was_removed_while_one_waited_is_taken_anew(tmp_path: Path) -> None:
    """1. A holds the lock. 2. B waits for it. 3. A removes its file and lets go. 4. B must not hold a nameless one."""
    path, held = tmp_path / "x.lock", threading.Event()

    def second() -> None:
        with weight_cache._locked(path):
            held.set()
            assert path.exists()

    thread = threading.Thread(target=second, daemon=True)
    with weight_cache._locked(path):
        thread.start()
        assert not held.wait(0.1)
        path.unlink()
    assert held.wait(10)
    thread.join(10)
    assert path.exists()
