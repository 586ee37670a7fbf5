"""What may be handed to a scheduler: checked once, before anything reaches it, whichever door a request came by."""

import math
from collections.abc import Sequence

from kvherd.core.engine.generation import GenerationRequest, Limits, Sampling
from kvherd.core.engine.reports import RankFacts
from kvherd.core.errors import FieldInvalid, PromptTooLong, Unsupported

MOST_LOGPROBS = 20
MOST_BIAS = 100


def check_request(request: GenerationRequest, ranks: Sequence[RankFacts]) -> None:
    """Raise `FieldInvalid`, `PromptTooLong` or `Unsupported` unless these ranks can run it."""
    facts = ranks[0]
    _check_prompt(request.prompt_token_ids, facts.vocab_size)
    _check_room(len(request.prompt_token_ids), request.limits.max_new_tokens, facts)
    _check_limits(request.limits, facts.vocab_size)
    _check_sampling(request.sampling, facts.vocab_size)
    if request.rank is not None and not 0 <= request.rank < len(ranks):
        raise FieldInvalid("data_parallel_rank", f"is {request.rank}; this engine has ranks 0 to {len(ranks) - 1}")
    if request.lora:
        raise Unsupported(f"the LoRA adapter {request.lora!r}")


def room_for_answer(prompt_tokens: int, facts: RankFacts) -> int:
    """The most new tokens that context and pool leave behind a prompt; at least 1.

    Raises `PromptTooLong` if they leave none.
    """
    room = _context(facts) - prompt_tokens
    if room < 1:
        raise PromptTooLong(prompt_tokens, 0, _context(facts))
    return room


def _context(facts: RankFacts) -> int:
    return min(facts.max_context_tokens, facts.capacity_tokens)


def _check_prompt(prompt: Sequence[int], vocab_size: int) -> None:
    if not prompt:
        raise FieldInvalid("input_ids", "is empty; a prompt has at least one token")
    strange = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if strange is not None:
        raise FieldInvalid("input_ids", f"token {strange} is not in the vocabulary of {vocab_size}")


def _check_room(prompt_tokens: int, max_new_tokens: int, facts: RankFacts) -> None:
    if max_new_tokens < 0:
        raise FieldInvalid("max_new_tokens", f"is {max_new_tokens}; it must not be negative")
    if prompt_tokens + max_new_tokens > _context(facts):
        raise PromptTooLong(prompt_tokens, max_new_tokens, _context(facts))


def _check_limits(limits: Limits, vocab_size: int) -> None:
    if limits.min_new_tokens > limits.max_new_tokens:
        raise FieldInvalid("min_new_tokens", f"is above max_new_tokens, {limits.max_new_tokens}")
    _check_tokens("stop_token_ids", limits.stop_token_ids, vocab_size)
    if any(not stop for stop in limits.stop):
        raise FieldInvalid("stop", "an empty stop string would end every answer at once")


def _check_sampling(sampling: Sampling, vocab_size: int) -> None:
    ranges = (
        ("temperature", sampling.temperature, 0.0, math.inf),
        ("top_p", sampling.top_p, 0.0, 1.0),
        ("min_p", sampling.min_p, 0.0, 1.0),
        ("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0),
        ("presence_penalty", sampling.presence_penalty, -2.0, 2.0),
        ("repetition_penalty", sampling.repetition_penalty, 0.0, 2.0),
    )
    for name, value, low, high in ranges:
        if not math.isfinite(value) or not low <= value <= high:
            top = "" if math.isinf(high) else f" and at most {high:g}"
            raise FieldInvalid(name, f"is {value:g}; it must be at least {low:g}{top}")
    if sampling.top_p == 0 or sampling.repetition_penalty == 0:
        raise FieldInvalid("top_p" if sampling.top_p == 0 else "repetition_penalty", "must be greater than 0")
    if sampling.top_k < -1 or sampling.top_k == 0:
        raise FieldInvalid("top_k", f"is {sampling.top_k}; it must be -1 for all, or at least 1")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MOST_LOGPROBS:
        raise FieldInvalid("top_logprobs_num", f"is {sampling.logprobs}; it must be 0 to {MOST_LOGPROBS}")
    _check_tokens("logit_bias", tuple(token for token, _ in sampling.logit_bias), vocab_size)
    strange = next((bias for _, bias in sampling.logit_bias if not -MOST_BIAS <= bias <= MOST_BIAS), None)
    if strange is not None:
        raise FieldInvalid("logit_bias", f"{strange:g} is not between -{MOST_BIAS} and {MOST_BIAS}")


def _check_tokens(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    strange = next((token for token in token_ids if not 0 <= token < vocab_size), None)
    if strange is not None:
        raise FieldInvalid(name, f"token {strange} is not in the vocabulary of {vocab_size}")
