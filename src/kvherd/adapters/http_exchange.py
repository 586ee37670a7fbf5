"""Small requests to a worker and their whole answers, with the worker's errors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kvherd.adapters.http_connection import NoDescriptor, UpstreamBroken, UpstreamUnreachable
from kvherd.adapters.http_pool import HttpPool
from kvherd.adapters.http_url import HttpAddress
from kvherd.adapters.tls import ClientTls, trusting_this_machine
from kvherd.core.errors import WorkerFailed, WorkerUnreachable
from kvherd.core.ids import WorkerId
from kvherd.ports.loop_turn import LoopTurn
from kvherd.wire.http_chunks import content
from kvherd.wire.http_heads import Header

ANSWER_BYTES: Final = 16 * 1024 * 1024
_REASON_CHARACTERS: Final = 300


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: int
    body: bytes

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def document(self) -> Mapping[str, Any]:
        """The JSON object of the body; empty if it is none."""
        try:
            value = msgspec.json.decode(self.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def document_if_ok(self) -> Mapping[str, Any]:
        return self.document() if self.ok else {}

    def reason(self) -> str:
        """The worker's own words, on one line."""
        document = self.document()
        error = document.get("error", document.get("detail", document.get("message")))
        if isinstance(error, dict):
            error = error.get("message")
        words = error if isinstance(error, str) else self.body.decode("utf-8", "replace")
        words = " ".join(words.split())[:_REASON_CHARACTERS]
        return words or f"HTTP {self.status} without a word"


class AnswerTooLarge(Exception):
    pass


class _Kept:
    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self.status = 0
        self._parts: list[bytes] = []
        self._size_bytes = 0

    def head(self, status: int, _headers: Sequence[Header]) -> None:
        self.status = status

    def body(self, data: bytes) -> None:
        self._size_bytes += len(data)
        if self._size_bytes > self._limit:
            raise AnswerTooLarge
        self._parts.append(data)

    def events(self, chunk: bytes) -> None:
        self.body(content(chunk))

    def when_settled(self, then: Callable[[], None]) -> None:
        then()

    def answer(self) -> HttpAnswer:
        return HttpAnswer(self.status, b"".join(self._parts))


class HttpAsker:
    """Asks one worker. Raises `WorkerUnreachable` and `WorkerFailed`; any status is an answer. Deadlines are the
    caller's. Waits for no connection: behind as many streams as may be, no probe would find that the worker is well.
    """

    def __init__(
        self,
        worker: WorkerId,
        address: HttpAddress,
        pool: HttpPool,
        *,
        api_key: str | None,
        limit_bytes: int = ANSWER_BYTES,
    ) -> None:
        self._worker = worker
        self._address = address
        self._pool = pool
        self._limit = limit_bytes
        self._auth = f"authorization: Bearer {api_key}\r\n" if api_key else ""

    @property
    def has_key(self) -> bool:
        return bool(self._auth)

    async def ask(
        self, method: str, path: str, *, body: bytes = b"", sent: Callable[[], None] | None = None
    ) -> HttpAnswer:
        """`body` is JSON, if there is any."""
        length = "" if method == "GET" else f"content-length: {len(body)}\r\n"
        if body:
            length += "content-type: application/json\r\n"
        head = (
            f"{method} {self._address.prefix}{path} HTTP/1.1\r\nhost: {self._address.authority}\r\n"
            f"accept: */*\r\nuser-agent: kvherd\r\n{self._auth}{length}\r\n"
        ).encode("latin-1")
        sink = _Kept(self._limit)
        try:
            await self._pool.exchange(head, body, sink, repeatable=method == "GET", sent=sent, waits=False)
        except NoDescriptor as short:
            raise WorkerFailed(self._worker, str(short)) from None
        except UpstreamUnreachable as unreachable:
            raise WorkerUnreachable(self._worker, str(unreachable)) from None
        except UpstreamBroken as broken:
            raise WorkerFailed(self._worker, broken.reason) from None
        except AnswerTooLarge:
            raise WorkerFailed(self._worker, f"its answer to {path} is larger than {self._limit} bytes") from None
        return sink.answer()


def pool_to(address: HttpAddress, tls: ClientTls | None, turn: LoopTurn | None = None) -> HttpPool:
    """Over TLS where the address says so; `tls` None: trusting whom this machine trusts."""
    secured = (tls or trusting_this_machine()) if address.tls else None
    return HttpPool(address.host, address.port, tls=secured, turn=turn)
