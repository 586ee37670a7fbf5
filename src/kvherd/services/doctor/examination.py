"""The examination of one server: what is looked at in which order, each step within its time.

Nothing is changed at the server: no cache is flushed, no route called that orders anything. Three completions of one
token are sent, one more for every further rank, and once more if nothing is heard, unless the operator forbids it.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Final, TypeVar

from kvherd.core.errors import KvherdError, OptionInvalid, WorkerError, WorkerLocked
from kvherd.core.fleet.spec import GRPC
from kvherd.ports.completions import Tokenizer
from kvherd.services.doctor import identity
from kvherd.services.doctor.findings import Diagnosis, Finding, ok, problem, unknown
from kvherd.services.doctor.heard import EVENT_S, JOIN_S, TRIES
from kvherd.services.doctor.hearing import CONNECT_S, sockets
from kvherd.services.doctor.instruments import Chart, Complaint, Instruments
from kvherd.services.doctor.replay import SILENCE_S
from kvherd.services.doctor.requests import ANSWER_S, OVERLOADED, Sender
from kvherd.services.doctor.stream import stream
from kvherd.services.doctor.tokens import tokenization, tokenizer
from kvherd.services.doctor.usage import usage

T = TypeVar("T")

DETECT_S: Final = 8.0
STEP_S: Final = 5.0
TOKENIZER_S: Final = 10.0
SERVER_INFO_S: Final = 8.0
"""vLLM looks over its whole machine before its first answer."""
EVENTS_S: Final = CONNECT_S + JOIN_S + TRIES * (ANSWER_S + EVENT_S) + SILENCE_S + 1.0
USAGE_S: Final = 3 * ANSWER_S


async def examine(complaint: Complaint, instruments: Instruments, *, nonce: str) -> Diagnosis:
    """Takes two minutes at the most and raises nothing of the server's. `nonce` is a word never used before."""
    try:
        async with asyncio.timeout(DETECT_S):
            facts = await instruments.worker.detect()
    except TimeoutError:
        return _unreachable(complaint, f"no answer within {DETECT_S:g} s")
    except WorkerLocked as error:
        return _locked(complaint, error)
    except WorkerError as error:
        return _unreachable(complaint, str(error))
    chart = Chart(complaint, facts)
    findings = [
        ok("reachable", f"{complaint.url} answers"),
        *identity.certificate(instruments.expires_at_s(), instruments.wall()),
        identity.kind(chart),
    ]
    known = await _learn(chart, instruments, findings)
    sender = Sender(chart, instruments.worker, known, nonce) if complaint.requests else None
    findings += await _within(EVENTS_S, "KV events", _events(chart, instruments, sender))
    findings += await _within(USAGE_S, "cached tokens", usage(chart, sender))
    return Diagnosis(complaint.url, tuple(findings))


async def _learn(chart: Chart, instruments: Instruments, findings: list[Finding]) -> Tokenizer | None:
    """All that needs no request, at once."""
    health_s = max(STEP_S, chart.facts.health_s + 1.0)
    async with asyncio.TaskGroup() as group:
        told = group.create_task(_quietly(SERVER_INFO_S, identity.server_info(chart, instruments)))
        health = group.create_task(_within(health_s, "health", _one(identity.health(instruments))))
        flush = group.create_task(_within(STEP_S, "flush", _one(identity.flush(chart, instruments))))
        tokens = group.create_task(_tokens(chart, instruments))
    await told
    found, known = tokens.result()
    findings += [*health.result(), identity.block_size(chart), identity.ranks(chart), *flush.result(), *found]
    return known


async def _tokens(chart: Chart, instruments: Instruments) -> tuple[list[Finding], Tokenizer | None]:
    try:
        async with asyncio.timeout(TOKENIZER_S):
            finding, known = await tokenizer(chart, instruments)
    except TimeoutError:
        return [unknown("tokenizer", f"it did not come within {TOKENIZER_S:g} s")], None
    return [finding, *await _within(STEP_S, "tokenization", tokenization(chart, instruments, known))], known


async def _events(chart: Chart, instruments: Instruments, sender: Sender | None) -> list[Finding]:
    complaint = chart.complaint
    own = None if chart.over_http else complaint.url
    target = complaint.events or (None if chart.told.endpoint else chart.facts.events_url) or own
    if target is not None and target.startswith(GRPC):
        return await stream(chart, instruments, target, sender)
    return await sockets(chart, instruments, sender)


def _unreachable(complaint: Complaint, why: str) -> Diagnosis:
    found = problem("reachable", why, "see that the server runs and that the URL is that of its API")
    return Diagnosis(complaint.url, (found,), reachable=False)


def _locked(complaint: Complaint, error: WorkerLocked) -> Diagnosis:
    """It answers, and that is all that can be seen without its key."""
    advice = (
        "set KVHERD_ENGINE_API_KEY to the key that it was started with (--api-key), here, for the bridge and for the "
        "gateway"
    )
    found = (ok("reachable", f"{complaint.url} answers"), problem("API key", f"it {error.wants}", advice))
    return Diagnosis(complaint.url, found)


async def _one(finding: Awaitable[Finding]) -> list[Finding]:
    return [await finding]


async def _quietly(within_s: float, step: Awaitable[None]) -> None:
    """What it would have told is then not known."""
    try:
        async with asyncio.timeout(within_s):
            await step
    except (TimeoutError, WorkerError):
        return


async def _within(within_s: float, check: str, step: Awaitable[Sequence[Finding]]) -> list[Finding]:
    try:
        async with asyncio.timeout(within_s):
            return list(await step)
    except TimeoutError:
        return [unknown(check, f"not done within {within_s:g} s", OVERLOADED)]
    except OptionInvalid:
        raise
    except KvherdError as error:
        return [unknown(check, str(error))]
