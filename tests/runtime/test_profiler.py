"""One rank's profile, with a real tiny model and a real directory."""

import json
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvherd.core.engine.generation import GenerationRequest, Limits, Sampling
from kvherd.core.engine.profile import Activity, ProfileRequest, Stage
from kvherd.core.engine.reports import OrderAnswer
from kvherd.core.ids import OrderId, Rank, RequestId
from kvherd.core.scheduler.scheduler import Scheduler
from kvherd.core.scheduler.steps import SchedulerLimits
from kvherd.runtime.engine_model import load_engine_model
from kvherd.runtime.profiler import MOST_WAITING_ORDERS, Profiler
from kvherd.runtime.step_thread import run_step
from kvherd.runtime.trace_file import TraceFile, merge_traces

START, STOP = OrderId("start"), OrderId("stop")


class TinyRank:
    """A scheduler, a model and a profiler, stepped by hand."""

    def __init__(self, rank: int = 0) -> None:
        self.model = load_engine_model("tiny", pool_blocks=32)
        limits = SchedulerLimits(pool_blocks=32, vocab_size=259, max_context_tokens=512, chunk_tokens=32)
        self.scheduler = Scheduler(Rank(rank), limits)
        self.woken = threading.Event()
        self.profiler = Profiler(Rank(rank), 16, lambda: self.scheduler.load(0.0), self.woken.set)
        self.serial = 0

    def submit(self, tokens: int, *, prompt: int = 20) -> None:
        self.serial += 1
        ids = [5 + (self.serial + place) % 90 for place in range(prompt)]
        what = GenerationRequest(
            RequestId(f"r{self.serial}"), ids, Limits(tokens, ignore_eos=True), Sampling(temperature=0.0)
        )
        self.scheduler.submit(what, 0.0)

    def step(self) -> bool:
        plan = self.scheduler.plan_step()
        if plan is None:
            return False
        self.profiler.step_starts(plan)
        self.scheduler.complete_step(run_step(self.model, plan, self.profiler.watch()), 0.0)
        self.profiler.step_ended()
        return True

    def run(self, steps: int = 999) -> int:
        return sum(1 for _ in range(steps) if self.step())

    def start(self, directory: Path, name: str = "profile-1", **options: Any) -> OrderAnswer:
        return self.answer(self.profiler.start(START, ProfileRequest(name, str(directory), **options)))

    def stop(self, name: str = "") -> OrderAnswer:
        return self.answer(self.profiler.stop(STOP, name))

    def answer(self, at_once: OrderAnswer | None) -> OrderAnswer:
        """That, or the one that comes when the files are closed."""
        if at_once is not None:
            return at_once
        [answer] = self.settle()
        return answer

    def settle(self) -> list[OrderAnswer]:
        """Wait until the thread that writes has ended a profile; what is answered then."""
        assert self.woken.wait(20)
        self.woken.clear()
        return self.profiler.tend()


@pytest.fixture
def rank() -> Iterator[TinyRank]:
    tiny = TinyRank()
    yield tiny
    tiny.profiler.close()
    if tracemalloc.is_tracing():
        tracemalloc.stop()


def events(path: str | Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(Path(path).read_bytes())
    return found


def steps(path: str | Path) -> list[dict[str, Any]]:
    return [event for event in events(path) if event["ph"] == "X" and event["name"].startswith("step ")]


def parts(path: str | Path) -> list[dict[str, Any]]:
    return [event for event in events(path) if event["ph"] == "X" and not event["name"].startswith("step ")]


def test_every_step_has_a_span_with_its_batch(rank: TinyRank, tmp_path: Path) -> None:
    rank.submit(3, prompt=40)
    rank.step()
    begun = rank.start(tmp_path)
    assert begun.done
    assert begun.files == (str(tmp_path / "profile-1-rank0.trace.json"),)
    rank.submit(4)
    rank.run()
    ended = rank.stop()
    assert ended.done
    assert ended.files == begun.files
    told = [
        (each["name"], each["args"]["step"], each["args"]["sequences"], each["args"]["new_tokens"])
        for each in steps(ended.files[0])
    ]
    assert told == [
        ("step prefill", 2, 2, 28),
        ("step decode", 3, 2, 2),
        ("step decode", 4, 2, 2),
        ("step decode", 5, 1, 1),
    ]


def test_every_part_of_the_model_has_a_span_inside_its_step(rank: TinyRank, tmp_path: Path) -> None:
    rank.start(tmp_path)
    rank.submit(2)
    rank.run()
    [path] = rank.stop().files
    names = Counter(each["name"] for each in parts(path))
    assert names == {"embedding": 2, "attention": 4, "mlp": 4, "logits": 2, "sampling": 2}
    for step in steps(path):
        begin, end = step["ts"], step["ts"] + step["dur"]
        inside = [each for each in parts(path) if begin <= each["ts"] and each["ts"] + each["dur"] <= end + 0.001]
        assert len(inside) == 7
        assert sum(each["dur"] for each in inside) <= step["dur"]
    assert {each["args"].get("layer") for each in parts(path) if each["name"] == "mlp"} == {0, 1}


def test_the_counters_tell_of_the_queue_and_every_block(rank: TinyRank, tmp_path: Path) -> None:
    rank.start(tmp_path)
    rank.submit(2)
    rank.run()
    found = events(rank.stop().files[0])
    blocks = [each["args"] for each in found if each["name"] == "cache blocks"]
    assert all(sum(each.values()) == 32 for each in blocks)
    assert blocks[0] == {"used": 2, "cached": 0, "free": 30}
    assert blocks[-1] == {"used": 0, "cached": 1, "free": 31}
    requests = [each["args"] for each in found if each["name"] == "requests"]
    assert requests[0] == {"running": 1, "queued": 0}
    assert requests[-1] == {"running": 0, "queued": 0}


def test_it_ends_by_itself_after_its_steps_and_says_so_to_whoever_stops_it(rank: TinyRank, tmp_path: Path) -> None:
    rank.start(tmp_path, num_steps=2)
    rank.submit(9)
    rank.run(2)
    assert rank.profiler.profile_id == ""
    assert rank.settle() == []
    assert len(steps(tmp_path / "profile-1-rank0.trace.json")) == 2
    refused = rank.stop()
    assert not refused.done
    assert refused.conflict
    assert "no profile is on; the last: profile-1 recorded 2 steps" in refused.message


def test_it_begins_with_the_step_that_was_asked_for(rank: TinyRank, tmp_path: Path) -> None:
    assert "begins with step 4" in rank.start(tmp_path, start_step=4, num_steps=2).message
    rank.submit(9)
    rank.run()
    rank.settle()
    assert [each["args"]["step"] for each in steps(tmp_path / "profile-1-rank0.trace.json")] == [4, 5]


def test_stages_have_files_of_their_own(rank: TinyRank, tmp_path: Path) -> None:
    rank.start(tmp_path, by_stage=True, num_steps=2, prefix="mine")
    for _ in range(2):
        rank.submit(5)
        rank.run()
    rank.settle()
    prefill = steps(tmp_path / "mine-profile-1-rank0-prefill.trace.json")
    decode = steps(tmp_path / "mine-profile-1-rank0-decode.trace.json")
    assert [each["args"]["step"] for each in prefill] == [1, 6]
    assert [each["args"]["step"] for each in decode] == [2, 3]


def test_only_the_stages_that_were_asked_for_have_steps(rank: TinyRank, tmp_path: Path) -> None:
    rank.start(tmp_path, stages=(Stage.DECODE,))
    rank.submit(4)
    rank.run()
    assert {each["name"] for each in steps(rank.stop().files[0])} == {"step decode"}


def test_stacks_and_shapes_are_there_if_they_were_asked_for(rank: TinyRank, tmp_path: Path) -> None:
    rank.start(tmp_path, with_stack=True, record_shapes=True)
    rank.submit(1)
    rank.run()
    [path] = rank.stop().files
    attention = next(each for each in parts(path) if each["name"] == "attention")
    assert attention["args"]["shape"] == [20, 64]
    assert "Transformer._run " in attention["args"]["stack"][0]
    assert any("run_step" in call for call in attention["args"]["stack"])
    assert steps(path)[0]["args"]["rows"] == [[20, 0]]


def test_they_are_not_there_otherwise(rank: TinyRank, tmp_path: Path) -> None:
    rank.start(tmp_path)
    rank.submit(1)
    rank.run()
    [path] = rank.stop().files
    assert not any({"shape", "stack", "rows"} & set(each["args"]) for each in events(path))
    assert not any(each["name"] == "memory" for each in events(path))


def test_memory_is_traced_while_it_is_recorded_and_no_longer(rank: TinyRank, tmp_path: Path) -> None:
    rank.start(tmp_path, activities=(Activity.MEM,))
    assert not tracemalloc.is_tracing()
    rank.submit(3)
    rank.step()
    assert tracemalloc.is_tracing()
    rank.run()
    [path] = rank.stop().files
    assert not tracemalloc.is_tracing()
    memory = [each["args"] for each in events(path) if each["name"] == "memory"]
    assert len(memory) == len(steps(path)) == 3
    assert all(each["peak_bytes"] >= each["current_bytes"] > 0 for each in memory)
    assert memory[0]["peak_bytes"] > 20 * 64 * 4  # the embedding of the prompt alone
    assert parts(path) == []
    [largest] = [each for each in events(path) if each["name"] == "largest allocations"]
    assert "bytes in" in largest["args"]["0"]


def test_a_second_start_is_a_conflict_and_leaves_the_first_alone(rank: TinyRank, tmp_path: Path) -> None:
    rank.start(tmp_path)
    second = rank.start(tmp_path, "profile-2")
    assert not second.done
    assert second.conflict
    assert second.message == "profile profile-1 is on; stop it first"
    assert rank.stop().done
    assert [path.name for path in tmp_path.iterdir()] == ["profile-1-rank0.trace.json"]


def test_a_stop_without_a_start_is_a_conflict(rank: TinyRank) -> None:
    refused = rank.stop()
    assert not refused.done
    assert refused.conflict
    assert refused.message == "no profile is on; the last: there was none"


def test_a_stop_of_another_profile_stops_nothing(rank: TinyRank, tmp_path: Path) -> None:
    rank.start(tmp_path)
    assert rank.stop("profile-9").conflict
    assert rank.profiler.profile_id == "profile-1"


def test_a_directory_that_cannot_be_is_a_refusal_that_names_it(rank: TinyRank, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = rank.start(tmp_path / "file" / "inside")
    assert not refused.done
    assert not refused.conflict
    assert refused.message == f"cannot write into {tmp_path}/file/inside: Not a directory"
    assert rank.start(tmp_path / "made" / "here").done


def test_a_trace_that_is_there_already_is_not_written_over(rank: TinyRank, tmp_path: Path) -> None:
    rank.start(tmp_path)
    rank.stop()
    again = rank.start(tmp_path)
    assert not again.done
    assert "a trace of this name is there already" in again.message


def test_a_full_disk_ends_the_profile_and_not_the_rank(
    rank: TinyRank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *_, **__: written(Path("/dev/full"), "wb", buffering=64))
    refused = rank.start(tmp_path)
    assert not refused.done
    assert "No space left on device" in refused.message
    monkeypatch.setattr(Path, "open", lambda path, *_, **__: written(Path("/dev/full"), "wb", buffering=400))
    assert rank.start(tmp_path, num_steps=3).done
    rank.submit(5)
    assert rank.run() == 5
    ended = rank.stop()
    assert not ended.done
    assert not ended.conflict
    assert "profile-1 was given up: writing into" in ended.message
    assert "No space left on device" in ended.message
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert rank.start(tmp_path).done


def test_the_rank_that_finishes_last_merges_all(tmp_path: Path) -> None:
    ranks = [TinyRank(0), TinyRank(1)]
    for each in ranks:
        assert each.start(tmp_path, merged_ranks=2, by_stage=True).done
        each.submit(2)
        each.run()
    first, last = (each.stop() for each in ranks)
    merged = tmp_path / "profile-1-merged.trace.json"
    assert str(merged) not in first.files
    assert last.files[-1] == str(merged)
    assert [(each["pid"], each["args"]["step"]) for each in steps(merged)] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    assert len(events(merged)) == sum(len(events(path)) for path in tmp_path.glob("*rank*"))


def test_what_is_recorded_is_kept_when_the_rank_ends(rank: TinyRank, tmp_path: Path) -> None:
    rank.start(tmp_path)
    rank.submit(2)
    rank.run()
    rank.profiler.close()
    assert len(steps(tmp_path / "profile-1-rank0.trace.json")) == 2


def test_a_start_that_is_withdrawn_leaves_nothing(rank: TinyRank, tmp_path: Path) -> None:
    rank.start(tmp_path)
    rank.submit(2)
    rank.step()
    rank.profiler.withdraw(OrderId("another"))
    assert rank.profiler.profile_id == "profile-1"
    rank.profiler.withdraw(START)
    assert rank.profiler.profile_id == ""
    rank.settle()
    assert list(tmp_path.iterdir()) == []
    assert rank.stop().conflict


def test_a_trace_that_is_cut_off_lacks_only_its_end(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "a.trace.json")
    trace.append([b'{"a":1}', b'{"b":2}'])
    trace._file.flush()
    assert json.loads((tmp_path / "a.trace.json.part").read_bytes() + b"]") == [{"a": 1}, {"b": 2}]
    trace.finish()
    assert events(tmp_path / "a.trace.json") == [{"a": 1}, {"b": 2}]


def test_a_trace_of_nothing_is_one_all_the_same_and_adds_nothing_to_others(tmp_path: Path) -> None:
    empty, one, two = (TraceFile(tmp_path / f"{name}.trace.json") for name in "abc")
    one.append([b'{"a":1}', b'{"b":2}'])
    two.append([b'{"c":3}'])
    for trace in (empty, one, two):
        trace.finish()
    assert events(empty.path) == []
    assert merge_traces([empty.path], tmp_path / "d.trace.json")
    assert events(tmp_path / "d.trace.json") == []
    assert merge_traces([empty.path, one.path, empty.path, two.path, empty.path], tmp_path / "e.trace.json")
    assert events(tmp_path / "e.trace.json") == [{"a": 1}, {"b": 2}, {"c": 3}]


class HeldFile:
    """Stands for a disk that takes its time: every write waits until it is let go."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file
        self.may_go = threading.Event()

    def __getattr__(self, name: str) -> Any:
        assert self.may_go.wait(20)
        return getattr(self._file, name)


@pytest.fixture
def held(rank: TinyRank, tmp_path: Path) -> Iterator[threading.Event]:
    """A profile is on whose file is on such a disk; set this to let it go."""
    rank.start(tmp_path)
    on = rank.profiler._on
    assert on is not None
    file: Any = HeldFile(on.files[None])
    on.files[None] = file
    yield file.may_go
    file.may_go.set()


def test_no_step_waits_for_the_disk_and_a_stop_is_answered_when_the_file_is_whole(
    rank: TinyRank, tmp_path: Path, held: threading.Event
) -> None:
    rank.submit(5)
    assert rank.run(3) == 3
    assert rank.profiler.stop(STOP) is None
    assert rank.profiler.tend() == []
    assert rank.run() == 2
    held.set()
    [ended] = rank.settle()
    assert (ended.order, ended.done) == (STOP, True)
    assert len(steps(tmp_path / "profile-1-rank0.trace.json")) == 3


def test_orders_that_come_while_a_file_is_closed_are_carried_out_after_it_in_their_order(
    rank: TinyRank, tmp_path: Path, held: threading.Event
) -> None:
    assert rank.profiler.stop(STOP) is None
    assert rank.profiler.start(OrderId("second"), ProfileRequest("profile-2", str(tmp_path))) is None
    assert rank.profiler.start(OrderId("gone"), ProfileRequest("profile-3", str(tmp_path))) is None
    assert rank.profiler.start(OrderId("third"), ProfileRequest("profile-4", str(tmp_path))) is None
    rank.profiler.withdraw(OrderId("gone"))
    held.set()
    told = [(answer.order, answer.done, answer.profile_id) for answer in rank.settle()]
    assert told == [(STOP, True, "profile-1"), ("second", True, "profile-2"), ("third", False, "profile-2")]


def test_so_many_orders_may_wait_for_a_file_and_no_more(rank: TinyRank, held: threading.Event) -> None:
    answers = [rank.profiler.stop(OrderId(f"stop-{index}")) for index in range(100)]
    refused = [answer for answer in answers if answer is not None]
    assert len(refused) == 100 - 1 - MOST_WAITING_ORDERS
    assert {answer.message for answer in refused} == {"the last profile is still being written"}
    held.set()
    assert len(rank.settle()) == 1 + MOST_WAITING_ORDERS


def test_a_disk_that_is_too_slow_ends_the_profile_and_holds_no_more_than_so_many_bytes(
    rank: TinyRank, tmp_path: Path, held: threading.Event
) -> None:
    on = rank.profiler._on
    assert on is not None
    on.writer._limit_bytes = 2000
    rank.submit(9)
    assert rank.run() == 9
    assert rank.profiler.profile_id == ""
    held.set()
    ended = rank.stop()
    assert not ended.done
    assert "profile-1 was given up" in ended.message
    assert "2000 bytes wait to be written" in ended.message
    assert list(tmp_path.iterdir()) == []


def test_what_goes_wrong_in_the_thread_unforeseen_is_raised_in_the_loop(rank: TinyRank, tmp_path: Path) -> None:
    rank.start(tmp_path)
    on = rank.profiler._on
    assert on is not None
    broken: Any = None
    whole, on.files[None] = on.files[None], broken
    rank.submit(1)
    rank.run()
    with pytest.raises(AttributeError):
        rank.stop()
    rank.profiler._ending = None
    whole.discard()
