"""The life of one choice of an answer: tokens in, text to show out, until it ends."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvherd.core.engine.generation import Finish, FinishReason, Limits, TokenDelta, TokenLogprob
from kvherd.core.text.detokenizer import ByteDetokenizer, Decode, IncrementalDetokenizer
from kvherd.core.text.stops import StopMatcher


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token whose text was shown at least in part; `text_offset` is where it begins in the choice's text."""

    token: TokenLogprob
    text_offset: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What to show now. The last has `finish`; none follows it. `token_ids` are those taken, whether shown or not."""

    text: str
    tokens: tuple[ShownToken, ...] = ()
    finish: Finish | None = None
    token_ids: tuple[int, ...] = field(default=(), compare=False)


@dataclass(slots=True)
class _Placed:
    token: TokenLogprob
    begin: int
    end: int


class Choice:
    """Feed it the deltas of one generation, in order, until one comes back with `finish`.

    A stop string ends the choice although the generation may go on: whoever feeds should then end that. Token
    logprobs come with the delta that completes the token's text; tokens wholly inside a stop string never do.
    Stop strings are not looked for in the first `min_new_tokens` tokens. `context` are the prompt's tokens: a choice
    continues them, so a space that would be dropped at a text's beginning stays.
    """

    def __init__(
        self,
        decode: Decode,
        limits: Limits,
        context: Sequence[int] = (),
        *,
        token_bytes: Callable[[int], bytes] | None = None,
    ) -> None:
        """`token_bytes`, where a text is nothing but its tokens' bytes, stands in for `decode` and its context."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.host_tokens = 0
        self.storage_tokens = 0
        self.completion_tokens = 0
        self.finish: Finish | None = None
        self._detokenizer: IncrementalDetokenizer | ByteDetokenizer
        self._detokenizer = ByteDetokenizer(token_bytes) if token_bytes else IncrementalDetokenizer(decode, context)
        self._spelt = token_bytes is not None
        self._plain = not limits.stop
        self._stops = StopMatcher(limits.stop)
        self._unmatched_tokens = limits.min_new_tokens
        self._fed_tokens = 0
        self._text_length = 0
        self._shown_length = 0
        self._incomplete: list[_Placed] = []
        self._placed: deque[_Placed] = deque()

    @property
    def plain(self) -> bool:
        """The next token's text is that of its own bytes, and nothing is looked for in it or told beside it.

        If those are whole characters, `feed` need not hear of that token: the next delta has the counts.
        """
        return self._plain and self._spelt and not (self._incomplete or self._placed or self._detokenizer.held)

    def feed(self, delta: TokenDelta) -> TextDelta:
        self.prompt_tokens, self.cached_tokens = delta.prompt_tokens, delta.cached_tokens
        self.host_tokens, self.storage_tokens = delta.host_tokens, delta.storage_tokens
        if self._plain and not (delta.logprobs or self._incomplete or self._placed):
            return self._feed_plainly(delta)
        pieces: list[str] = []
        for index, token_id in enumerate(delta.token_ids):
            pieces.append(self._feed_token(token_id, delta.logprobs[index] if delta.logprobs else None))
            if self.finish is not None:
                break
        taken = len(pieces)
        self.completion_tokens = delta.completion_tokens - (len(delta.token_ids) - taken)
        if delta.finish is not None and self.finish is None:
            pieces.append(self._end(delta.finish))
        text = "".join(pieces)
        self._shown_length += len(text)
        return TextDelta(text, self._complete_tokens(), self.finish, delta.token_ids[:taken])

    def _feed_plainly(self, delta: TokenDelta) -> TextDelta:
        """Tokens of which nothing is looked for and nothing told but their text."""
        text = self._detokenizer.feed(delta.token_ids)
        if delta.finish is not None:
            text += self._detokenizer.finish()
            self.finish = delta.finish
        self._fed_tokens += len(delta.token_ids)
        self._text_length += len(text)
        self._shown_length += len(text)
        self.completion_tokens = delta.completion_tokens
        return TextDelta(text, (), delta.finish, delta.token_ids)

    def _feed_token(self, token_id: int, logprob: TokenLogprob | None) -> str:
        held = self._detokenizer.held
        text = self._detokenizer.feed([token_id])
        self._fed_tokens += 1
        if logprob is not None:
            begin = self._text_length + _begin(held, text + self._detokenizer.held)
            self._incomplete.append(_Placed(logprob, begin, begin))
        self._text_length += len(text)
        if not self._detokenizer.held:
            self._place()
        return self._match(text)

    def _match(self, text: str) -> str:
        if self._fed_tokens <= self._unmatched_tokens:
            return text
        passed = self._stops.feed(text)
        if passed.matched is not None:
            self.finish = Finish(FinishReason.STOP, passed.matched)
        return passed.text

    def _end(self, finish: Finish) -> str:
        text = self._detokenizer.finish()
        self._text_length += len(text)
        text = self._match(text)
        if self.finish is not None:
            return text
        self.finish = finish
        return text + self._stops.finish()

    def _place(self) -> None:
        for placed in self._incomplete:
            placed.end = self._text_length
        self._placed.extend(self._incomplete)
        self._incomplete.clear()

    def _complete_tokens(self) -> tuple[ShownToken, ...]:
        shown, tokens = self._shown_length, []
        if self.finish is not None:
            self._place()
        stopped = self.finish is not None and isinstance(self.finish.matched, str)
        while self._placed and (self._placed[0].end <= shown or self.finish is not None):
            placed = self._placed.popleft()
            if not stopped or placed.begin < shown:
                tokens.append(ShownToken(placed.token, placed.begin))
        return tuple(tokens)


def _begin(held: str, text: str) -> int:
    """Where in `text` its latest token begins, if before that token it was `held`.

    Bytes that are no text stay U+FFFD whatever follows; else the token went on with the last character held.
    """
    return len(held) if len(text) > len(held) and text.startswith(held) else max(0, len(held) - 1)
