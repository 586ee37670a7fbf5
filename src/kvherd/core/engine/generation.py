"""What a generation is, for whoever asks for one and whoever runs it.

Tokens in, tokens out: no text here. Text is made of tokens in `core/text`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvherd.core.ids import RequestId


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. Defaults change nothing; temperature 0 is greedy.

    `top_k` -1 and `top_p` 1 admit all. Penalties as OpenAI and vLLM define them: frequency and presence count
    output tokens, repetition (1 is none) counts prompt and output. `seed` makes a request repeatable whatever it
    shares a batch with. `logprobs` is None for none, else how many alternatives to report beside the chosen token.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """When a generation ends. `stop_token_ids` end it and are not part of the answer; so does the model's own
    end-of-text unless `ignore_eos`. None end it before `min_new_tokens`. `stop` strings are matched on text by
    whoever holds the tokenizer, never by the scheduler.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to continue. An `n` of several is several of these.

    `cache_salt` and `lora` keep prefixes apart that must not be shared.
    """

    request: RequestId
    prompt_token_ids: Sequence[int]
    limits: Limits
    sampling: Sampling = field(default_factory=Sampling)
    cache_salt: str | None = None
    lora: str | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms after temperature 1, before any penalty; `top` is (token, logprob), best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a generation ended. `matched` is the stop token id or stop string, if one did it."""

    reason: FinishReason
    matched: int | str | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """News of one generation: the tokens since the last delta (possibly none) and the counts so far.

    `cached_tokens` is how many prompt tokens the engine did not compute; it is final from the first delta on. So is
    `host_tokens`: how many of them had left the device and were loaded from host memory; and `storage_tokens`: how many
    others were read from the store for it.
    The last delta has `finish`; none follows it. `logprobs` is empty or as long as `token_ids`.
    """

    token_ids: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    host_tokens: int = 0
    storage_tokens: int = 0
