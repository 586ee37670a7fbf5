"""A thread beside the loop that takes orders: one piece of work at a time, its result taken when it is there."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


class WorkThread(Generic[Job, Result]):
    """Runs `work` on one job at a time. `done` is called in the thread when a result can be taken."""

    def __init__(self, name: str, work: Callable[[Job], Result], done: Callable[[], None]) -> None:
        self._work = work
        self._done = done
        self._jobs: SimpleQueue[tuple[Job] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[Result] | Exception] = SimpleQueue()
        # A daemon: work that hangs must not keep a stopping process alive.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def finished(self) -> bool:
        """A result waits to be taken."""
        return not self._results.empty()

    def start(self, job: Job) -> None:
        self._jobs.put((job,))

    def result(self) -> Result:
        """What the finished work gave. Raises whatever it raised."""
        result = self._results.get_nowait()
        if isinstance(result, Exception):
            raise result
        return result[0]

    def stop(self, *, within_s: float) -> None:
        """Let work under way end, if it does so in time."""
        self._jobs.put(None)
        self._thread.join(within_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            result: tuple[Result] | Exception
            try:
                result = (self._work(job[0]),)
            except Exception as error:  # noqa: BLE001 - it crosses to the order loop, which raises it there
                result = error
            self._results.put(result)
            self._done()
