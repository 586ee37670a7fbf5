"""How far back each rank of an engine can tell its KV events again."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from kvherd.core.ids import Rank
from kvherd.core.kv.frames import Replayed
from kvherd.ports.kv_frames import FrameFeed
from kvherd.services.doctor.findings import Finding, ok, problem, warning

SILENCE_S: Final = 2.0
_WHERE: Final = "--replay here and of the bridge (or replay= of the worker)"
_FLAG: Final = f"name a replay_endpoint in --kv-events-config, and {_WHERE}"
_SHORT: Final = (
    "what was stored before comes back by healing alone: start the bridge with the engine, or raise buffer_steps"
)


async def replays(feeds: Mapping[Rank, FrameFeed], *, elsewhere: str | None = None) -> Finding:
    """Ask every rank for all that it still has, and judge by the worst of them. `elsewhere` is where the engine says
    that it replays.
    """
    if not all(feed.can_replay for feed in feeds.values()):
        if elsewhere:
            return warning(
                "replay", f"none was named, and it says that it has one at {elsewhere}", f"name it: {_WHERE}"
            )
        return warning("replay", "none was named", f"{_FLAG}: every gap starts everybody over without it")
    async with asyncio.TaskGroup() as group:
        asked = {rank: group.create_task(feed.replay(0, silence_s=SILENCE_S)) for rank, feed in feeds.items()}
    return judged({rank: task.result() for rank, task in asked.items()})


def judged(answers: Mapping[Rank, Replayed]) -> Finding:
    """One finding for all ranks; those that differ from the others are named."""
    silent = [rank for rank, answer in answers.items() if not answer.frames and not answer.ended]
    if silent:
        seen = f"{_which(silent, len(answers))}nothing answers there within {SILENCE_S:g} s"
        return problem("replay", seen, f"see that this is the endpoint that the engine was given; {_FLAG}")
    firsts = {rank: answer.frames[0].sequence for rank, answer in answers.items() if answer.frames}
    short = {rank: first for rank, first in firsts.items() if first > 0}
    if short:
        reach = ", ".join(
            f"{_which([rank], len(answers))}it reaches back to batch {first} only" for rank, first in short.items()
        )
        return warning("replay", reach, _SHORT)
    every = "it answers" if len(answers) == 1 else f"all {len(answers)} ranks answer"
    if not firsts:
        return ok("replay", f"{every}, and nothing was published yet")
    return ok("replay", f"{every}, back to the first batch of this life")


def _which(ranks: Sequence[Rank], of: int) -> str:
    if of == 1:
        return ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: "
