"""The number of threads that numpy's OpenBLAS multiplies with, changed while it runs.

numpy has no call for it. The library is the one that this process has loaded already, found by its name among the
mapped files; where it is another one, or the system cannot tell, nothing is found and nothing changes.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_NAMES = (  # numpy's own wheels, then distributions
    ("scipy_openblas_get_num_threads64_", "scipy_openblas_set_num_threads64_"),
    ("scipy_openblas_get_num_threads", "scipy_openblas_set_num_threads"),
    ("openblas_get_num_threads64_", "openblas_set_num_threads64_"),
    ("openblas_get_num_threads", "openblas_set_num_threads"),
)


class BlasThreads:
    """`count` is how many there were at the start; 1 if the library is not known."""

    def __init__(self) -> None:
        found = _library()
        self._get, self._set = found or (lambda: 1, lambda _: None)
        self.count = max(1, self._get())

    @contextmanager
    def single(self) -> Iterator[None]:
        """Products run on the thread that calls for them. Not for two threads at once, and no product outlasts it."""
        before = self._get()
        self._set(1)
        try:
            yield
        finally:
            self._set(before)


def _library() -> tuple[Callable[[], int], Callable[[int], object]] | None:
    for path in _mapped():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for get, put in _NAMES:
            if hasattr(library, get) and hasattr(library, put):
                return getattr(library, get), getattr(library, put)
    return None


def _mapped() -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "openblas" in line}
    return sorted(path for path in paths if ".so" in path)
