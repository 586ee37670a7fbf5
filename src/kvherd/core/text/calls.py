"""An OpenAI call as far as kvherd reads it. `wire/openai/requests.py` makes these from bytes."""

from dataclasses import dataclass, field
from typing import Any

from kvherd.core.engine.generation import Limits, Sampling


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What chat and text completions share. `max_new_tokens` None: as many as the context leaves.

    `rank` is the data-parallel rank that is to serve it, if that matters to the caller.
    """

    model: str
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int | None = None
    limits: Limits = field(default_factory=lambda: Limits(max_new_tokens=0))
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    cache_salt: str | None = None
    user: str | None = None
    skip_special_tokens: bool = True
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class ChatCall:
    """`messages`, `tools` and `template_args` are plain JSON values, as the chat template wants them.

    `continue_final_message` leaves the last message open, to be gone on with. `parts`: some content was a list.
    """

    options: CallOptions
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    template_args: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    parts: bool = False


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """Each prompt is text or token ids."""

    options: CallOptions
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool = False


@dataclass(frozen=True, slots=True)
class NativeCall:
    """A call in SGLang's own shape. `listed`: the answer is a list although there may be one prompt only."""

    call: CompletionCall
    listed: bool
