"""The model's thread, with a model of three lines."""

import threading
from collections.abc import Sequence

import pytest

from kvherd.core.engine.generation import Sampling
from kvherd.core.ids import BlockName
from kvherd.core.scheduler.steps import (
    Choice,
    Copy,
    FetchPlan,
    LookPlan,
    NamedSlot,
    PutPlan,
    StepPlan,
    StepRow,
    WritePlan,
)
from kvherd.runtime.batch import Choice as ModelChoice
from kvherd.runtime.batch import ForwardBatch, ModelFacts, SamplingState
from kvherd.runtime.step_thread import (
    Fetched,
    Found,
    StepThread,
    Threads,
    WriteThread,
    ask_store,
    put_to_store,
    run_step,
)
from kvherd.runtime.watch import UNWATCHED, Watch
from kvherd.testing.block_store import MemoryBlockStore


class OddModel:
    """Chooses the position of the token to come, and breaks on token 13."""

    facts = ModelFacts(100, 100, (), 0, 0)

    def __init__(self) -> None:
        self.host = bytearray(range(16))

    def step(self, batch: ForwardBatch, states: Sequence[SamplingState], watch: Watch = UNWATCHED) -> list[ModelChoice]:
        if any(13 in rows.token_ids for rows in batch.sequences):
            raise ArithmeticError("13")
        assert len(states) == sum(rows.wants_logits for rows in batch.sequences)
        return [ModelChoice(state.position) for state in states]

    def block_namespace(self) -> str:
        return "odd"

    def host_block(self, slot: int) -> memoryview:
        return memoryview(self.host)[slot * 4 : slot * 4 + 4]

    def save(self, copies: Sequence[Copy]) -> None:
        raise OSError(f"no room for {len(copies)}")

    def load(self, copies: Sequence[Copy]) -> None:
        self.loaded = list(copies)


def _row(tokens: tuple[int, ...], *, position: int, chooses: bool) -> StepRow:
    return StepRow(1, tokens, position, (0,), chooses, Sampling(), [], [])


def _run(*rows: StepRow) -> list[Choice]:
    done = threading.Event()
    steps = StepThread(OddModel(), done.set)
    try:
        steps.start(StepPlan(rows))
        assert done.wait(5)
        assert steps.finished
        return steps.result()
    finally:
        steps.stop(within_s=5)


def test_only_rows_that_choose_get_a_choice() -> None:
    choices = _run(_row((1, 2), position=4, chooses=False), _row((3,), position=7, chooses=True))
    assert choices == [Choice(8)]


def test_what_the_model_raises_is_raised_where_the_result_is_taken() -> None:
    with pytest.raises(ArithmeticError, match="13"):
        _run(_row((13,), position=0, chooses=True))


def test_a_step_that_only_loads_chooses_nothing() -> None:
    model = OddModel()
    assert run_step(model, StepPlan((), loads=(Copy(1, 2),))) == []
    assert model.loaded == [Copy(1, 2)]


def test_blocks_go_to_the_store_and_come_back_into_other_slots() -> None:
    model, store = OddModel(), MemoryBlockStore()
    names = [BlockName("00"), BlockName("01"), BlockName("02")]
    assert put_to_store(model, store, PutPlan((NamedSlot(names[0], 2), NamedSlot(names[1], 3)))) == [True, True]
    assert ask_store(model, store, LookPlan(tuple(names))) == Found(2)
    fetch = FetchPlan(tuple(NamedSlot(name, slot) for slot, name in enumerate(names)))
    assert ask_store(model, store, fetch) == Fetched([True, True, False])
    assert list(model.host) == [8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15]


def test_the_threads_of_a_store_work_beside_each_other() -> None:
    model, store = OddModel(), MemoryBlockStore()
    done = threading.Semaphore(0)
    threads = Threads(model, store, done.release)
    assert threads.asks is not None
    assert threads.puts is not None
    store.open.clear()
    threads.asks.start(LookPlan((BlockName("00"),)))
    threads.steps.start(StepPlan((_row((1,), position=0, chooses=True),)))
    assert done.acquire(timeout=20)
    assert threads.steps.result() == [Choice(1)]
    store.open.set()
    threads.puts.start(PutPlan((NamedSlot(BlockName("00"), 0),)))
    assert done.acquire(timeout=20)
    assert done.acquire(timeout=20)
    assert threads.puts.result() == [True]
    assert isinstance(threads.asks.result(), Found)
    threads.stop(within_s=20)


def test_what_a_write_raises_is_raised_where_its_end_is_taken() -> None:
    done = threading.Event()
    writes = WriteThread(OddModel(), done.set)
    writes.start(WritePlan((Copy(0, 0),)))
    assert done.wait(5)
    with pytest.raises(OSError, match="no room for 1"):
        writes.result()
    writes.stop(within_s=5)
