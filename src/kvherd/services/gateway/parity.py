"""Does each worker make the same tokens of a prompt as the gateway does?

Asked when a worker joins or returns, with a probe of every class of prompts, at its own `/tokenize`; and seen at run
time, by the count of prompt tokens that its answers tell. For a class that differs, what is known of the worker's cache
is of no use: such requests are routed there by what was sent there before.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Final

from kvherd.core.errors import WorkerError
from kvherd.core.fleet.roster import Member
from kvherd.core.text.parity import Agreement, Finding, PromptClass, first_difference, probes
from kvherd.ports.completions import Tokenizer
from kvherd.ports.worker import Worker
from kvherd.services.gateway.prompts import EncodingCache, read_prompt
from kvherd.wire.openai.routing import peek

log = logging.getLogger(__name__)

PROBE_S: Final = 1.0
"""How long one answer of `/tokenize` may take; a worker that exceeds it once is not asked on."""


async def compare(member: Member, worker: Worker, tokenizer: Tokenizer) -> None:
    """Ask the worker for its tokens of every probe. Raises nothing; what was found before is void."""
    member.tokenization.clear()
    member.compared = True
    for prompt_class, body in probes(tokenizer.special_tokens).items():
        try:
            async with asyncio.timeout(PROBE_S):
                finding = await compared(worker, {"model": member.models[0], **body}, tokenizer)
        except TimeoutError:
            member.tokenization[prompt_class] = Finding(Agreement.UNKNOWN, f"no answer within {PROBE_S:g} s")
            return
        except WorkerError as error:
            finding = Finding(Agreement.UNKNOWN, str(error))
        _note(member, prompt_class, finding)


def counted(member: Member, prompt_class: PromptClass | None, *, ours: int, theirs: int) -> None:
    """An answer told how many tokens its prompt had. Other tokens may be as many, so that equal counts prove nothing;
    unequal ones do.
    """
    if prompt_class is not None and ours != theirs and member.tokenizes_alike(prompt_class):
        why = f"it counted {theirs} tokens in a prompt that has {ours} here"
        _note(member, prompt_class, Finding(Agreement.DIFFERS, why))


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
            "%s tokenizes prompts of the class %r otherwise than the gateway: %s. They are routed there by what was "
            "sent before, not by its KV events",
            member.worker,
            prompt_class.value,
            finding.why,
        )
