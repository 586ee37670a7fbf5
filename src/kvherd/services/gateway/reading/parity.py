"""Does each worker make the same tokens of a prompt as the gateway does?

Asked when a worker joins or returns, with a probe of every class of prompts, at its own `/tokenize`; and seen at run
time, by the count of prompt tokens that its answers tell. For prompts of a class that differs, what is known of the
worker's cache is of no use: such requests are routed there by what was sent there before.
"""

import asyncio
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Final

from kvherd.core.errors import WorkerError, WorkerUnsupported
from kvherd.core.fleet.roster import Member
from kvherd.core.text.parity import UNASKED, Agreement, Finding, PromptClass, first_difference, probes
from kvherd.ports.completions import Tokenizer
from kvherd.ports.worker import Worker
from kvherd.services.gateway.reading.encodings import EncodingCache
from kvherd.services.gateway.reading.prompts import read_prompt
from kvherd.wire.openai.routing import peek

log = logging.getLogger(__name__)

PROBE_S: Final = 1.0
"""How long one answer of `/tokenize` may take; a worker that exceeds it is asked on later."""
FIRST_PAUSE_S: Final = 5.0
MOST_PAUSE_S: Final = 300.0


async def compare(member: Member, worker: Worker, tokenizer: Tokenizer) -> None:
    """Ask the worker for its tokens of every probe that it has not answered yet. Raises nothing.

    `Member.compare_at_s` is when to call this again: later and later if it is slow or fails, never if it said all it
    can say.
    """
    member.compare_at_s = math.inf
    for prompt_class, body in probes(tokenizer.special_tokens).items():
        if member.tokenization.get(prompt_class, UNASKED).agreement is not Agreement.UNKNOWN:
            continue
        try:
            async with asyncio.timeout(PROBE_S):
                finding = await compared(worker, {"model": member.models[0], **body}, tokenizer)
        except TimeoutError:
            _try_later(member)
            _note(member, prompt_class, Finding(Agreement.UNKNOWN, f"no answer within {PROBE_S:g} s"))
            return
        except WorkerError as error:
            if not isinstance(error, WorkerUnsupported):
                _try_later(member)
            finding = Finding(Agreement.UNKNOWN, str(error))
        _note(member, prompt_class, finding)


def counted(member: Member, classes: Sequence[PromptClass], *, ours: int, theirs: int) -> None:
    """An answer told how many tokens its prompt had. Other tokens may be as many, so that equal counts prove nothing;
    unequal ones do, of the last of the prompt's classes.
    """
    if classes and ours != theirs and member.tokenizes_alike(classes):
        why = f"it counted {theirs} tokens in a prompt that has {ours} here"
        _note(member, classes[-1], Finding(Agreement.DIFFERS, why))


def _try_later(member: Member) -> None:
    if member.compare_at_s == math.inf:  # one pause a round, however many of its probes fail
        pause_s = min(MOST_PAUSE_S, FIRST_PAUSE_S * 2.0**member.compare_tries)
        member.compare_at_s = asyncio.get_running_loop().time() + pause_s
        member.compare_tries += 1


async def compared(worker: Worker, body: Mapping[str, object], tokenizer: Tokenizer) -> Finding:
    """Hold the worker's tokens of one request against our own. Raises a `WorkerError`."""
    data = json.dumps(body).encode()
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    prompt = await read_prompt(path, data, peek(data), tokenizer, EncodingCache())
    if prompt.token_ids is None:
        return Finding(Agreement.UNKNOWN, "the gateway cannot render it, and predicts nothing for it")
    ours, theirs = list(prompt.token_ids), list(await worker.tokenize(data))
    at = first_difference(ours, theirs)
    if at is None:
        return Finding(Agreement.AGREES)
    why = f"of a probe it makes {len(theirs)} tokens and the gateway {len(ours)}; number {at} is the first that differs"
    return Finding(Agreement.DIFFERS, why)


def _note(member: Member, prompt_class: PromptClass, finding: Finding) -> None:
    member.tokenization[prompt_class] = finding
    if finding.agreement is Agreement.DIFFERS:
        log.warning(
            "%s tokenizes prompts of the class %r otherwise than the gateway: %s. Such are routed there by what was "
            "sent before, not by its KV events",
            member.worker,
            prompt_class.value,
            finding.why,
        )
