"""A small bridge from one relayed request to an ASGI 3 application (scope `http` only)."""

from collections.abc import Awaitable, Callable
from urllib.parse import unquote

from kvherd.services.gateway.relay.edge import AsgiApp, DataRequest, Message
from kvherd.services.gateway.relay.identity import Headers, forwarded
from kvherd.services.gateway.relay.responder import ConnectionResponder

Wait = Callable[[], Awaitable[None]]


async def answer_with_app(
    app: AsgiApp,
    request: DataRequest,
    responder: ConnectionResponder,
    *,
    http10: bool,
    secured: bool,
    server: str,
    gone: Wait,
) -> None:
    """Run the application for one request. `gone` waits until the client has left.

    The application learns of that by `http.disconnect`; it is not cancelled, since an order to the fleet that has
    begun should end in a known state.
    """
    body_given = False

    async def receive() -> Message:
        nonlocal body_given
        if not body_given:
            body_given = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        if not responder.ended:
            await gone()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            responder.start(message["status"], list(message.get("headers", ())))
            return
        responder.write(message.get("body", b""))
        if message.get("more_body", False):
            await responder.drain()
        else:
            responder.end()

    await app(_scope(request, http10=http10, secured=secured, server=server), receive, send)


def _scope(request: DataRequest, *, http10: bool, secured: bool, server: str) -> Message:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.0" if http10 else "1.1",
        "method": request.method,
        "scheme": "https" if secured else "http",
        "path": unquote(request.path),
        "raw_path": request.path.encode("latin-1"),
        "query_string": request.query.encode("latin-1"),
        "root_path": "",
        "headers": _as_sent(request, secured=secured),
        "client": _host_and_port(request.peer),
        "server": _host_and_port(server),
        "state": {},
    }


def _as_sent(request: DataRequest, *, secured: bool) -> Headers:
    """Without what was added on the way for workers: whether the client said it itself is worth knowing."""
    headers = list(request.headers)
    for added in forwarded(request.peer, secured=secured):
        at = next((at for at in range(len(headers) - 1, -1, -1) if headers[at] == added), None)
        if at is not None:
            del headers[at]
    return headers


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
