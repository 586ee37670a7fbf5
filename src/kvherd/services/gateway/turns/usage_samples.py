"""Streams say what was cached only if they are asked to: of some that were not, the gateway asks on its own account,
and takes the answer out again before the client sees it.
"""

from collections.abc import Callable, Sequence
from typing import Final

from kvherd.core.fleet.roster import Member
from kvherd.ports.worker import Responder, WorkerKind
from kvherd.services.gateway.metrics import GatewayMetrics
from kvherd.services.gateway.turns.turn import Turn
from kvherd.services.gateway.turns.witness import Around
from kvherd.wire.http_chunks import content
from kvherd.wire.openai.edits import with_usage
from kvherd.wire.openai.taken_usage import TakenUsage

_KINDS: Final = frozenset({WorkerKind.KVHERD_HTTP, WorkerKind.VLLM_HTTP, WorkerKind.SGLANG_HTTP})
"""Other servers may refuse a field that they do not know."""

_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions"})


class UsageSamples:
    """`share` of the streams that could decide a prediction are asked for their usage; `dice` come from 0 to 1."""

    def __init__(self, share: float, metrics: GatewayMetrics, *, dice: Callable[[], float]) -> None:
        self._share = share
        self._metrics = metrics
        self._dice = dice

    def ask(self, turn: Turn, member: Member, body: bytes) -> bytes | None:
        """The body that asks for usage too; None if this stream is left as it is."""
        if not self._could_decide(turn, member) or self._dice() >= self._share:
            return None
        asking = with_usage(body, turn.asked)
        if asking is not None:
            self._metrics.sampled(member.worker)
        return asking

    def learn(self, turn: Turn, member: Member) -> None:
        """From a complete answer: an engine may have been told to end every stream with its usage. Then a client
        expects it unasked, and nobody has to ask.
        """
        if _silent(turn) and not turn.sampled:
            member.truth.tells_unasked = turn.usage is not None

    def _could_decide(self, turn: Turn, member: Member) -> bool:
        truth = member.truth
        return (
            _silent(turn)
            and member.kind in _KINDS
            and turn.trial is not None
            and not turn.trial.watch.disturbed
            and truth.tells_unasked is False
            and (truth.tells is not False or truth.hits_told)
        )


class WithoutUsage(Around):
    """For a stream whose client did not ask for the usage at its end."""

    def __init__(self, inner: Responder) -> None:
        super().__init__(inner)
        self._taken: TakenUsage | None = None

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        named = {name.lower(): value for name, value in headers}
        if status == 200 and named.get(b"content-type", b"").startswith(b"text/event-stream"):
            self._taken = TakenUsage()
            headers = [header for header in headers if header[0].lower() != b"content-length"]
        self._inner.start(status, headers)

    def write(self, data: bytes) -> None:
        if self._taken is not None:
            data = self._taken.feed(data)
        if data:
            self._inner.write(data)

    def write_chunk(self, chunk: bytes) -> None:
        self.write(content(chunk))

    def end(self) -> None:
        self._write_rest()
        self._inner.end()

    def fail(self, reason: str) -> None:
        self._write_rest()
        self._inner.fail(reason)

    def _write_rest(self) -> None:
        rest = b"" if self._taken is None else self._taken.end()
        if rest:
            self._inner.write(rest)


def uncompressed(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Let the answer come as plain bytes, which every client takes: nothing can be taken out of others."""
    return [header for header in headers if header[0] != b"accept-encoding"]


def _silent(turn: Turn) -> bool:
    """A stream whose client said nothing about its usage."""
    return turn.streams and not bytes(turn.asked.stream_options) and turn.incoming.path in _PATHS
