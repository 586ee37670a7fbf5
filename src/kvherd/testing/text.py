"""A tokenizer whose tokens are bytes, and generations that say what they are told to."""

from collections.abc import AsyncGenerator, Awaitable, Callable

from kvherd.core.engine.generation import Finish, FinishReason, GenerationRequest, TokenDelta, TokenLogprob
from kvherd.core.ids import RequestId
from kvherd.core.text.calls import ChatCall
from kvherd.core.text.turns import RenderedTurns

END_OF_TEXT, TURN_BEGINS, TURN_ENDS = 256, 257, 258
_SPECIAL = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": TURN_BEGINS, "<|im_end|>": TURN_ENDS}
_SPELLINGS = {token_id: text.encode() for text, token_id in _SPECIAL.items()}


class ByteTokenizer:
    """Implements `ports.completions.Tokenizer`: a token is a byte, and three more are special."""

    model_max_tokens = 4096
    special_tokens = _SPECIAL

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def check_length(self, text: str, *, after_chars: int = 0) -> None:
        """Every text passes."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        spelt = (
            b"" if skip_special_tokens and token >= END_OF_TEXT else self.token_bytes(token) for token in token_ids
        )
        return b"".join(spelt).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="backslashreplace")

    def spelt(self, *, skip_special_tokens: bool = True) -> Callable[[int], bytes] | None:
        return None

    def token_bytes(self, token_id: int) -> bytes:
        return _SPELLINGS.get(token_id) or bytes([token_id])

    def render_chat(self, call: ChatCall) -> str:
        said = "".join(f"{message['role']}: {message['content']}\n" for message in call.messages)
        return said + ("assistant: " if call.add_generation_prompt else "")

    turns_ahead = None
    only_shown = False

    def render_turns(self, call: ChatCall, begin: int) -> RenderedTurns | None:
        return None


class ScriptedGenerations:
    """Its `generate` says `answer`, one byte a delta, to every request, and keeps account of how each ended.

    `fail_after` deltas it raises `error`; `pause` is awaited before each delta, and `ended`
    called when a generation is over, however.
    """

    def __init__(
        self,
        answer: str,
        *,
        cached_tokens: int = 0,
        host_tokens: int = 0,
        storage_tokens: int = 0,
        error: Exception | None = None,
        fail_after: int = 0,
        pause: Callable[[], Awaitable[None]] | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.answer = answer
        self.requests: list[GenerationRequest] = []
        self.aborted: list[RequestId] = []
        self.alive: set[RequestId] = set()
        self._cached_tokens = cached_tokens
        self._host_tokens = host_tokens
        self._storage_tokens = storage_tokens
        self._error = error
        self._fail_after = fail_after
        self._pause = pause
        self._ended = ended

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        self.requests.append(request)
        self.alive.add(request.request)
        token_ids = self.answer.encode()[: request.limits.max_new_tokens]
        cut = len(token_ids) < len(self.answer.encode())
        finish = Finish(FinishReason.LENGTH if cut else FinishReason.STOP, None if cut else END_OF_TEXT)
        try:
            for index, token_id in enumerate(token_ids):
                if self._pause is not None:
                    await self._pause()
                if self._error is not None and index == self._fail_after:
                    raise self._error
                yield self._delta(request, (token_id,), index + 1)
            yield self._delta(request, (), len(token_ids), finish)
        except GeneratorExit:
            self.aborted.append(request.request)
            raise
        finally:
            self.alive.discard(request.request)
            self._ended()

    def _delta(
        self, request: GenerationRequest, token_ids: tuple[int, ...], made: int, finish: Finish | None = None
    ) -> TokenDelta:
        top = request.sampling.logprobs
        ranked = tuple((65 + place, -2.0 - place) for place in range(top or 0))
        logprobs = () if top is None else tuple(TokenLogprob(token, -0.5, ranked) for token in token_ids)
        return TokenDelta(
            token_ids,
            len(request.prompt_token_ids),
            made,
            self._cached_tokens,
            logprobs=logprobs,
            finish=finish,
            host_tokens=self._host_tokens,
            storage_tokens=self._storage_tokens,
        )
