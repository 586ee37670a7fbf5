"""The tiny requests that the doctor sends: one token each, of a prompt that nobody sent before."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvherd.core.errors import CallerError, WorkerError, WorkerFailed, WorkerTimedOut
from kvherd.core.ids import Rank, RequestId
from kvherd.ports.completions import Tokenizer, Usage
from kvherd.ports.worker import Call, NewsTo, Worker
from kvherd.services.doctor.instruments import Chart
from kvherd.wire.http_chunks import content

USUAL_BLOCK = 64
ANSWER_S = 12.0
"""A server that takes longer for one token is overloaded, and is asked no more."""
OVERLOADED = "is the server overloaded? Ask again when it is not"
_SHOWN = 200
_FIRST = Rank(0)


@dataclass(slots=True)
class _Kept:
    """Implements `ports.worker.Responder`."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    failure: str = ""

    @property
    def started(self) -> bool:
        return self.status != 0

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status = status

    def write(self, data: bytes) -> None:
        self.body += data

    def write_chunk(self, chunk: bytes) -> None:
        self.write(content(chunk))

    def end(self) -> None:
        return

    def fail(self, reason: str) -> None:
        self.failure = reason

    async def drain(self) -> None:
        return

    def when_drained(self, then: Callable[[], None]) -> None:
        then()


@dataclass(slots=True)
class Sender:
    """Sends requests to one server. `nonce` makes their prompt new to it; `answered` counts the answers. After one that
    was `too_slow` no other is sent. Where a server lets requests name their rank, they name rank 0 if nothing else.
    """

    chart: Chart
    worker: Worker
    known: Tokenizer | None
    nonce: str
    answered: int = 0
    too_slow: bool = False

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Those that a request can be sent to, by name; none where there is but one, or no way to name it."""
        facts = self.chart.facts
        return tuple(map(Rank, range(facts.ranks))) if facts.ranks > 1 and facts.addressable else ()

    def change_prompt(self) -> None:
        self.nonce, self.answered = f"again {self.nonce}", 0

    async def send_to_all(self) -> str:
        """One request to every rank, or one. What went wrong; empty if nothing did."""
        try:
            async with asyncio.timeout(ANSWER_S):
                for rank in self.ranks or (Rank(0),):
                    await self.send(rank=rank)
        except TimeoutError:
            return str(self._slow())
        except WorkerError as error:
            return str(error)
        return ""

    async def send(self, *, stream: bool = False, rank: Rank = _FIRST) -> Usage | None:
        """What the answer said that it cost, None if nothing. Raises a `WorkerError` for anything but an answer in
        time.
        """
        if self.too_slow:
            raise self._slow()
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._send(rank, stream=stream)
        except TimeoutError:
            raise self._slow() from None

    def _slow(self) -> WorkerTimedOut:
        self.too_slow = True
        return WorkerTimedOut(self.worker.id, ANSWER_S)

    async def _send(self, rank: Rank, *, stream: bool) -> Usage | None:
        fields: dict[str, object] = {
            "model": self.chart.model,
            "prompt": self.prompt,
            "max_tokens": 1,
            "temperature": 0,
        }
        if stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        told: list[Usage] = []
        call = Call(
            "POST",
            "/v1/completions",
            [(b"content-type", b"application/json")],
            json.dumps(fields).encode(),
            RequestId(f"kvherd-doctor-{self.nonce}-{'s' if stream else 'w'}"),
            model=self.chart.model,
            stream=stream,
            rank=rank if self.ranks else None,
            prompt_token_ids=self.known.encode(self.prompt, add_special_tokens=True) if self.known else None,
            news=NewsTo(on_usage=told.append),
        )
        kept = _Kept()
        try:
            await self.worker.forward(call, kept)
        except CallerError as error:
            raise WorkerFailed(self.worker.id, str(error)) from error
        if kept.status != 200 or kept.failure:
            why = kept.failure or bytes(kept.body[:_SHOWN]).decode("utf-8", "replace")
            raise WorkerFailed(self.worker.id, f"a completion gave HTTP {kept.status}: {' '.join(why.split())}")
        self.answered += 1
        return told[0] if told else None

    @property
    def prompt(self) -> str:
        """At least two blocks long, whatever the vocabulary, and within the context."""
        facts = self.chart.facts
        words = 2 * (facts.block_size or USUAL_BLOCK) + 8
        if facts.max_context_tokens:
            words = min(words, facts.max_context_tokens // 8)
        return f"{self.nonce}: " + " and".join(str(number % 10) for number in range(words))
