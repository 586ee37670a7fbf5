"""What the C library keeps of memory that was freed."""

import ctypes


def give_back_freed_memory() -> None:
    """Let the system have it again, where the C library can do that.

    glibc keeps pages for its next allocation, which after a tokenizer was built from its file are more than the
    tokenizer itself. Takes milliseconds, and holds no thread back that runs Python.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
