"""What one step of the model takes and gives, without an array in sight."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvherd.core.engine.generation import Sampling, TokenLogprob


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """New tokens of one sequence: a chunk of a prompt, or the one token of a decode step.

    `first_position` is the position of the first new token; everything before it is in the pool already.
    `block_table` names the pool blocks of the whole context, the new tokens included, in order; the step writes
    keys and values of the new tokens into them. Two sequences of one batch may share blocks that neither writes.
    """

    token_ids: Sequence[int]
    first_position: int
    block_table: Sequence[int]
    wants_logits: bool = True


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The sequences of one step, prompt chunks and decode rows in any mix and order."""

    sequences: Sequence[SequenceRows]


@dataclass(frozen=True, slots=True)
class SamplingState:
    """All that choosing the next token of one sequence depends on, besides its logits.

    `position` is the position the chosen token will have: with a seed, it decides the dice. `forbidden_token_ids`
    can never be chosen (stop tokens before `min_new_tokens`). The two token lists are read for penalties only, so
    they may be empty when `sampling` has none; they may be live lists that grow after the step.
    """

    sampling: Sampling
    position: int
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    forbidden_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """The next token of a sequence; `logprob` is there when its sampling asked for logprobs."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What does not change while a model is loaded. `max_context_tokens` is what one sequence can hold."""

    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]
    weights_bytes: int
    kv_bytes: int
    pool_blocks: int = 0
    block_size: int = 0
    architecture: str = field(default="llama")
