"""Runs the generations behind the choices of one call, and hands their text on as it comes."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from kvherd.core.engine.generation import GenerationRequest, TokenDelta
from kvherd.core.text.choice import Choice, TextDelta
from kvherd.ports.completions import Generate

Piece = tuple[int, TextDelta]
"""The index of a choice, and its news."""

_QUEUED_PIECES = 64


@dataclass(frozen=True, slots=True)
class Run:
    """One generation and the choice that is made of it."""

    request: GenerationRequest
    choice: Choice


def pieces(runs: Sequence[Run], generate: Generate) -> AsyncGenerator[Piece, None]:
    """Yield the news of all choices, each in order, until every one has finished.

    A choice that a stop string ended aborts its generation. Closing the iterator aborts all. The first error of any
    generation aborts the others and is raised.
    """
    return _one(runs[0], generate) if len(runs) == 1 else _several(runs, generate)


async def _one(run: Run, generate: Generate) -> AsyncGenerator[Piece, None]:
    async with aclosing(_texts(run, generate)) as texts:
        async for text in texts:
            yield 0, text


async def _several(runs: Sequence[Run], generate: Generate) -> AsyncGenerator[Piece, None]:
    queue: asyncio.Queue[Piece | Exception] = asyncio.Queue(_QUEUED_PIECES)
    failure: Exception | None = None
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_pump(index, run, generate, queue)) for index, run in enumerate(runs)]
        unfinished = len(tasks)
        try:
            while unfinished and failure is None:
                piece = await queue.get()
                if isinstance(piece, Exception):
                    failure = piece
                else:
                    unfinished -= piece[1].finish is not None
                    yield piece
        except GeneratorExit:
            pass  # closed: the group would wrap this into a group of errors, and the close would raise that
        finally:
            for task in tasks:
                task.cancel()
    if failure is not None:
        raise failure


async def _pump(index: int, run: Run, generate: Generate, queue: asyncio.Queue[Piece | Exception]) -> None:
    try:
        async with aclosing(_texts(run, generate)) as texts:
            async for text in texts:
                await queue.put((index, text))
    except Exception as error:  # noqa: BLE001 - if it left this task, the group would cancel whatever its consumer does
        await queue.put(error)


async def _texts(run: Run, generate: Generate) -> AsyncGenerator[TextDelta, None]:
    """The generation is closed before this ends, so an early end aborts it at once."""
    async with aclosing(cast(AsyncGenerator[TokenDelta, None], generate(run.request))) as deltas:
        async for delta in deltas:
            text = run.choice.feed(delta)
            if text.finish is not None:
                break
            yield text
        else:
            raise RuntimeError("a generation ended without a finish, which its port rules out")
    yield text
