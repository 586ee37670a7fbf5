"""Clearing a worker's cache over HTTP, each engine in its own way."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from kvherd.adapters.http_exchange import HttpAnswer, HttpAsker
from kvherd.core.errors import WorkerRefused, WorkerUnsupported
from kvherd.core.ids import Rank, WorkerId
from kvherd.ports.worker import FlushAnswer, InDoubt, Opened, RankOutcome

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.5
_SGLANG_TIMED_OUT = "Timed out"


async def flush_by_url(
    worker: WorkerId, asker: HttpAsker, *, timeout_s: float, hold: bool = False, opened: Opened | None
) -> FlushAnswer:
    """kvherd and SGLang wait by themselves; 400 is their refusal. Where kvherd tells of each rank, that is an answer
    whatever its status: of two ranks one may have done it and the other kept silent.
    """
    answer = await asker.ask("POST", f"/flush_cache?timeout={timeout_s:g}{'&hold=1' if hold else ''}", sent=opened)
    if answer.status == 404:
        raise WorkerUnsupported(worker, "flush (it has no /flush_cache)")
    document = answer.document()
    ranks = ranks_told(document)
    if not answer.ok and answer.status != 400 and not ranks:
        raise WorkerRefused(worker, f"HTTP {answer.status}: {answer.reason()}")
    done = answer.ok and document.get("success", True) is True
    message = document.get("message")
    text = message if isinstance(message, str) else answer.reason()
    late = not done and (document.get("timed_out") is True or answer.status == 504 or _SGLANG_TIMED_OUT in text)
    return FlushAnswer(done=done, message=text, ranks=ranks, timed_out=late)


async def flush_vllm(
    worker: WorkerId, asker: HttpAsker, *, timeout_s: float, opened: Opened | None, in_doubt: InDoubt | None
) -> FlushAnswer:
    """vLLM answers at once whether it could; so it is asked until it could or the time is over."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    pause_s = _FIRST_PAUSE_S
    while True:
        answer = await asker.ask("POST", "/reset_prefix_cache", sent=both(opened, in_doubt))
        opened = None
        if in_doubt is not None:
            in_doubt(False)
        if answer.status == 404:
            raise WorkerUnsupported(worker, "flush (vLLM must be started with VLLM_SERVER_DEV_MODE=1)")
        if not answer.ok:
            raise WorkerRefused(worker, f"HTTP {answer.status}: {answer.reason()}")
        if _vllm_did(answer):
            return FlushAnswer(done=True, message="prefix cache reset")
        left_s = end_s - loop.time()
        if left_s <= 0:
            late = timeout_s > 0
            why = f"still busy after {timeout_s:g} s" if late else "busy; give it time to wait until it is idle"
            return FlushAnswer(done=False, message=why, timed_out=late)
        await asyncio.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


def both(opened: Opened | None, in_doubt: InDoubt | None) -> Callable[[], None]:
    """What is called once an order was sent whose caller may not learn what becomes of it."""

    def sent() -> None:
        if opened is not None:
            opened()
        if in_doubt is not None:
            in_doubt(True)

    return sent


def _vllm_did(answer: HttpAnswer) -> bool:
    """Older versions say nothing but 200."""
    return answer.document().get("success", True) is True


def ranks_told(document: Mapping[str, Any]) -> tuple[RankOutcome, ...]:
    """Of each rank, where the engine tells them apart."""
    told = document.get("ranks")
    if not isinstance(told, list):
        return ()
    return tuple(
        RankOutcome(Rank(int(rank["rank"])), done=rank.get("done") is True, message=str(rank.get("message", "")))
        for rank in told
        if isinstance(rank, dict) and isinstance(rank.get("rank"), int)
    )
