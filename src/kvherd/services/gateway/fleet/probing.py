"""How long a worker may be silent when it is asked whether it is well.

A probe is not given up when its first deadline passes: SGLang answers it after the next step of its scheduler, in whole
seconds, and who asks anew instead misses that step, and gives it one more question to answer.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kvherd.core.fleet.health import Health
from kvherd.core.fleet.roster import Member
from kvherd.ports.worker import Worker

log: Final = logging.getLogger(__name__)

QUICK_S: Final = 3.0
"""For those who answer at once, if they live."""
_GRACE_S: Final = 1.0


def probe_deadline_s(wanted_s: float | None, health_s: float, times: int) -> float:
    """How much silence counts as one failure: what was wanted, else so much that `times` of it outlast what the worker
    itself may need to tell its health.
    """
    return max(QUICK_S, (health_s + _GRACE_S) / times) if wanted_s is None else wanted_s


async def probed(worker: Worker, *, deadline_s: float, times: int, silent: Callable[[float], None]) -> None:
    """Return if it is well; raise what is wrong, or `TimeoutError` when it was silent for `times` deadlines.

    `silent` hears how long that has been, each time that another has passed. A deadline begins when the one before was
    seen to pass: if this process stands still for a while, that counts as one.
    """
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(_outcome(worker))
        for nth in range(1, times + 1):
            await asyncio.wait((asking,), timeout=deadline_s)
            if asking.done():
                break
            silent(deadline_s * nth)
        asking.cancel()
    if asking.cancelled():
        raise TimeoutError
    error = asking.result()
    if error is not None:
        raise error


async def _outcome(worker: Worker) -> Exception | None:
    try:
        await worker.probe()
    except Exception as error:  # noqa: BLE001 - raised again above; a cancelled group would tell of it alone
        return error
    return None


def log_change(member: Member, before: Health) -> None:
    """Say what became of a worker, if its health has another name than before."""
    if type(member.health.verdict) is not type(before):
        log.warning("worker %s is %s%s", member.worker, member.state, f": {member.reason}" if member.reason else "")
