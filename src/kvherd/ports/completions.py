"""What an HTTP edge may rely on from whatever turns OpenAI calls into answers."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Protocol

from kvherd.core.engine.generation import GenerationRequest, TokenDelta
from kvherd.core.ids import RequestId
from kvherd.core.text.calls import ChatCall, CompletionCall, NativeCall
from kvherd.core.text.turns import RenderedTurns

Generate = Callable[[GenerationRequest], AsyncIterator[TokenDelta]]
"""Continues a token sequence; closing the iterator aborts it. The scheduler's and a gRPC worker's `generate`."""


class Usage:
    """What a finished call cost, for logs and audits. `cached_tokens` None: whoever answered did not say.

    `host_tokens` of them were loaded from host memory, `storage_tokens` others from a store, as far as that was said.

    No dataclass, for one is made for every answer: the `__init__` that a dataclass is given cannot be compiled.
    """

    __slots__ = ("cached_tokens", "completion_tokens", "host_tokens", "prompt_tokens", "storage_tokens")

    def __init__(
        self,
        prompt_tokens: int,
        cached_tokens: int | None,
        completion_tokens: int,
        host_tokens: int = 0,
        storage_tokens: int = 0,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.completion_tokens = completion_tokens
        self.host_tokens = host_tokens
        self.storage_tokens = storage_tokens

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Usage) and self._told == other._told

    def __hash__(self) -> int:
        return hash(self._told)

    def __repr__(self) -> str:
        return f"Usage{self._told}"

    @property
    def _told(self) -> tuple[int, int | None, int, int, int]:
        cached, completion = self.cached_tokens, self.completion_tokens
        return self.prompt_tokens, cached, completion, self.host_tokens, self.storage_tokens


class Tokenizer(Protocol):
    """Text ↔ tokens as one model does it. Pure and synchronous; safe in threads."""

    @property
    def model_max_tokens(self) -> int: ...

    @property
    def special_tokens(self) -> dict[str, int]: ...

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]: ...

    def check_length(self, text: str, *, after_chars: int = 0) -> None:
        """Raise `PromptTooLong` for a text that cannot fit into the model's context, with so many characters before it;
        costs next to nothing.

        It passes texts that do not fit by little: these have to be counted.
        """
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it, for logprobs; bytes that are no text become `\\x..`."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes a token stands for; a special token's are its text's."""
        ...

    def spelt(self, *, skip_special_tokens: bool = True) -> Callable[[int], bytes] | None:
        """What each token adds to a decoded text, if a text is nothing but its tokens' bytes; else None."""
        ...

    def render_chat(self, call: ChatCall) -> str:
        """The prompt the model's chat template makes of these messages.

        Raises `FieldInvalid` with the template's own reason.
        """
        ...

    @property
    def turns_ahead(self) -> int | None:
        """How many messages must follow one before its text is known for good; None if its chats are rendered as a
        whole only.
        """
        ...

    @property
    def only_shown(self) -> bool:
        """Of a message behind the first turn that has a role and a text that is not blank, and nothing else, the text
        is only shown, as it is or stripped: what stands around it, and behind all, depends on the role, on the first
        message and on what is no message.
        """
        ...

    def render_turns(self, call: ChatCall, begin: int) -> RenderedTurns | None:
        """The same for the messages from `begin` on, which is not the end: what `render_chat` makes of them, behind
        what it makes of those before. Of these all but the first and the last may be `UNREAD`.

        None if only the whole tells. Raises as `render_chat` does.
        """
        ...


class Completions(Protocol):
    """Answers OpenAI chat and text completions.

    `prompts` may bring what `prompt_ids` gave before, so that it is done once, or in a thread.
    """

    def prompt_ids(self, call: ChatCall | CompletionCall) -> list[list[int]]:
        """Token ids of each prompt of the call (a chat has one). Raises `CallerError`. Safe in threads."""
        ...

    async def whole(
        self,
        call: ChatCall | CompletionCall,
        *,
        request: RequestId,
        generate: Generate,
        prompts: list[list[int]] | None = None,
    ) -> bytes:
        """The complete JSON answer. Raises `CallerError` before anything ran; errors of `generate` pass through."""
        ...

    def stream(
        self,
        call: ChatCall | CompletionCall,
        *,
        request: RequestId,
        generate: Generate,
        prompts: list[list[int]] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """SSE frames of the answer, ending in `data: [DONE]`; closing it aborts the generation.

        Raises `CallerError` before the first frame. An error of `generate` after the first frame becomes an error
        event and the end, never silence.
        """
        ...


class NativeCompletions(Protocol):
    """Answers SGLang's own `/generate`, with the promises of `Completions`."""

    async def whole(
        self,
        native: NativeCall,
        *,
        request: RequestId,
        generate: Generate,
        prompts: list[list[int]] | None = None,
    ) -> bytes: ...

    def stream(
        self,
        native: NativeCall,
        *,
        request: RequestId,
        generate: Generate,
        prompts: list[list[int]] | None = None,
    ) -> AsyncGenerator[bytes, None]: ...
