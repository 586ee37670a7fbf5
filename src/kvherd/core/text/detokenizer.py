"""Tokens in, text out, a little at a time, and never half a character.

A token may be a part of a character's bytes, and a tokenizer may spell a token differently at the beginning of a text.
So each step decodes a window of the latest tokens and yields what the window shows beyond what was yielded before.
Text that ends in U+FFFD may be a character whose bytes have not all come: its end is held back.

The window is cut where it ends in whole characters. In a long run of bytes that are no text it never does; then it is
cut to its latest tokens anyway: UTF-8 finds its way again within three bytes, and the window keeps far more.
"""

import codecs
from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]
"""Text of a token sequence as the model's tokenizer has it, U+FFFD in place of what is no text."""

_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_HELD_CHARACTERS = 3  # bytes that a UTF-8 character may still lack; some tokenizers show each as one U+FFFD
_WINDOW_TOKENS = 64
_KEPT_TOKENS = 32
_KEPT_CHARACTERS = 16
_CONTEXT_TOKENS = 16


class IncrementalDetokenizer:
    """The pieces of all calls, `finish` included, make exactly `decode` of all tokens, however they were fed.

    `context` are the tokens before them, of which the latest are read: the pieces make what `decode` shows beyond it.
    A tokenizer that drops the first space of a text keeps that of a continuation so.

    Exact for byte-level tokenizers on any tokens, for others on tokens whose bytes are text. The cost of a call does
    not grow with what was fed before.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context[-_CONTEXT_TOKENS:])
        self._context = len(self._window)
        self._text = decode(self._window) if self._window else ""
        self._shown = len(self._text)

    @property
    def held(self) -> str:
        """What the end of the tokens fed would be as text, were nothing to follow: U+FFFD, or "" if it is complete."""
        return self._text[self._shown :]

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take further tokens; return the text that is now certain."""
        if not token_ids:
            return ""
        self._window.extend(token_ids)
        self._text = self._decode(self._window)
        # max: a few tokenizers take back a space that they showed at the end
        stable = max(self._shown, len(self._text) - _held_back(self._text))
        piece = self._text[self._shown : stable]
        self._shown = stable
        self._cut(piece)
        return piece

    def finish(self) -> str:
        """Return what was held back: bytes that never became a character, as U+FFFD. Ends this detokenizer's use."""
        piece = self._text[self._shown :]
        self._shown = len(self._text)
        return piece

    def _cut(self, piece: str) -> None:
        if not self.held:
            # a context that shows nothing would be none: the next token would be spelt as a beginning
            if piece or len(self._window) > _WINDOW_TOKENS:
                self._drop(self._context)
                self._context = len(self._window)
        elif len(self._window) > _WINDOW_TOKENS:
            self._cut_anyway()

    def _drop(self, tokens: int) -> None:
        if tokens:
            del self._window[:tokens]
            self._text = self._decode(self._window)
            self._shown = len(self._text)

    def _cut_anyway(self) -> None:
        latest = self._window[-_KEPT_TOKENS:]
        text = self._decode(latest)
        to_show = len(self._text) - self._shown
        if len(text) < _KEPT_CHARACTERS:
            return  # most of these tokens show nothing, so the bytes that matter may be further back
        self._window, self._context, self._text = latest, 0, text
        self._shown = len(text) - to_show


class ByteDetokenizer:
    """The same where a text is nothing but its tokens' bytes, one behind the other, at a tenth of the cost.

    `token_bytes` gives a token's; none for one that is not shown.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def held(self) -> str:
        waiting = self._decoder.getstate()[0]
        return waiting.decode("utf-8", "replace") if waiting else ""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take further tokens; return the text that is now certain."""
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def finish(self) -> str:
        """Return what was held back, as U+FFFD. Ends this detokenizer's use."""
        return self._decoder.decode(b"", final=True)


def _held_back(text: str) -> int:
    end = text[-_HELD_CHARACTERS:]
    return len(end) - len(end.rstrip(_UNKNOWN))
