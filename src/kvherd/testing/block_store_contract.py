"""What every store of blocks must do. A suite of it derives from `BlockStoreContract` and says how to open one, and
how its bytes are lost and damaged behind its back.
"""

from concurrent.futures import ThreadPoolExecutor

from kvherd.core.ids import BlockName
from kvherd.ports.block_store import BlockStore

SIZE_BYTES = 1024
NAMES = [BlockName(f"{number:02x}" * 16) for number in range(1, 8)]


def block(number: int) -> memoryview:
    return memoryview(bytes((number + at) % 256 for at in range(SIZE_BYTES)))


def room(count: int) -> list[memoryview]:
    return [memoryview(bytearray(SIZE_BYTES)) for _ in range(count)]


class BlockStoreContract:
    def opened(self) -> BlockStore:
        """An empty one with room for a hundred blocks of `SIZE_BYTES`."""
        raise NotImplementedError

    def lose(self, store: BlockStore, name: BlockName) -> None:
        raise NotImplementedError

    def damage(self, store: BlockStore, name: BlockName, *, at: int) -> None:
        raise NotImplementedError

    def shorten(self, store: BlockStore, name: BlockName) -> None:
        raise NotImplementedError

    def filled(self, count: int) -> BlockStore:
        store = self.opened()
        blocks = [block(number) for number in range(count)]
        assert store.put(NAMES[:count], blocks, timeout_s=20.0) == [True] * count
        return store

    def test_what_was_put_is_read_bit_by_bit(self) -> None:
        store = self.filled(3)
        into = room(3)
        assert store.read(NAMES[:3], into, timeout_s=20.0) == [True] * 3
        assert into == [block(0), block(1), block(2)]

    def test_answers_are_in_the_order_of_the_names(self) -> None:
        store = self.filled(3)
        into = room(2)
        assert store.read([NAMES[2], NAMES[0]], into, timeout_s=20.0) == [True, True]
        assert into == [block(2), block(0)]

    def test_the_first_that_is_missing_ends_the_count(self) -> None:
        store = self.filled(4)
        assert store.find(NAMES[:6], timeout_s=20.0) == 4
        self.lose(store, NAMES[1])
        assert store.find(NAMES[:6], timeout_s=20.0) == 1
        assert store.find([NAMES[5]], timeout_s=20.0) == 0
        assert store.find([], timeout_s=20.0) == 0

    def test_a_block_that_is_missing_is_not_read(self) -> None:
        store = self.filled(2)
        self.lose(store, NAMES[1])
        assert store.read(NAMES[:2], room(2), timeout_s=20.0) == [True, False]

    def test_a_byte_that_changed_anywhere_is_noticed(self) -> None:
        for at in (0, SIZE_BYTES // 2, SIZE_BYTES - 1):
            store = self.filled(2)
            self.damage(store, NAMES[1], at=at)
            assert store.read(NAMES[:2], room(2), timeout_s=20.0) == [True, False]

    def test_a_block_that_is_too_short_is_noticed(self) -> None:
        store = self.filled(2)
        self.shorten(store, NAMES[1])
        assert store.read(NAMES[:2], room(2), timeout_s=20.0) == [True, False]

    def test_a_block_of_another_size_is_not_read(self) -> None:
        store = self.filled(1)
        for size_bytes in (SIZE_BYTES // 2, SIZE_BYTES * 2):
            assert store.read(NAMES[:1], [memoryview(bytearray(size_bytes))], timeout_s=20.0) == [False]

    def test_a_damaged_block_can_be_put_again(self) -> None:
        store = self.filled(1)
        self.damage(store, NAMES[0], at=3)
        assert store.read(NAMES[:1], room(1), timeout_s=20.0) == [False]
        assert store.put(NAMES[:1], [block(0)], timeout_s=20.0) == [True]
        assert store.read(NAMES[:1], room(1), timeout_s=20.0) == [True]

    def test_putting_what_is_there_changes_nothing(self) -> None:
        store = self.filled(2)
        assert store.put(NAMES[:2], [block(0), block(1)], timeout_s=20.0) == [True, True]
        assert store.find(NAMES[:2], timeout_s=20.0) == 2

    def test_without_time_nothing_is_promised_and_nothing_breaks(self) -> None:
        store = self.filled(2)
        assert len(store.read(NAMES[:2], room(2), timeout_s=0.0)) == 2
        assert len(store.put(NAMES[2:4], [block(2), block(3)], timeout_s=0.0)) == 2
        assert store.find(NAMES[:2], timeout_s=0.0) <= 2

    def test_writers_and_readers_at_once_never_see_a_part_of_a_block(self) -> None:
        store = self.opened()
        blocks = [block(number) for number in range(len(NAMES))]

        def read_them(_turn: int) -> None:
            into = room(len(NAMES))
            for number, verified in enumerate(store.read(NAMES, into, timeout_s=20.0)):
                assert not verified or into[number] == blocks[number]

        with ThreadPoolExecutor(4) as threads:
            puts = [threads.submit(store.put, NAMES, blocks, timeout_s=20.0) for _ in range(6)]
            reads = [threads.submit(read_them, turn) for turn in range(12)]
            assert all(all(each.result()) for each in puts)
            for each in reads:
                each.result()
        assert store.find(NAMES, timeout_s=20.0) == len(NAMES)
