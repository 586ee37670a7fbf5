"""Async tests run on virtual time, unless marked `net` or `engine`: these get the real clock.

What tests import is left to the interpreter, since a fake is of none of the classes that compiled rooms ask for; the
processes that they start use what was compiled. `KVHERD_COMPILED=1` has the tests use it as well.
"""

import asyncio
import inspect
import os
import resource
from collections.abc import Iterator

import pytest
from hypothesis import settings

_SAID = os.environ.get("KVHERD_COMPILED")
os.environ.setdefault("KVHERD_COMPILED", "0")

from kvherd.testing.virtual_time import virtual_time  # noqa: E402 - what is said above holds from the first import on

if _SAID is None:
    del os.environ["KVHERD_COMPILED"]

settings.register_profile("kvherd", deadline=None)  # a machine with other work is slow, and right all the same
settings.load_profile("kvherd")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    main = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    real = any(pyfuncitem.iter_markers("net")) or any(pyfuncitem.iter_markers("engine"))
    if real:
        asyncio.run(main)
    else:
        virtual_time(main)
    return True


@pytest.fixture
def descriptors() -> Iterator[int]:
    """As many as the system allows, within the test; the number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    yield most
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
