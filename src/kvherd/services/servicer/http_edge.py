"""The edge of the HTTP server: bodies in with a limit, errors out with their status, clients that leave noticed."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvherd.core.errors import BodyTooLarge, CallerTooSlow, EngineError
from kvherd.core.ids import RequestId
from kvherd.wire.openai.errors import error_body

log = logging.getLogger(__name__)

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]

REQUEST_ID_HEADER = "x-request-id"
RETRY_AFTER_S = 5


class ClientLeft(Exception):
    """Nobody reads the answer any more."""


async def body_within(request: Request, limit_bytes: int, *, within_s: float) -> bytes:
    """The whole body. Raises `BodyTooLarge` as soon as it is, `CallerTooSlow`, or `ClientLeft`."""
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit_bytes:
        raise BodyTooLarge(limit_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for piece in request.stream():
                body += piece
                if len(body) > limit_bytes:
                    raise BodyTooLarge(limit_bytes)
    except TimeoutError:
        raise CallerTooSlow("body", within_s) from None
    except ClientDisconnect:
        raise ClientLeft from None
    return bytes(body)


def new_request_id() -> RequestId:
    """A name for a generation. Never the caller's own: he may use one X-Request-Id for several tries at once."""
    return RequestId(uuid.uuid4().hex)


async def not_served(request: Request, error: Exception) -> Response:
    """The answer for a path or a method that is not served."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = f"{request.method} {request.url.path} is not served here"
    fields = {"message": message, "type": "invalid_request_error", "param": None, "code": "not_served"}
    return JSONResponse({"error": fields}, status, headers=getattr(error, "headers", None))


def refusal(error: Exception) -> Response:
    """The answer that says what went wrong."""
    status, body = error_body(error)
    headers = {"retry-after": str(RETRY_AFTER_S)} if isinstance(error, EngineError) and status == 503 else None
    return Response(body, status, headers, "application/json")


def endpoint(handler: Endpoint) -> Endpoint:
    """Make a handler that raises into one that answers."""

    async def guarded(request: Request) -> Response:
        try:
            answer = await handler(request)
        except ClientLeft:
            return Response(status_code=499)
        except Exception as error:  # the process boundary: whatever it was, the client gets a status
            answer = refusal(error)
            if answer.status_code == 500:
                log.exception("%s failed unforeseen", request.url.path)
        if REQUEST_ID_HEADER in request.headers:
            answer.headers[REQUEST_ID_HEADER] = request.headers[REQUEST_ID_HEADER]
        return answer

    return guarded


def route(path: str, handler: Endpoint, *methods: str) -> Route:
    made = Route(path, endpoint(handler), methods=list(methods))
    if "POST" in methods and made.methods:
        made.methods.discard("HEAD")  # comes with GET, and a HEAD must order nothing
    return made


def json_answer(content: object, status: int = 200) -> Response:
    return JSONResponse(content, status)


async def unless_client_leaves(receive: Receive, work: Awaitable[T]) -> T:
    """Run `work` to its end; cancel it and raise `ClientLeft` if the client goes before. The body must be read."""
    async with asyncio.TaskGroup() as group:
        working = group.create_task(_outcome(work))
        leaving = group.create_task(_client_left(receive))
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        working.cancel()
    if working.cancelled():
        raise ClientLeft
    outcome = working.result()
    if isinstance(outcome, _Raised):
        raise outcome.error
    return outcome


class _Raised:
    def __init__(self, error: Exception) -> None:
        self.error = error


async def _outcome(work: Awaitable[T]) -> T | _Raised:
    try:
        return await work
    except Exception as error:  # noqa: BLE001 - raised again by whoever waits; a group would wrap it
        return _Raised(error)


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class FrameStream(Response):
    """SSE frames as they come. The first was made before the status was decided; closing the frames aborts the work."""

    def __init__(self, first: bytes, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._first = first
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_client_leaves(receive, self._send_all(send))
        except ClientLeft:
            log.info("the client of a stream left; its generation was aborted")

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._frames) as frames:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
