"""Waiting for what will be, not for time to pass."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], *, within_s: float = 10.0) -> None:
    """Return as soon as it holds; raise TimeoutError if it does not in time."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is looked at is no event
            await asyncio.sleep(0.002)
