"""What holds for any schedule of requests, steps, copies between tiers, aborts, flushes and time."""

import os
from operator import add
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvherd.core.engine.generation import FinishReason, GenerationRequest
from kvherd.testing.scheduler_stage import EOS, Stage, ToyStore, cold_answer, limits, request

EXAMPLES = int(os.environ.get("KVHERD_EXAMPLES", "50"))
FLUSH_EVERY = 3
"""So many requests come between two flushes, or nothing would be cached for long."""
PREFIXES = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9, 9], [2] * 12, [3, 3, 3])


TAILS = ([0, 1, 2, 3] * 3, [3, 3, 2, 2, 1, 1, 0, 0, 5], [4] * 6)
PROMPTS = st.builds(
    add, st.sampled_from(PREFIXES), st.one_of(st.sampled_from(TAILS), st.lists(st.integers(0, 3), max_size=14))
)


def another_engine_fills(store: ToyStore, prompts: list[list[int]], *, store_name: str) -> None:
    """Leave there what another engine computed of these."""
    other = Stage(limits(pool_blocks=40, host_blocks=40, store=store_name), store)
    for index, prompt in enumerate(prompts):
        other.submit(request(f"other {index}", prompt, 4))
        other.run_dry()
    other.put_all()


class AnySchedule(RuleBasedStateMachine):
    stage: Stage
    store: ToyStore

    @initialize(
        pool_blocks=st.integers(4, 16),
        max_running=st.integers(1, 6),
        chunk_tokens=st.integers(4, 24),
        host_blocks=st.sampled_from([0, 1, 3, 8, 40]),
        store=st.sampled_from([None, "weights"]),
        shared=st.lists(PROMPTS, max_size=3),
        warm=st.lists(PROMPTS, max_size=4),
    )
    def set_the_stage(
        self, *, store: str | None, shared: list[list[int]], warm: list[list[int]], host_blocks: int, **sizes: int
    ) -> None:
        self.store = ToyStore()
        if store is not None:
            another_engine_fills(self.store, shared, store_name=store)
        self.stage = Stage(limits(host_blocks=host_blocks, store=store, **sizes), self.store)
        self.requests: dict[str, GenerationRequest] = {}
        self.due_s: dict[str, float] = {}
        self.aborted: set[str] = set()
        self.withdrawn: set[str] = set()
        self.serial = 0
        self.flushed_at = 0
        for prompt in warm:
            self.submit(prompt, 3, {"ignore_eos": True})
        self.catch_up()

    @rule(
        prompt=PROMPTS,
        tokens=st.integers(0, 12),
        options=st.fixed_dictionaries(
            {
                "min_tokens": st.integers(0, 3),
                "ignore_eos": st.booleans(),
                "salt": st.sampled_from([None, None, None, "tenant"]),
            }
        ),
    )
    def submit(self, prompt: list[int], tokens: int, options: dict[str, Any]) -> None:
        self.serial += 1
        what = request(f"r{self.serial}", prompt, tokens, stop=(11,), **options)
        self.requests[what.request] = what
        self.stage.submit(what)

    @rule(moves=st.lists(st.sampled_from(["step", "step", "write", "ask", "ask", "put"]), min_size=1, max_size=16))
    def work(self, moves: list[str]) -> None:
        """Begin or end one after the other: so anything may happen in the middle of any."""
        for move in moves:
            self.stage.move(move)

    @rule()
    def catch_up(self) -> None:
        """Let everything end that runs, and be copied as far down as it goes."""
        self.stage.run_dry()
        self.stage.put_all()

    @precondition(lambda self: self.store.blocks)
    @rule(data=st.data(), how=st.sampled_from(["lost", "rotten", "rotten", "mended"]))
    def disturb_the_store(self, data: st.DataObject, how: str) -> None:
        """Most of all in the middle of a fetch: what it found may be gone, or wrong, by now."""
        asked: list[str] = [name for name in self.stage.asked if name in self.store.blocks]
        name = data.draw(st.sampled_from(asked or list(self.store.blocks)))
        if how == "lost":
            del self.store.blocks[name]
        elif how == "rotten":
            self.store.rotten.add(name)
        else:
            self.store.rotten.discard(name)

    @rule(full=st.sampled_from([False, False, False, True]))
    def fill_the_store(self, full: bool) -> None:
        self.store.full = full

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        if self.stage.ended(name) is None:
            self.aborted.add(name)
        self.stage.abort(name)

    @precondition(lambda self: self.stage.copying or self.serial >= self.flushed_at + FLUSH_EVERY)
    @rule(timeout_s=st.sampled_from([0.0, 0.5, 1.0, 3.0]), hold=st.booleans())
    def flush(self, timeout_s: float, hold: bool) -> None:
        self.serial += 1
        self.flushed_at = self.serial
        self.due_s[f"f{self.serial}"] = self.stage.now_s + timeout_s
        self.stage.flush(f"f{self.serial}", timeout_s, hold=hold)

    @precondition(lambda self: self.waiting_flushes())
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.waiting_flushes()))
        del self.due_s[name]
        self.stage.withdraw(name)
        self.withdrawn.add(name)

    def waiting_flushes(self) -> list[str]:
        return sorted(name for name in self.due_s if not self.stage.answers[name])

    @rule(seconds=st.sampled_from([0.25, 0.5, 2.0]))
    def pass_time(self, seconds: float) -> None:
        self.stage.pass_time(seconds)

    @invariant()
    def every_flush_is_answered_once_and_in_time(self) -> None:
        for name, due_s in getattr(self, "due_s", {}).items():
            answers = self.stage.answers[name]
            assert len(answers) == 1 if self.stage.now_s >= due_s else len(answers) <= 1
            for at_s, answer in answers:
                assert at_s <= due_s
                assert answer.done or at_s == due_s
                assert answer.done or answer.blockers

    def teardown(self) -> None:
        if not hasattr(self, "stage"):
            return
        self.stage.pass_time(10.0)
        self.every_flush_is_answered_once_and_in_time()
        assert not any(self.stage.answers[name] for name in self.withdrawn)
        self.stage.run_dry()
        self.stage.put_all()
        for name, what in self.requests.items():
            self._check_answer(name, what)
        load = self.stage.scheduler.load(self.stage.now_s)
        assert (load.running, load.waiting, load.active_tokens) == (0, 0, 0)
        self.stage.flush("last")
        assert self.stage.answer("last").done
        assert self.stage.scheduler.load(self.stage.now_s).used_tokens == 0

    def _check_answer(self, name: str, what: GenerationRequest) -> None:
        said = self.stage.tokens(name)
        cold = cold_answer(what, self.stage.limits)
        if name in self.aborted:
            assert said == cold[: len(said)]
            assert self.stage.ended(name) is FinishReason.ABORT
        else:
            assert said == cold
            assert self.stage.ended(name) is not None
            assert what.limits.ignore_eos or EOS not in said


AnySchedule.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
TestAnySchedule = AnySchedule.TestCase
