"""When a generation may not begin, and when it ends."""

import math

from kvherd.core.engine.generation import Finish, FinishReason, GenerationRequest, Limits
from kvherd.core.scheduler.steps import SchedulerLimits


def stop_tokens(limits: Limits, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that end this generation."""
    return limits.stop_token_ids if limits.ignore_eos else (*limits.stop_token_ids, *eos_token_ids)


def forbidden_tokens(limits: Limits, eos_token_ids: tuple[int, ...], *, said: int) -> tuple[int, ...]:
    """The tokens that may not be chosen after `said` tokens: none ends an answer before `min_new_tokens`."""
    return stop_tokens(limits, eos_token_ids) if said < limits.min_new_tokens else ()


def ending(limits: Limits, eos_token_ids: tuple[int, ...], *, said: int, token_id: int) -> Finish | None:
    """Whether `token_id`, chosen after `said` tokens, is the end. A stop token is no part of the answer."""
    if said >= limits.max_new_tokens:
        return Finish(FinishReason.LENGTH)
    if said >= limits.min_new_tokens and token_id in stop_tokens(limits, eos_token_ids):
        return Finish(FinishReason.STOP, matched=token_id)
    if said + 1 >= limits.max_new_tokens:
        return Finish(FinishReason.LENGTH)
    return None


def blocks_at_most(request: GenerationRequest, block_size: int) -> int:
    """Blocks it can ever need: the last token it is given is never computed."""
    positions = len(request.prompt_token_ids) + max(0, request.limits.max_new_tokens - 1)
    return math.ceil(positions / block_size)


def refusal(request: GenerationRequest, limits: SchedulerLimits) -> str | None:
    """Why this request can never run here, in words; None if it can."""
    prompt = request.prompt_token_ids
    wanted = request.limits.max_new_tokens
    if not prompt:
        return "the prompt is empty"
    if wanted < 0:
        return f"max_new_tokens is {wanted}; it must not be negative"
    strange = next((token for token in prompt if not 0 <= token < limits.vocab_size), None)
    if strange is not None:
        return f"token {strange} is not in the vocabulary of {limits.vocab_size}"
    if len(prompt) + wanted > limits.max_context_tokens:
        return (
            f"the prompt has {len(prompt)} tokens and {wanted} are asked for, "
            f"but the context holds {limits.max_context_tokens}"
        )
    if blocks_at_most(request, limits.block_size) > limits.pool_blocks:
        return (
            f"the prompt has {len(prompt)} tokens and {wanted} are asked for, "
            f"but the KV pool holds {limits.pool_blocks * limits.block_size}"
        )
    return None
