"""Names of prefixes: equal for equal prefixes, and for nothing else."""

from itertools import combinations

import pytest

from kvherd.core.kv.events import ExtraKey
from kvherd.core.kv.hashing import PrefixHasher, prefix_chain, token_bytes

HASHER = PrefixHasher(b"k")
ROOT = HASHER.root(model="m", block_size=2)


def test_only_full_blocks_have_a_name_and_longer_prompts_share_the_shorter_ones() -> None:
    short = prefix_chain([1, 2, 3, 4, 5], block_size=2, model="m", key=b"k")
    long = prefix_chain([1, 2, 3, 4, 5, 6, 7, 8], block_size=2, model="m", key=b"k")
    assert len(short) == 2
    assert long[:2] == short
    assert all(0 <= name < 2**64 for name in long)
    assert prefix_chain([1], block_size=2, model="m", key=b"k") == []


def test_everything_that_makes_prefixes_different_makes_names_different() -> None:
    tokens = [1, 2, 3, 4]
    names = [
        prefix_chain(tokens, block_size=2, model="m", key=b"k"),
        prefix_chain(tokens, block_size=2, model="n", key=b"k"),
        prefix_chain(tokens, block_size=4, model="m", key=b"k"),
        prefix_chain(tokens, block_size=2, model="m", key=b"k", lora="a"),
        prefix_chain(tokens, block_size=2, model="m", key=b"k", lora=""),
        prefix_chain(tokens, block_size=2, model="m", key=b"k", salt="a"),
        prefix_chain(tokens, block_size=2, model="m", key=b"k", salt=""),
        prefix_chain(tokens, block_size=2, model="m", key=b"k", lora="a", salt="a"),
        prefix_chain(tokens, block_size=2, model="m", key=b"other"),
        prefix_chain([1, 2, 3, 5], block_size=2, model="m", key=b"k"),
    ]
    last = [chain[-1] for chain in names]
    assert len(set(last)) == len(last)


def test_extra_keys_that_look_alike_are_told_apart() -> None:
    keys: list[tuple[ExtraKey, ...]] = [
        (), ("a",), (b"a",), (97,), ("a", "b"), ("ab",), (("a", 98),), ("a", 98), (-1,), (1,), ("",), (("", 0),),
    ]  # fmt: skip
    names = [HASHER.extend(ROOT, token_bytes([1, 2]), 8, (key,))[0] for key in keys]
    assert all(one != other for one, other in combinations(names, 2))
    assert HASHER.extend(ROOT, token_bytes([1, 2]), 8)[0] == names[0]


def test_a_chain_may_be_made_in_two_steps() -> None:
    whole = HASHER.extend(ROOT, token_bytes([1, 2, 3, 4]), 8)
    first = HASHER.extend(ROOT, token_bytes([1, 2]), 8)
    assert first + HASHER.extend(first[0], token_bytes([3, 4]), 8) == whole


def test_an_empty_key_is_refused_and_a_key_is_never_shown() -> None:
    with pytest.raises(ValueError, match="1 to 64 bytes"):
        PrefixHasher(b"")
    assert "secret" not in repr(PrefixHasher(b"secret"))
