"""Whether the gateway can know which tokens a prompt has there."""

import json
from collections.abc import Mapping
from typing import Final

from kvherd.core.errors import CallerError, KvherdError, WorkerError, WorkerUnsupported
from kvherd.core.fleet.spec import GRPC
from kvherd.core.text.calls import ChatCall
from kvherd.core.text.parity import PromptClass, first_difference, probes
from kvherd.ports.completions import Tokenizer
from kvherd.services.doctor.findings import Finding, ok, problem, unknown, warning
from kvherd.services.doctor.instruments import Chart, Instruments
from kvherd.wire.openai.requests import decode_completion
from kvherd.wire.openai.tokens import decode_tokenize

NAME_IT = (
    "name the model's own directory with --tokenizer, here, and of the bridge (`kvherd bridge --tokenizer DIR`) or of "
    "the worker (`--worker URL,tokenizer=DIR`)"
)


async def tokenizer(chart: Chart, instruments: Instruments) -> tuple[Finding, Tokenizer | None]:
    """Where the gateway would have the model's tokenizer from, and the tokenizer."""
    complaint = chart.complaint
    told = (complaint.tokenizer, complaint.events, chart.facts.events_url, complaint.url)
    source = complaint.tokenizer or next((one for one in told if one and one.startswith(GRPC)), None)
    if source is None:
        seen = "a server on HTTP hands out no tokenizer, and none was named"
        return problem("tokenizer", seen, f"{NAME_IT}: without it requests earn no credit"), None
    try:
        found = await instruments.tokenizer(source)
    except WorkerUnsupported as error:
        return problem("tokenizer", str(error), f"{NAME_IT}: without it requests earn no credit"), None
    except KvherdError as error:
        return problem("tokenizer", f"none from {source}: {error}", NAME_IT), None
    return ok("tokenizer", f"it comes from {source}"), found


async def tokenization(chart: Chart, instruments: Instruments, known: Tokenizer | None) -> list[Finding]:
    """Hold the server's own tokens of a probe of every class of prompts against ours."""
    if not chart.over_http:
        return [ok("tokenization", "a server on gRPC is given tokens")]
    if known is None:
        return [unknown("tokenization", "without a tokenizer there is nothing to compare with")]
    same: list[PromptClass] = []
    differing: dict[PromptClass, str] = {}
    findings: list[Finding] = []
    for prompt_class, body in probes(known.special_tokens).items():
        check = f"tokenization: {prompt_class.value}"
        try:
            seen = await _difference(instruments, known, {"model": chart.model, **body})
        except WorkerUnsupported as error:
            return [unknown("tokenization", str(error), "counts of tokens are compared at run time all the same")]
        except (CallerError, WorkerError) as error:
            findings.append(unknown(check, f"not compared: {error}"))
            continue
        if seen is None:
            same.append(prompt_class)
        else:
            differing[prompt_class] = seen
    if same:
        findings.insert(0, ok("tokenization", f"the same tokens here and there: {', '.join(same)}"))
    # One class may be odd. Where plain chats differ, or everything does, hardly a request earns credit.
    grave = not same or PromptClass.CHAT in differing
    advice = _TEMPLATE if PromptClass.TEXT in same and PromptClass.CHAT in differing else _MEND
    judged = problem if grave else warning
    return [*findings, *(judged(f"tokenization: {one.value}", seen, advice) for one, seen in differing.items())]


_MEND: Final = (
    "see that --tokenizer is the directory that the server reads, chat template included; such prompts are routed by "
    "what was sent where"
)
_TEMPLATE: Final = (
    "it has another chat template: if it was started with --chat-template FILE, name a copy of the model's directory "
    "with --tokenizer that has FILE as chat_template.jinja"
)


async def _difference(instruments: Instruments, known: Tokenizer, body: Mapping[str, object]) -> str | None:
    """In words; None if there is none. Raises a `CallerError` for what we cannot read, and a `WorkerError`."""
    data = json.dumps(body).encode()
    call = decode_tokenize(data)
    if isinstance(call, ChatCall):
        ours = known.encode(known.render_chat(call))
    else:
        ours = known.encode(str(decode_completion(data).prompts[0]), add_special_tokens=True)
    theirs = list(await instruments.worker.tokenize(data))
    at = first_difference(ours, theirs)
    return (
        None
        if at is None
        else f"{len(theirs)} tokens there and {len(ours)} here; number {at} is the first that differs"
    )
