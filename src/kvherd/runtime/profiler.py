"""One rank's profile: which steps it records, what it writes of each, and how it ends.

Called by the order loop only, which never waits for a disk: a thread of each profile writes, closes and merges its
files. Until that has ended, orders wait for it, and `tend` has their answers. Whatever goes wrong there ends the
profile, never the engine; whoever stops it then hears why. A step under way when it is stopped is not recorded.
"""

import logging
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvherd.core.engine.profile import Activity, ProfileRequest, Stage
from kvherd.core.engine.reports import OrderAnswer, RankLoad
from kvherd.core.ids import OrderId, Rank
from kvherd.core.scheduler.phases import Phase, StepSelection, phase_of
from kvherd.core.scheduler.steps import StepPlan
from kvherd.runtime.trace_file import TraceFile, make_directory, merge_traces
from kvherd.runtime.trace_writer import TraceWriter
from kvherd.runtime.watch import UNWATCHED, Part, StepWatch, Watch
from kvherd.wire import chrome_trace

log = logging.getLogger(__name__)

STEPS_TRACK = 101
FIRST_MODEL_TRACK = 102
LARGEST_ALLOCATIONS = 10
MOST_WAITING_ORDERS = 64
CLOSES_WITHIN_S = 5.0


@dataclass(slots=True)
class _Recording:
    """A profile that is on."""

    order: OrderId
    request: ProfileRequest
    selection: StepSelection
    files: dict[Stage | None, TraceFile]
    writer: TraceWriter
    named_tracks: set[tuple[Stage | None, int]] = field(default_factory=set)
    traces_memory: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(str(file.path) for file in self.files.values())

    @property
    def sources(self) -> list[Path]:
        """The files of all ranks that are to become one."""
        names = (
            self.request.file_name(rank, stage) for rank in range(self.request.merged_ranks) for stage in self.files
        )
        return [Path(self.request.output_dir) / name for name in names]

    @property
    def merged(self) -> Path:
        return Path(self.request.output_dir) / self.request.merged_name


@dataclass(slots=True)
class _Ending:
    """A profile whose files are being closed, or taken away if it is not to be kept. `stop` is who ordered that."""

    recording: _Recording
    keep: bool
    stop: OrderId | None


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that is being recorded."""

    number: int
    phase: Phase
    plan: StepPlan
    began_ns: int
    watch: StepWatch


class Profiler:
    """At most one profile is on. `load` gives the rank's load of the moment; `wake` is called, in whatever thread, when
    `tend` has something to do.
    """

    def __init__(self, rank: Rank, block_size: int, load: Callable[[], RankLoad], wake: Callable[[], None]) -> None:
        self._rank = rank
        self._block_size = block_size
        self._load = load
        self._wake = wake
        self._on: _Recording | None = None
        self._ending: _Ending | None = None
        self._waiting: dict[OrderId, Callable[[], OrderAnswer | None]] = {}
        self._step: _Step | None = None
        self._last = "there was none"
        self._failed: str | None = None

    @property
    def profile_id(self) -> str:
        """Of the profile that is on; empty if none is."""
        return self._on.request.profile_id if self._on is not None else ""

    def watch(self) -> Watch:
        """For the thread that steps, at the beginning of each step."""
        step = self._step
        return step.watch if step is not None else UNWATCHED

    # --- orders ------------------------------------------------------------

    def start(self, order: OrderId, request: ProfileRequest) -> OrderAnswer | None:
        """The answer; None if it waits for the end of the last profile."""
        if self._ending is not None:
            return self._wait(order, lambda: self.start(order, request))
        if self._on is not None:
            return self._answer(order, f"profile {self.profile_id} is on; stop it first", conflict=True)
        try:
            files = self._open(request)
        except OSError as error:
            return self._answer(order, f"cannot write into {request.output_dir}: {_reason(error)}")
        selection = StepSelection(request, next_step=self._load().steps_total + 1)
        self._on = _Recording(order, request, selection, files, TraceWriter(self._wake))
        self._failed = None
        when = f"recording begins with step {selection.first_step}"
        return self._answer(order, f"profile {request.profile_id} is on; {when}", done=True, files=self._on.paths)

    def stop(self, order: OrderId, profile_id: str = "") -> OrderAnswer | None:
        """End the profile, if it is this one; "" is whichever is on. None: the answer comes with its files."""
        if self._ending is not None:
            return self._wait(order, lambda: self.stop(order, profile_id))
        failed, self._failed = self._failed, None
        if failed is not None:
            return self._answer(order, failed)
        if self._on is None or profile_id not in ("", self.profile_id):
            return self._answer(order, f"no profile is on; the last: {self._last}", conflict=True)
        self._end(self._on, keep=True, stop=order)
        return None

    def withdraw(self, order: OrderId) -> None:
        """Whoever gave this order left. If it was to start, nobody knows of the profile, so there is to be none."""
        self._waiting.pop(order, None)
        if self._on is not None and self._on.order == order:
            self._end(self._on, keep=False)

    def tend(self) -> list[OrderAnswer]:
        """The answers that have waited, if the files are closed by now. Raises what nobody foresaw there."""
        answers: list[OrderAnswer] = []
        while self._ending is not None and self._ending.recording.writer.ended:
            ended, self._ending = self._ending, None
            self._note_end(ended)
            if ended.stop is not None:
                answers.append(self._stopped(ended.stop, ended.recording))
            waiting, self._waiting = self._waiting, {}
            answers += [answer for again in waiting.values() if (answer := again()) is not None]
        return answers

    def close(self) -> None:
        """The rank ends: what is recorded is kept, if that takes no longer than a moment."""
        if self._on is not None:
            self._end(self._on, keep=True)
        if self._ending is not None:
            self._ending.recording.writer.join(within_s=CLOSES_WITHIN_S)
            self.tend()

    def _wait(self, order: OrderId, again: Callable[[], OrderAnswer | None]) -> OrderAnswer | None:
        if len(self._waiting) >= MOST_WAITING_ORDERS:
            return self._answer(order, "the last profile is still being written", conflict=True)
        self._waiting[order] = again
        return None

    # --- steps ------------------------------------------------------------

    def step_starts(self, plan: StepPlan) -> None:
        """This plan is about to be computed."""
        if self._on is None:
            return
        load = self._load()
        number, phase = load.steps_total + 1, phase_of(plan)
        if not self._on.selection.wants(number, phase):
            return
        if Activity.MEM in self._on.request.activities:
            self._trace_memory(self._on)
        began_ns = time.monotonic_ns()
        self._step = _Step(number, phase, plan, began_ns, StepWatch(with_stack=self._on.request.with_stack))
        self._write(self._on, phase, self._counters(load, began_ns))

    def step_ended(self) -> None:
        """The plan of `step_starts` is computed and the scheduler has heard of it."""
        step, self._step = self._step, None
        if step is None or self._on is None:
            return
        ended_ns = time.monotonic_ns()
        self._on.selection.record(step.phase)
        self._write(self._on, step.phase, self._step_events(self._on, step, ended_ns))
        if self._on is not None and self._on.selection.complete:
            self._end(self._on, keep=True)

    # --- what is written ------------------------------------------------------------

    def _step_events(self, on: _Recording, step: _Step, ended_ns: int) -> Iterator[bytes]:
        rows = step.plan.rows
        args: chrome_trace.Arguments = {
            "step": step.number,
            "phase": step.phase,
            "sequences": len(rows),
            "new_tokens": sum(len(row.token_ids) for row in rows),
            "context_tokens": sum(row.position + len(row.token_ids) for row in rows),
            "loaded_blocks": len(step.plan.loads),
        }
        if on.request.record_shapes:
            args["rows"] = [[len(row.token_ids), row.position] for row in rows]
        yield chrome_trace.span(
            self._rank,
            STEPS_TRACK,
            f"step {step.phase}",
            category="step",
            begin_ns=step.began_ns,
            end_ns=ended_ns,
            args=args,
        )
        if Activity.CPU in on.request.activities:
            yield from self._part_events(on, step.phase, step.watch.parts)
        if on.traces_memory:
            current, peak = tracemalloc.get_traced_memory()
            values = {"current_bytes": current, "peak_bytes": peak}
            yield chrome_trace.counter(self._rank, "memory", at_ns=ended_ns, values=values)
        yield from self._counters(self._load(), ended_ns)

    def _part_events(self, on: _Recording, phase: Phase, parts: list[Part]) -> Iterator[bytes]:
        threads = list(dict.fromkeys(part.thread for part in (*parts[-1:], *parts)))  # first the one that steps
        for part in parts:
            index = threads.index(part.thread)
            track = (on.selection.file_of(phase), FIRST_MODEL_TRACK + index)
            if track not in on.named_tracks:
                on.named_tracks.add(track)
                yield chrome_trace.track_name(self._rank, track[1], f"model, thread {index + 1}")
            args: chrome_trace.Arguments = {}
            if part.layer is not None:
                args["layer"] = part.layer
            if on.request.record_shapes:
                args["shape"] = part.shape
            if part.stack:
                args["stack"] = part.stack
            yield chrome_trace.span(
                self._rank,
                track[1],
                part.name,
                category="model",
                begin_ns=part.begin_ns,
                end_ns=part.end_ns,
                args=args,
            )

    def _counters(self, load: RankLoad, at_ns: int) -> list[bytes]:
        blocks = {"used": load.used_blocks, "cached": load.cached_blocks, "free": load.free_blocks}
        requests = {"running": load.running, "queued": load.waiting}
        events = [
            chrome_trace.counter(self._rank, "requests", at_ns=at_ns, values=requests),
            chrome_trace.counter(self._rank, "cache blocks", at_ns=at_ns, values=blocks),
        ]
        if load.host_capacity_tokens:
            held = load.host_used_tokens // self._block_size
            events.append(chrome_trace.counter(self._rank, "host blocks", at_ns=at_ns, values={"used": held}))
        return events

    def _trace_memory(self, on: _Recording) -> None:
        if not on.traces_memory:
            tracemalloc.start()
            on.traces_memory = True
        tracemalloc.reset_peak()

    def _memory_note(self) -> bytes:
        """Where the most of what is still allocated came from, since the first recorded step."""
        largest = tracemalloc.take_snapshot().statistics("lineno")[:LARGEST_ALLOCATIONS]
        args = {
            f"{index}": f"{each.size} bytes in {each.count} pieces: {each.traceback[0]}"
            for index, each in enumerate(largest)
        }
        return chrome_trace.note(self._rank, STEPS_TRACK, "largest allocations", at_ns=time.monotonic_ns(), args=args)

    # --- files ------------------------------------------------------------

    def _open(self, request: ProfileRequest) -> dict[Stage | None, TraceFile]:
        directory = Path(request.output_dir)
        make_directory(directory)
        files: dict[Stage | None, TraceFile] = {}
        try:
            for stage in request.files:
                files[stage] = TraceFile(directory / request.file_name(self._rank, stage))
                files[stage].append(
                    [
                        chrome_trace.process_name(self._rank, f"kvherd engine, rank {self._rank}"),
                        chrome_trace.process_place(self._rank),
                        chrome_trace.track_name(self._rank, STEPS_TRACK, "steps"),
                    ]
                )
        except OSError:
            for file in files.values():
                file.discard()
            raise
        return files

    def _write(self, on: _Recording, phase: Phase, events: Iterable[bytes]) -> None:
        on.writer.append(on.files[on.selection.file_of(phase)], tuple(events))
        if on.writer.failure is not None:
            self._end(on, keep=False)

    def _end(self, on: _Recording, *, keep: bool, stop: OrderId | None = None) -> None:
        self._on = self._step = None
        self._ending = _Ending(on, keep, stop)
        on.writer.end(lambda: self._close(on, keep=keep))

    def _close(self, on: _Recording, *, keep: bool) -> None:
        """In the thread that writes: close its files, merge them if that is wanted; or leave none. Raises `OSError`."""
        try:
            if keep and on.writer.failure is None:
                self._finish(on)
                return
        except OSError:
            _discard(on)
            raise
        finally:
            if on.traces_memory:
                tracemalloc.stop()
        _discard(on)

    def _finish(self, on: _Recording) -> None:
        for file in on.files.values():
            if on.traces_memory:
                file.append([self._memory_note()])
            file.finish()
        if on.request.merged_ranks:
            merge_traces(on.sources, on.merged)

    def _note_end(self, ended: _Ending) -> None:
        """Remember what became of it, for whoever stops it later."""
        on, failure = ended.recording, ended.recording.writer.failure
        if failure is not None:
            where = f"writing into {on.request.output_dir} failed: {_reason(failure)}"
            self._last = self._failed = f"profile {on.request.profile_id} was given up: {where}"
            log.warning("%s", self._failed)
        elif ended.keep:
            self._last = f"{on.request.profile_id} recorded {on.selection.recorded} steps in {', '.join(on.paths)}"
            log.info("profile %s", self._last)

    def _stopped(self, stop: OrderId, on: _Recording) -> OrderAnswer:
        failed, self._failed = self._failed, None
        name = on.request.profile_id
        if failed is not None:
            return self._answer(stop, failed, profile_id=name)
        files = (*on.paths, str(on.merged)) if on.request.merged_ranks and on.merged.exists() else on.paths
        return self._answer(stop, self._last, done=True, files=files, profile_id=name)

    def _answer(
        self,
        order: OrderId,
        message: str,
        *,
        done: bool = False,
        conflict: bool = False,
        files: tuple[str, ...] = (),
        profile_id: str | None = None,
    ) -> OrderAnswer:
        return OrderAnswer(
            order,
            self._rank,
            done=done,
            message=message,
            conflict=conflict,
            files=files,
            profile_id=self.profile_id if profile_id is None else profile_id,
        )


def _discard(on: _Recording) -> None:
    for file in on.files.values():
        file.discard()


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
