"""What tests with stock programs share."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvherd.testing.herds import Start
from kvherd.testing.processes import KvherdProcess


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name is short, because the path of a Unix socket may have 107 bytes only."""
    with TemporaryDirectory(prefix="kht-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `kvherd` commands, and sees to their end."""
    with ExitStack() as stack:
        yield lambda *words: stack.enter_context(KvherdProcess(*words))
