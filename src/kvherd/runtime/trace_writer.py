"""A thread that writes a profile's traces, so that no step waits for a disk."""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from kvherd.runtime.trace_file import TraceFile

BACKLOG_LIMIT_BYTES = 64 * 2**20


class TraceWriter:
    """Writes what it is handed, in order, and ends after `end`; `done` is called in its thread then.

    With the first `OSError`, or once more waits to be written than may, it writes nothing more; `failure` says why.
    """

    def __init__(self, done: Callable[[], None], *, backlog_limit_bytes: int = BACKLOG_LIMIT_BYTES) -> None:
        self._done = done
        self._limit_bytes = backlog_limit_bytes
        self._backlog = 0
        self._backlog_lock = threading.Lock()
        self._jobs: SimpleQueue[tuple[TraceFile, Sequence[bytes], int] | Callable[[], None]] = SimpleQueue()
        self._over = threading.Event()
        self._error: Exception | None = None
        self.failure: OSError | None = None
        # A daemon: a disk that hangs must not keep a stopping process alive.
        self._thread = threading.Thread(target=self._run, name="trace-writer", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """All of it is written. Raises what nobody foresaw."""
        if not self._over.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True

    def append(self, file: TraceFile, events: Sequence[bytes]) -> None:
        """Never waits."""
        size_bytes = sum(map(len, events))
        with self._backlog_lock:
            self._backlog += size_bytes
            too_slow = self._backlog > self._limit_bytes
        if too_slow and self.failure is None:
            self.failure = OSError(None, f"it is too slow: {self._limit_bytes} bytes wait to be written")
        self._jobs.put((file, events, size_bytes))

    def end(self, last: Callable[[], None]) -> None:
        """Run `last`, which may raise `OSError`, after all that was handed over, and end."""
        self._jobs.put(last)

    def join(self, *, within_s: float) -> None:
        self._thread.join(within_s)

    def _run(self) -> None:
        try:
            while not callable(job := self._jobs.get()):
                self._write(*job)
            job()
        except OSError as error:
            self.failure = self.failure or error
        except Exception as error:  # noqa: BLE001 - it crosses to the order loop, which raises it there
            self._error = error
        self._over.set()
        self._done()

    def _write(self, file: TraceFile, events: Sequence[bytes], size_bytes: int) -> None:
        with self._backlog_lock:
            self._backlog -= size_bytes
        if self.failure is not None:
            return
        try:
            file.append(events)
        except OSError as error:
            self.failure = error
