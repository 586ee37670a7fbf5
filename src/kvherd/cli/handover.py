"""From reading a command line to serving: the process starts over in place, without what read the words.

The libraries for that would stay resident for as long as a gateway runs, a tenth of all that it has. The process keeps
its id, its files, its environment and its words; what they mean is in a file without a name, in memory.
"""

import os
import sys
from importlib import import_module
from typing import Final

_VARIABLE: Final = "KVHERD_HANDED_OVER"
_SERVING: Final = "kvherd.cli.gateway_process"


def become_gateway(options: bytes) -> None:
    """Serve as the gateway of these encoded options; mostly it never returns."""
    if not hasattr(os, "memfd_create"):  # not a Linux: a larger process serves as well
        serve(options)
        return
    while (spare := os.open(os.devnull, os.O_RDWR)) <= 2:  # a standard one that is closed: it would be of another file
        os.set_inheritable(spare, True)
    os.close(spare)
    descriptor = os.memfd_create("kvherd-options")
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(options)
    os.set_inheritable(descriptor, True)
    os.environ[_VARIABLE] = f"{os.getpid()}:{descriptor}"
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def handed_over() -> bytes | None:
    """The options that this process was given by its former life, if it had one. To be asked once."""
    process, _, descriptor = os.environ.pop(_VARIABLE, "").partition(":")
    if process != str(os.getpid()):  # another's environment says nothing of us
        return None
    with os.fdopen(int(descriptor), "rb") as file:
        file.seek(0)
        return file.read()


def serve(options: bytes) -> None:
    import_module(_SERVING).serve(options)
