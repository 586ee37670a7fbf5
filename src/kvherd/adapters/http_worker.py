"""An engine worker that speaks HTTP: kvherd's own, vLLM, SGLang, or any OpenAI-compatible server."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, assert_never

from kvherd.adapters.http_connection import NoDescriptor, UpstreamBroken, UpstreamConnection, UpstreamUnreachable
from kvherd.adapters.http_detect import detect
from kvherd.adapters.http_exchange import HttpAnswer, HttpAsker, pool_to
from kvherd.adapters.http_flush import both, flush_by_url, flush_vllm
from kvherd.adapters.http_load import kvherd_load, metrics_load
from kvherd.adapters.http_pool import HttpPool
from kvherd.adapters.http_profile import engine_metrics, start_profile, stop_profile
from kvherd.adapters.http_url import http_address
from kvherd.adapters.tls import ClientTls
from kvherd.adapters.usage_sniffer import TOLD, UsageSniffer
from kvherd.core.errors import (
    OptionInvalid,
    WorkerError,
    WorkerFailed,
    WorkerLocked,
    WorkerRefused,
    WorkerUnreachable,
    WorkerUnsupported,
)
from kvherd.core.fleet.refusals import DescriptorsExhausted, WorkerBusy
from kvherd.core.ids import WorkerId
from kvherd.ports.loop_turn import LoopTurn
from kvherd.ports.worker import (
    Call,
    Flight,
    FlushAnswer,
    InDoubt,
    Landed,
    Opened,
    ProfileAnswer,
    Responder,
    WorkerFacts,
    WorkerKind,
    WorkerLoad,
    not_held,
)
from kvherd.wire.http_chunks import content
from kvherd.wire.http_heads import Header, first, lines, with_more
from kvherd.wire.openai.edits import with_rank
from kvherd.wire.openai.routing import RANK_HEADER

_NOT_FORWARDED: Final = frozenset(
    {
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_BAD_GATEWAY: Final = 502
_BUSY: Final = 503
_ANOTHER_MAY_SERVE: Final = frozenset({_BAD_GATEWAY, _BUSY, 504})
_UNAUTHORIZED: Final = 401
_LONGEST_RETRY_S: Final = 3600
_STATEFUL: Final[tuple[str, ...]] = ("/v1/responses", "/v1/conversations")
_REASON_BYTES: Final = 64 * 1024


class HttpWorker:
    """Implements `ports.worker.Worker` over HTTP/1.1. Raises `OptionInvalid` for a base URL that names no worker.

    With `api_key`, it takes the place of whatever authorization a client sent.
    """

    def __init__(
        self,
        worker: WorkerId,
        base_url: str,
        *,
        api_key: str | None = None,
        pool: HttpPool | None = None,
        tls: ClientTls | None = None,
        turn: LoopTurn | None = None,
    ) -> None:
        self._id = worker
        self._address = http_address(base_url)
        self._pool = pool or pool_to(self._address, tls, turn)
        self._asker = HttpAsker(worker, self._address, self._pool, api_key=api_key)
        self._host_line = b"host: %b\r\n" % self._address.authority.encode()
        self._auth_line = b"authorization: Bearer %b\r\n" % api_key.encode() if api_key else b""
        self._left_out = _NOT_FORWARDED | {b"authorization"} if api_key else _NOT_FORWARDED
        self._facts: WorkerFacts | None = None
        self._begun_method = self._begun_path = ""
        self._begun = b""

    @property
    def id(self) -> WorkerId:
        return self._id

    @property
    def shows_key(self) -> bool:
        """It has a key of ours, in place of the client's."""
        return bool(self._auth_line)

    async def detect(self) -> WorkerFacts:
        self._facts = await detect(self._id, self._asker, self._address)
        return self._facts

    async def forward(self, call: Call, responder: Responder) -> None:
        """An answer of 502, 503 or 504 is raised, since another worker may do better: the first as `WorkerFailed`, for
        it is a proxy's that cannot reach the engine, the second as `WorkerBusy`, the third as `WorkerRefused`; and one
        of 401 as `WorkerLocked`, where it is our key that it does not accept. Any other is the client's, byte for byte.
        """
        call = self._at_rank(call)
        relayed = _Relayed(self, call, responder)
        with self._naming_failures(responder):
            await self._pool.exchange(self._head(call), call.body, relayed, repeatable=relayed.repeatable)
        relayed.finish(self._id)

    def launch(self, call: Call, responder: Responder, landed: Landed) -> Flight | None:
        call = self._at_rank(call)
        relayed = _Relayed(self, call, responder)
        relayed.landed = landed
        relayed.connection = self._pool.begin(self._head(call), call.body, relayed, relayed.over)
        return relayed if relayed.connection is not None else None

    async def again(self, call: Call, responder: Responder) -> None:
        """Once more, where a kept connection had ended before anything came of it; `call` is at its rank already."""
        relayed = _Relayed(self, call, responder)
        with self._naming_failures(responder):
            await self._pool.exchange_anew(self._head(call), call.body, relayed)
        relayed.finish(self._id)

    @contextmanager
    def _naming_failures(self, responder: Responder) -> Iterator[None]:
        try:
            yield
        except NoDescriptor:
            raise DescriptorsExhausted from None
        except UpstreamUnreachable as unreachable:
            raise WorkerUnreachable(self._id, str(unreachable)) from None
        except UpstreamBroken as broken:
            raise self.failure(broken, responder) from None

    def failure(self, broken: UpstreamBroken, responder: Responder) -> WorkerFailed:
        """What became of an answer, once its client was told, if it had begun."""
        failed = WorkerFailed(self._id, broken.reason)
        if responder.started:
            responder.fail(str(failed))
        return failed

    async def probe(self) -> None:
        answer = await self._asker.ask("GET", "/health")
        if answer.status == 404:
            answer = await self._asker.ask("GET", "/v1/models")
        if not answer.ok:
            raise WorkerRefused(self._id, f"it is not healthy (HTTP {answer.status}): {answer.reason()}")

    async def load(self) -> WorkerLoad:
        facts = self._facts or await self.detect()
        match facts.kind:
            case WorkerKind.KVHERD_HTTP:
                return kvherd_load(await self._asked("/get_loads"))
            case WorkerKind.VLLM_HTTP | WorkerKind.SGLANG_HTTP:
                return metrics_load(await self._asked("/metrics"), facts)
            case _:
                raise WorkerUnsupported(self._id, "telling its load")

    async def tokenize(self, body: bytes) -> list[int]:
        answer = await self._asker.ask("POST", "/tokenize", body=body)
        if answer.status in (404, 405):
            raise WorkerUnsupported(self._id, "telling its tokens (it has no /tokenize)")
        tokens = answer.document().get("tokens")
        if not answer.ok or not isinstance(tokens, list) or not all(isinstance(one, int) for one in tokens):
            raise WorkerRefused(self._id, f"POST /tokenize gave HTTP {answer.status}: {answer.reason()}")
        return tokens

    async def flush(
        self, *, timeout_s: float, hold: bool = False, opened: Opened | None = None, in_doubt: InDoubt | None = None
    ) -> FlushAnswer:
        """vLLM cannot wait until it is idle: it is asked again and again until the deadline. kvherd's own engine takes
        back the order of a caller who left, and tells its clear at once; neither of the others does.
        """
        facts = self._facts or await self.detect()
        match facts.kind:
            case WorkerKind.KVHERD_HTTP:
                return await flush_by_url(self._id, self._asker, timeout_s=timeout_s, hold=hold, opened=opened)
            case WorkerKind.SGLANG_HTTP:
                sent = both(opened, in_doubt)
                answer = await flush_by_url(self._id, self._asker, timeout_s=timeout_s, opened=sent)
                return not_held(answer) if hold else answer
            case WorkerKind.VLLM_HTTP:
                answer = await flush_vllm(self._id, self._asker, timeout_s=timeout_s, opened=opened, in_doubt=in_doubt)
                return not_held(answer) if hold else answer
            case WorkerKind.OPENAI_HTTP:
                raise WorkerUnsupported(self._id, "flush (it is neither kvherd, vLLM nor SGLang)")
            case (
                WorkerKind.SGLANG_GRPC | WorkerKind.VLLM_GRPC | WorkerKind.TRTLLM_GRPC | WorkerKind.MLX_GRPC
            ):  # pragma: no cover - no HTTP worker is detected as one
                raise WorkerUnsupported(self._id, "flush")
            case _:
                assert_never(facts.kind)

    async def start_profile(self, fields: Mapping[str, object]) -> ProfileAnswer:
        facts = self._facts or await self.detect()
        return await start_profile(self._id, self._asker, facts.kind, fields, version=facts.version)

    async def stop_profile(self) -> ProfileAnswer:
        return await stop_profile(self._id, self._asker)

    async def metrics(self) -> bytes:
        return await engine_metrics(self._id, self._asker)

    def place_sidecar(self, url: str | None) -> None:
        if url is not None:
            raise OptionInvalid("labels.sidecar", f"{self._id} answers by HTTP itself; only workers on gRPC have one")

    async def close(self) -> None:
        await self._pool.close()

    async def _asked(self, path: str) -> HttpAnswer:
        answer = await self._asker.ask("GET", path)
        if not answer.ok:
            raise WorkerRefused(self._id, f"GET {path} gave HTTP {answer.status}: {answer.reason()}")
        return answer

    def _at_rank(self, call: Call) -> Call:
        """vLLM takes the rank from a header, SGLang and kvherd from the body."""
        if call.rank is None:
            return call
        if self._facts is not None and self._facts.kind is WorkerKind.VLLM_HTTP:
            return call.changed(headers=[*call.headers, (RANK_HEADER, b"%d" % call.rank)])
        return call.changed(body=with_rank(call.body, call.rank))

    def _head(self, call: Call) -> bytes:
        method, path = call.method, call.path
        if path != self._begun_path or method != self._begun_method:  # nearly always it is the same again
            self._begun_method, self._begun_path = method, path
            first_line = f"{method} {self._address.prefix}{path} HTTP/1.1\r\n".encode("latin-1")
            self._begun = first_line + self._host_line
        told = lines(call.headers, self._left_out)
        return b"%b%bcontent-length: %d\r\n%b\r\n" % (self._begun, told, len(call.body), self._auth_line)


class _Relayed:
    """An answer on its way to the client: a sink of the pool, and a flight where it was launched."""

    __slots__ = (
        "_call",
        "_passes",
        "_refusal",
        "_refused_status",
        "_responder",
        "_retry_after",
        "_sniffer",
        "_waits_for_first",
        "_worker",
        "connection",
        "landed",
    )

    landed: Landed

    def __init__(self, worker: HttpWorker, call: Call, responder: Responder) -> None:
        self._worker = worker
        self._call = call
        self._responder = responder
        self._refused_status = 0
        self._refusal = b""
        self._retry_after = b""
        self._sniffer: UsageSniffer | None = None
        self._waits_for_first = False
        self._passes = False
        self.connection: UpstreamConnection | None = None

    @property
    def repeatable(self) -> bool:
        return self._call.method == "GET" or not self._call.path.startswith(_STATEFUL)

    def cancel(self) -> None:
        if self.connection is not None:
            self.connection.cancel()
            self.connection = None

    def over(self, outcome: Exception | None) -> None:
        """The exchange of a launched request has ended."""
        self.connection = None
        if outcome is None:
            try:
                self.finish(self._worker.id)
            except WorkerError as error:
                outcome = error
        elif isinstance(outcome, UpstreamBroken):
            if outcome.unsent or (outcome.stale and self.repeatable):
                self.landed(self._worker.again(self._call, self._responder))
                return
            outcome = self._worker.failure(outcome, self._responder)
        self.landed(outcome)

    def head(self, status: int, headers: Sequence[Header]) -> None:
        if status in _ANOTHER_MAY_SERVE or (status == _UNAUTHORIZED and self._worker.shows_key):
            self._refused_status = status
            self._retry_after = first(headers, b"retry-after") or b""
            return
        call = self._call
        if status == 200:
            self._waits_for_first = call.news is not None
            if call.news is not None:
                kind = first(headers, b"content-type") or b""
                self._sniffer = UsageSniffer(stream=kind.startswith(b"text/event-stream"))
        if call.extra_headers:
            headers = with_more(headers, call.extra_headers)
        self._responder.start(status, headers)

    def body(self, data: bytes) -> None:
        if self._refused_status:
            if len(self._refusal) < _REASON_BYTES:
                self._refusal += data
            return
        if self._waits_for_first and self._call.news is not None:
            self._waits_for_first = False
            self._call.news.first_token()
        sniffer = self._sniffer
        if sniffer is not None:
            sniffer.feed(data)
        self._passes = sniffer is None or sniffer.between_events
        self._responder.write(data)

    def events(self, chunk: bytes) -> None:
        if not self._passes:
            self.body(content(chunk))
            return
        if chunk.rfind(TOLD) >= 0 and self._sniffer is not None:
            self._sniffer.feed(content(chunk))
        self._responder.write_chunk(chunk)

    def when_settled(self, then: Callable[[], None]) -> None:
        self._responder.when_drained(then)

    def finish(self, worker: WorkerId) -> None:
        if self._refused_status:
            answer = HttpAnswer(self._refused_status, self._refusal)
            reason = f"HTTP {answer.status}: {answer.reason()}"
            raise self._refused(worker, reason)
        if self._sniffer is not None and self._call.news is not None:
            usage = self._sniffer.usage()
            if usage is not None:
                self._call.news.usage(usage)
        self._responder.end()

    def _refused(self, worker: WorkerId, reason: str) -> WorkerError:
        if self._refused_status == _BAD_GATEWAY:
            return WorkerFailed(worker, reason)
        if self._refused_status == _UNAUTHORIZED:
            return WorkerLocked(worker, _UNAUTHORIZED, shown=True)
        if self._refused_status != _BUSY:
            return WorkerRefused(worker, reason)
        told = self._retry_after.strip()  # a date is left out
        after_s = int(told) if told.isdigit() and len(told) < 9 else 1
        return WorkerBusy(worker, reason, min(after_s, _LONGEST_RETRY_S))
