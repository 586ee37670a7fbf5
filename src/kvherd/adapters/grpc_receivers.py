"""What becomes of a generation's messages as they come: taken one by one, or made into an answer at once."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from kvherd.adapters.completions import StreamedAnswer
from kvherd.adapters.grpc_stream import WireStream
from kvherd.core.engine.generation import TokenDelta
from kvherd.ports.worker import Responder
from kvherd.wire.openai.answers import quoted
from kvherd.wire.usual_chunk import TokenTexts, UsualChunks

_MOST_WAITING: Final = 256
_SETTLE_BYTES: Final = 16 * 1024
"""So much of an answer is written before its client has to have taken it."""

_NO_TEXTS: Final = TokenTexts(lambda _: b"")


class Reader(Protocol):
    """Turns the messages of one generation into deltas, in order."""

    def decode(self, data: bytes) -> TokenDelta:
        """Raises `FrameInvalid`."""
        ...


class Pulled:
    """Implements `grpc_stream.Receiver` for a reader that takes messages when it likes. Set `stream` at once."""

    def __init__(self) -> None:
        self.stream: WireStream | None = None
        self.status: tuple[str, str] | None = None
        self._waiting: deque[bytes] = deque()
        self._woken = asyncio.Event()

    def message(self, data: bytes) -> None:
        self._waiting.append(data)
        if len(self._waiting) >= _MOST_WAITING and self.stream is not None:
            self.stream.hold()
        self._woken.set()

    def ended(self, status: str, words: str) -> None:
        self.status = status, words
        self._woken.set()

    async def next(self) -> bytes | None:
        """The next message; None when the stream ended, and `status` says how."""
        while not self._waiting:
            if self.status is not None:
                return None
            self._woken.clear()
            await self._woken.wait()
        data = self._waiting.popleft()
        if self.stream is not None and self.stream.held and not self._waiting:
            self.stream.release()
        return data


class Pushed:
    """Implements `grpc_stream.Receiver`: each message is written to the client in the call that brings it.

    Set `stream` at once, then `await run()`. `texts` are of calls that show special tokens alike; None for a tokenizer
    that has none.
    """

    __slots__ = (
        "_answer",
        "_before",
        "_behind",
        "_choice",
        "_chunks",
        "_head",
        "_known",
        "_on_first_token",
        "_passed",
        "_plain",
        "_reader",
        "_responder",
        "_tells_text_only",
        "_texts",
        "_unsettled_bytes",
        "_woken",
        "complete",
        "finished",
        "status",
        "stream",
    )

    def __init__(
        self,
        reader: Reader,
        answer: StreamedAnswer,
        responder: Responder,
        *,
        chunks: UsualChunks,
        texts: TokenTexts | None,
        head: list[tuple[bytes, bytes]],
        on_first_token: Callable[[], None] | None,
    ) -> None:
        self.stream: WireStream | None = None
        self.status: tuple[str, str] | None = None
        self.finished = False
        self.complete = False  # the engine said that it is done; else a stop string ended the answer here
        self._reader = reader
        self._answer = answer
        run = answer.plan.runs[0]
        self._choice = run.choice
        self._tells_text_only = texts is not None and run.request.sampling.logprobs is None
        self._responder = responder
        self._chunks = chunks
        self._texts = texts or _NO_TEXTS
        self._known = self._texts.known
        self._before = self._behind = b""
        self._plain = False
        self._passed = b""
        self._head = head
        self._on_first_token = on_first_token
        self._unsettled_bytes = 0
        self._woken = asyncio.Event()

    def message(self, data: bytes) -> None:
        if self._plain:
            token = self._chunks.token(data)
            text = self._known.get(token)
            if text is None:
                text = self._texts.learn(token)
            if text:
                self._passed = data
                self._write(self._before + text + self._behind)
                return
        if not self.finished:  # else a stop string ended it here, and the engine said more before it heard of that
            self._read(data)

    def _read(self, data: bytes) -> None:
        if self._passed:
            self._reader.decode(self._passed)  # its counts are what the end is read by
            self._passed = b""
        delta = self._reader.decode(data)
        if self._on_first_token is not None and delta.token_ids:
            self._on_first_token()
            self._on_first_token = None
        text = self._choice.feed(delta)
        if self._behind and text.finish is None and not text.tokens:
            frames = self._before + quoted(text.text) + self._behind if text.text else b""
        else:
            frames = self._answer.frames(0, text)
        if frames:
            if not self._responder.started:
                self._responder.start(200, self._head)
            self._write(frames)
        if text.finish is not None:
            self._plain = False
            self.finished, self.complete = True, delta.finish is not None
            self._woken.set()
            return
        opened = self._responder.started and self._on_first_token is None
        self._plain = opened and self._tells_text_only and self._choice.plain
        if self._plain and not self._behind:
            self._before, self._behind = self._answer.around(0)

    def ended(self, status: str, words: str) -> None:
        self.status = status, words
        self._woken.set()

    async def run(self) -> None:
        """Return when the answer is complete (`finished`) or the stream ended before (`status`).

        Meanwhile the engine is held back whenever the client does not keep up.
        """
        while not self.finished and self.status is None:
            await self._woken.wait()
            self._woken.clear()
            if self._unsettled_bytes >= _SETTLE_BYTES:
                await self._responder.drain()
                self._unsettled_bytes = 0
                if self.stream is not None:
                    self.stream.release()

    def _write(self, frames: bytes) -> None:
        self._responder.write(frames)
        self._unsettled_bytes += len(frames)
        if self._unsettled_bytes >= _SETTLE_BYTES and self.stream is not None:
            self.stream.hold()
            self._woken.set()
