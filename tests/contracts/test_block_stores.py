"""The stores of blocks keep the promises of their port: the one in memory for tests, and the one in files."""

import os
from pathlib import Path

import pytest

from kvherd.core.errors import OptionInvalid
from kvherd.core.ids import BlockName
from kvherd.ports.block_store import BlockStore
from kvherd.runtime.file_store import FileBlockStore
from kvherd.testing.block_store import MemoryBlockStore
from kvherd.testing.block_store_contract import NAMES, SIZE_BYTES, BlockStoreContract, block, room


class TestMemoryBlockStore(BlockStoreContract):
    def opened(self) -> BlockStore:
        return MemoryBlockStore(most_blocks=100)

    def lose(self, store: BlockStore, name: BlockName) -> None:
        assert isinstance(store, MemoryBlockStore)
        store.lose(name)

    def damage(self, store: BlockStore, name: BlockName, *, at: int) -> None:
        assert isinstance(store, MemoryBlockStore)
        store.damage(name, at=at)

    def shorten(self, store: BlockStore, name: BlockName) -> None:
        assert isinstance(store, MemoryBlockStore)
        store.shorten(name)


class TestFileBlockStore(BlockStoreContract):
    @pytest.fixture(autouse=True)
    def somewhere(self, tmp_path: Path) -> None:
        self.directory = tmp_path
        self.stores = 0

    def opened(self) -> BlockStore:
        self.stores += 1
        return FileBlockStore(self.directory / f"store{self.stores}", most_bytes=100 * 1200)

    def lose(self, store: BlockStore, name: BlockName) -> None:
        self.path(name).unlink()

    def damage(self, store: BlockStore, name: BlockName, *, at: int) -> None:
        whole = bytearray(self.path(name).read_bytes())
        whole[len(whole) - SIZE_BYTES + at] ^= 1
        self.path(name).write_bytes(whole)

    def shorten(self, store: BlockStore, name: BlockName) -> None:
        self.path(name).write_bytes(self.path(name).read_bytes()[:-1])

    def path(self, name: BlockName) -> Path:
        return self.directory / f"store{self.stores}" / name[:2] / f"{name}.kv"

    def test_a_block_that_stands_under_another_s_name_is_not_that_one(self) -> None:
        store = self.filled(2)
        first, second = (self.path(name) for name in NAMES[:2])
        second.write_bytes(first.read_bytes())
        assert store.read(NAMES[:2], room(2), timeout_s=1.0) == [True, False]
        assert not second.exists()

    def test_a_damaged_header_is_noticed_and_its_file_is_gone(self) -> None:
        store = self.filled(1)
        whole = bytearray(self.path(NAMES[0]).read_bytes())
        whole[5] ^= 1
        self.path(NAMES[0]).write_bytes(whole)
        assert store.read(NAMES[:1], room(1), timeout_s=20.0) == [False]
        assert store.find(NAMES[:1], timeout_s=20.0) == 0

    def test_another_process_finds_what_was_put(self) -> None:
        self.filled(2)
        other = FileBlockStore(self.directory / "store1", most_bytes=1 << 20)
        into = room(2)
        assert other.read(NAMES[:2], into, timeout_s=20.0) == [True, True]
        assert into == [block(0), block(1)]


def names(count: int) -> list[BlockName]:
    return [BlockName(f"{number:032x}") for number in range(count)]


def test_what_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    store = FileBlockStore(tmp_path, most_bytes=40 * 1100)
    for index, name in enumerate(names(39)):
        store.put([name], [block(index)], timeout_s=20.0)
        os.utime(tmp_path / name[:2] / f"{name}.kv", (index, index))
    assert store.read(names(1), room(1), timeout_s=20.0) == [True]
    more = [BlockName(f"ff{number:030x}") for number in range(39)]
    for index, name in enumerate(more):
        assert store.put([name], [block(index)], timeout_s=20.0) == [True]
    held_bytes = sum(path.stat().st_size for path in tmp_path.glob("*/*.kv"))
    assert held_bytes <= 40 * 1100 * 17 / 16 + 1100
    assert store.find(names(1), timeout_s=20.0) == 1, "it was read just now"
    assert store.find(names(2)[1:], timeout_s=20.0) == 0
    assert store.find(more[-1:], timeout_s=20.0) == 1


def test_what_a_killed_writer_left_is_removed_some_time_later(tmp_path: Path) -> None:
    store = FileBlockStore(tmp_path, most_bytes=1 << 20)
    (tmp_path / "01").mkdir()
    for name, age_s in (("old", 10_000), ("new", 0)):
        path = tmp_path / "01" / name
        path.write_bytes(b"half")
        changed_s = path.stat().st_mtime - age_s
        os.utime(path, (changed_s, changed_s))
    store.put(NAMES[:1], [block(0)], timeout_s=20.0)
    assert [path.name for path in (tmp_path / "01").iterdir() if path.suffix != ".kv"] == ["new"]


def test_a_directory_that_cannot_be_written_is_refused_by_the_options_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OptionInvalid, match=r"--storage-dir.*file/store cannot be written: Not a directory"):
        FileBlockStore(tmp_path / "file" / "store", most_bytes=1)


def test_a_directory_that_is_taken_away_costs_blocks_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileBlockStore(tmp_path / "store", most_bytes=1 << 20)
    store.put(NAMES[:1], [block(0)], timeout_s=20.0)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    assert store.find(NAMES[:1], timeout_s=20.0) == 0
    assert store.read(NAMES[:1], room(1), timeout_s=20.0) == [False]
    assert store.put(NAMES[1:3], [block(1), block(2)], timeout_s=20.0) == [False, False]
    assert "keeps no more blocks: No such file or directory" in caplog.text


def test_a_store_that_does_not_answer_is_left_in_time() -> None:
    store = MemoryBlockStore()
    store.open.clear()
    assert store.find(NAMES[:1], timeout_s=0.01) == 0
    assert store.read(NAMES[:1], room(1), timeout_s=0.01) == [False]
    assert store.put(NAMES[:1], [block(0)], timeout_s=0.01) == [False]
