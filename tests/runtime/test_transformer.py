"""The paged, batched forward pass against a plain one that shares no line and no layout with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvherd.runtime import attention, row_shares
from kvherd.runtime.architecture import shape_of
from kvherd.runtime.batch import ForwardBatch, SequenceRows
from kvherd.runtime.blas_threads import BlasThreads
from kvherd.runtime.gguf_weights import read_head, read_weights
from kvherd.runtime.kv_pool import KvPool
from kvherd.runtime.transformer import Transformer
from kvherd.runtime.weights import Floats
from kvherd.testing.gguf_files import write_llama
from kvherd.testing.plain_llama import PlainLlama, PlainShape, random_tensors

SHAPES = {
    "grouped": PlainShape(50, 24, 40, layers=2, heads=6, kv_heads=2, head_size=4),
    "one head for all": PlainShape(37, 20, 33, layers=1, heads=5, kv_heads=1, head_size=6, rope_base=500.0),
    "a head of keys each": PlainShape(64, 16, 24, layers=3, heads=2, kv_heads=2, head_size=8, epsilon=1e-3),
}
CLOSE = 1e-4


@dataclass
class Twins:
    plain: PlainLlama
    paged: Transformer

    def agree(self, tokens: Sequence[int], logits: Floats) -> bool:
        return bool(np.allclose(self.plain.logits(tokens)[-1], logits, atol=CLOSE, rtol=CLOSE))


def twins(shape: PlainShape, *, blocks: int = 24, block_size: int = 4, tied: bool = True, seed: int = 0) -> Twins:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "model.gguf"
        tensors = write_llama(path, shape, random_tensors(shape, tied=tied, seed=seed))
        head = read_head(path)
        llama = shape_of(str(path), head)
        weights = read_weights(path, head, llama)
    pool = KvPool(llama, blocks=blocks, block_size=block_size)
    return Twins(PlainLlama(shape, tensors), Transformer(llama, weights, pool))


ALL_TWINS = {name: twins(shape, blocks=64) for name, shape in SHAPES.items()}


def prompt(count: int, *, vocab: int = 37, seed: int = 1) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 17])
def test_a_prompt_in_one_piece_has_the_logits_of_the_plain_model(name: str, count: int) -> None:
    pair = ALL_TWINS[name]
    tokens = prompt(count)
    logits = pair.paged.forward(ForwardBatch([SequenceRows(tokens, 0, [9, 3, 7, 1, 12])]))
    assert logits.shape == (1, SHAPES[name].vocab_size)
    assert pair.agree(tokens, logits[0])


def test_an_output_matrix_of_its_own_is_used() -> None:
    pair = twins(SHAPES["grouped"], tied=False)
    tokens = prompt(6)
    assert pair.agree(tokens, pair.paged.forward(ForwardBatch([SequenceRows(tokens, 0, [0, 1])]))[0])


def test_only_who_wants_logits_gets_them_and_in_order() -> None:
    pair = ALL_TWINS["grouped"]
    first, second, third = prompt(5, seed=1), prompt(3, seed=2), prompt(1, seed=3)
    logits = pair.paged.forward(
        ForwardBatch(
            [
                SequenceRows(first, 0, [0, 1]),
                SequenceRows(second, 0, [2], wants_logits=False),
                SequenceRows(third, 0, [3]),
            ]
        )
    )
    assert len(logits) == 2
    assert pair.agree(first, logits[0])
    assert pair.agree(third, logits[1])


@pytest.mark.parametrize("sequences", [[], [SequenceRows([1, 2], 0, [0], wants_logits=False)]])
def test_a_batch_that_wants_nothing_gives_nothing(sequences: list[SequenceRows]) -> None:
    assert ALL_TWINS["grouped"].paged.forward(ForwardBatch(sequences)).shape == (0, 50)


def test_a_prefix_that_another_sequence_computed_is_reused() -> None:
    pair = ALL_TWINS["grouped"]
    shared, one, other = prompt(8, seed=1), prompt(3, seed=2), prompt(5, seed=3)
    pair.paged.forward(ForwardBatch([SequenceRows(shared, 0, [5, 2], wants_logits=False)]))
    logits = pair.paged.forward(ForwardBatch([SequenceRows(one, 8, [5, 2, 9]), SequenceRows(other, 8, [5, 2, 0, 1])]))
    assert pair.agree(shared + one, logits[0])
    assert pair.agree(shared + other, logits[1])


def test_what_a_block_held_before_is_not_seen() -> None:
    pair = ALL_TWINS["grouped"]
    pair.paged.forward(ForwardBatch([SequenceRows(prompt(16, seed=8), 0, [4, 5, 6, 7])]))
    short, longer = prompt(2, seed=4), prompt(13, seed=5)
    pair.paged.forward(ForwardBatch([SequenceRows(longer[:-1], 0, [0, 1, 2, 3], wants_logits=False)]))
    pair.paged.forward(ForwardBatch([SequenceRows(short[:-1], 0, [6], wants_logits=False)]))
    logits = pair.paged.forward(
        ForwardBatch([SequenceRows(longer[-1:], 12, [0, 1, 2, 3]), SequenceRows(short[-1:], 1, [6])])
    )
    assert pair.agree(longer, logits[0])
    assert pair.agree(short, logits[1])


def test_a_long_chunk_attends_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SCORES_BYTES", 1)  # the smallest pieces there are, of 16 rows
    pair = ALL_TWINS["grouped"]
    tokens = prompt(50)
    logits = pair.paged.forward(ForwardBatch([SequenceRows(tokens, 0, list(range(30, 43)))]))
    assert pair.agree(tokens, logits[0])


def test_sequences_of_very_different_lengths_are_not_padded_to_one_another() -> None:
    pool = ALL_TWINS["grouped"].paged.pool
    rows = [SequenceRows([1], length - 1, list(range(16))) for length in (4, 60, 5, 64)]
    groups = attention.plan_attention(rows, pool)
    assert [sorted(part.rows) for part in groups if isinstance(part, attention.DecodeGroup)] == [[0, 2], [1, 3]]


class ThreeThreads(BlasThreads):
    """As many on any machine."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 3


@pytest.mark.parametrize("name", SHAPES)
def test_shares_of_a_step_have_the_logits_of_the_plain_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut inside a prompt behind a prefix, inside a fresh one, and between decode rows."""
    monkeypatch.setattr(row_shares, "LEAST_ROWS", 2)
    pair = ALL_TWINS[name]
    shared = Transformer(pair.paged.shape, pair.paged._weights, pair.paged.pool, threads=ThreeThreads())
    one, other, third = prompt(30, seed=1), prompt(21, seed=2), prompt(9, seed=3)
    tables = ([5, 1, 9, 2, 8, 3, 7, 4], [10, 15, 11, 14, 12, 13], [20, 19, 18])
    for _ in range(20):  # a race would not show every time
        pair.paged.pool.keys[:] = pair.paged.pool.values[:] = 7
        shared.forward(ForwardBatch([SequenceRows(one[:7], 0, tables[0]), SequenceRows(third[:-1], 0, tables[2])]))
        logits = shared.forward(
            ForwardBatch(
                [
                    SequenceRows(one[7:], 7, tables[0]),
                    SequenceRows(third[-1:], len(third) - 1, tables[2]),
                    SequenceRows(other, 0, tables[1]),
                ]
            )
        )
        assert len(logits) == 3
        for tokens, row in zip((one, third, other), logits, strict=True):
            assert pair.agree(tokens, row)


@pytest.mark.parametrize("token", [-1, 50, 2**40])
def test_a_token_outside_the_vocabulary_is_refused_before_anything_is_written(token: int) -> None:
    paged = ALL_TWINS["grouped"].paged
    before = paged.pool.keys.copy()
    with pytest.raises(ValueError, match=f"token {token} is not in the vocabulary of 50"):
        paged.forward(ForwardBatch([SequenceRows([1, 2], 0, [0]), SequenceRows([3, token], 0, [1])]))
    assert np.array_equal(paged.pool.keys, before)


@st.composite
def schedules(draw: st.DrawFn) -> list[list[int]]:
    """For each of some sequences, the sizes of the chunks that its tokens come in."""
    return draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4))


@settings(max_examples=60, deadline=None)
@given(chunks=schedules(), name=st.sampled_from(sorted(SHAPES)), dice=st.randoms(use_true_random=False))
def test_no_chunking_and_no_company_changes_the_logits(chunks: list[list[int]], name: str, dice: object) -> None:
    """Sequences take turns in batches of any mix, over blocks in any order."""
    pair = ALL_TWINS[name]
    order = list(range(64))
    dice.shuffle(order)  # type: ignore[attr-defined]
    tables = [order[index * 12 : index * 12 + 12] for index in range(len(chunks))]
    texts = [prompt(sum(sizes), seed=index) for index, sizes in enumerate(chunks)]
    done = [0] * len(chunks)
    for turn in range(max(map(len, chunks))):
        members = [index for index, sizes in enumerate(chunks) if turn < len(sizes)]
        rows = [
            SequenceRows(texts[index][done[index] : done[index] + chunks[index][turn]], done[index], tables[index])
            for index in members
        ]
        logits = pair.paged.forward(ForwardBatch(rows))
        for index, row in zip(members, logits, strict=True):
            done[index] += chunks[index][turn]
            assert pair.agree(texts[index][: done[index]], row)
