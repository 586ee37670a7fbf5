"""Work that is cancelled at a certain one of its awaits: at each in turn, nothing may be left behind."""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


async def interrupted(work: Coroutine[Any, Any, object], *awaits: int, late: bool = False) -> bool:
    """Run `work` in a task of its own that is cancelled at these of its awaits, 0 being the first, and wait for its
    end; whether it came to the last of them. What else it raises is raised here, and if it goes on to its end as if
    nothing had happened, `AssertionError` is.

    `late`: when that for which it waits has come, and before it goes on.
    """
    steps = _Steps(work, awaits, late=late)
    task = asyncio.ensure_future(steps.run())
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()
        assert steps.left == set(awaits), "it was cancelled, and went on"
    return not steps.left


class _Steps:
    """An awaitable that waits for what `work` waits for."""

    def __init__(self, work: Coroutine[Any, Any, object], awaits: tuple[int, ...], *, late: bool) -> None:
        self.left = set(awaits)
        self._work = work
        self._late = late

    async def run(self) -> None:
        await self

    def __await__(self) -> Generator[Any, Any, None]:
        number, thrown, work = 0, None, self._work
        while True:
            try:
                future = work.send(None) if thrown is None else work.throw(thrown)
            except StopIteration:
                return
            if number in self.left:
                self.left.remove(number)
                self._cancel(future)
            number, thrown = number + 1, None
            try:
                yield future
            except BaseException as error:  # noqa: BLE001 - for the work, whatever it is
                thrown = error

    def _cancel(self, future: asyncio.Future[Any] | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        if future is None or not self._late:
            task.cancel()
        else:
            future.add_done_callback(lambda _: task.cancel())


def tasks_left() -> list[str]:
    """What is under way beside the caller, in words."""
    return sorted(str(task) for task in asyncio.all_tasks() - {asyncio.current_task()})
