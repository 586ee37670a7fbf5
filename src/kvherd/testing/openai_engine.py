"""A server that answers what the embedded engine cannot: embeddings, tool calls, forms, stored responses. By hand, and
over real sockets.
"""

import asyncio
import base64
import itertools
import struct
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import msgspec

from kvherd.testing.raw_http import SSE_HEAD, RawRequest, RawServer, chunk, json_answer

_counted = itertools.count(1)
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}


@dataclass
class OpenAiEngine:
    """`fails`: statuses, with which the next requests are answered in OpenAI's shape. `cuts`: how many of the next
    requests it answers by closing the connection. `holds`: it says nothing more after the first event of a stream, and
    nothing at all to what does not stream. `deserted` counts those who left meanwhile.
    """

    fails: list[int] = field(default_factory=list)
    cuts: int = 0
    holds: bool = False
    deserted: int = 0
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    server: RawServer = field(init=False)

    def __post_init__(self) -> None:
        self.server = RawServer(self._answer)

    async def __aenter__(self) -> Self:
        await self.server.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.server.__aexit__(kind, error, trace)

    @property
    def url(self) -> str:
        return self.server.url

    def asked(self, method: str, path: str) -> list[RawRequest]:
        """The requests of this kind that came."""
        return [one for one in self.server.requests if (one.method, one.target) == (method, path)]

    async def _answer(self, request: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        match request.method, request.target:
            case "GET", "/v1/models":
                writer.write(json_answer(b'{"object": "list", "data": [{"id": "m", "object": "model"}]}'))
            case "GET", "/health":
                writer.write(json_answer(b"{}"))
            case _ if self.cuts and request.method == "POST":
                self.cuts -= 1
                writer.close()
            case _ if self.fails and request.method == "POST":
                writer.write(_error(self.fails.pop(0), "the engine's own word"))
            case "POST", "/v1/embeddings":
                writer.write(_json(_embeddings(_body(request))))
            case "POST", "/v1/chat/completions":
                await self._chat(_body(request), reader, writer)
            case "POST", "/v1/responses":
                await self._respond(_body(request), reader, writer)
            case "POST", "/v1/conversations":
                writer.write(_json(self._keep("conv", {"object": "conversation", "created_at": 1, "metadata": {}})))
            case method, path if path.startswith(("/v1/responses/", "/v1/conversations/")):
                writer.write(self._kept(method, path))
            case _:
                writer.write(_error(404, f"{request.method} {request.target} is not here"))

    async def _chat(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": "hello"}
        if body.get("tools") and body["messages"][-1]["role"] != "tool":
            message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        elif body.get("response_format"):
            message["content"] = '{"city": "Ulm", "degrees": 7}'
        why = "tool_calls" if "tool_calls" in message else "stop"
        head = {"id": "chatcmpl-1", "created": 1, "model": "m"}
        if not body.get("stream"):
            if self.holds:
                await self._hold(reader)
            choice = {"index": 0, "message": message, "finish_reason": why}
            writer.write(_json(head | {"object": "chat.completion", "choices": [choice]}))
            return
        head["object"] = "chat.completion.chunk"
        deltas = _pieces(message)
        events = [head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        events.append(head | {"choices": [{"index": 0, "delta": {}, "finish_reason": why}]})
        await self._stream([b"data: %b\n\n" % msgspec.json.encode(event) for event in events], reader, writer, end=True)

    async def _respond(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        past, conversation = body.get("previous_response_id"), body.get("conversation")
        for name in (past, conversation):
            if name and name not in self.kept:
                writer.write(_error(404, f"{name} is not here"))
                return
        answer = {"object": "response", "created_at": 1, "status": "completed", "model": "m", "output": []}
        answer |= {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "previous_response_id": past}
        answer = self._keep("resp", answer)
        if not body.get("stream"):
            writer.write(_json(answer))
            return
        kinds = ("response.created", "response.completed")
        events = [{"type": kind, "sequence_number": at, "response": answer} for at, kind in enumerate(kinds)]
        frames = [b"event: %b\ndata: %b\n\n" % (one["type"].encode(), msgspec.json.encode(one)) for one in events]  # type: ignore[attr-defined]
        await self._stream(frames, reader, writer, end=False)

    async def _stream(
        self, frames: list[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, end: bool
    ) -> None:
        writer.write(SSE_HEAD + chunk(frames[0]))
        if self.holds:
            await self._hold(reader)
        for frame in frames[1:]:
            writer.write(chunk(frame))
        writer.write((chunk(b"data: [DONE]\n\n") if end else b"") + chunk(b""))

    async def _hold(self, reader: asyncio.StreamReader) -> None:
        try:
            await reader.readexactly(1)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.deserted += 1
            raise

    def _keep(self, prefix: str, what: dict[str, Any]) -> dict[str, Any]:
        name = f"{prefix}_{next(_counted)}"
        self.kept[name] = {"id": name} | what
        return self.kept[name]

    def _kept(self, method: str, path: str) -> bytes:
        name, _, what = path.split("/", 3)[3].partition("/")
        if name not in self.kept:
            return _error(404, f"{name} is not here")
        if method == "DELETE":
            del self.kept[name]
            return _json({"id": name, "object": "response", "deleted": True})
        if what in ("input_items", "items"):
            return _json({"object": "list", "data": [], "has_more": False, "first_id": "", "last_id": ""})
        return _json(self.kept[name] | ({"status": "cancelled"} if what == "cancel" else {}))


def _body(request: RawRequest) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(request.body)
    return body


def _json(document: object) -> bytes:
    return json_answer(msgspec.json.encode(document))


def _error(status: int, message: str) -> bytes:
    error = {"message": message, "type": "engine_error", "param": "x", "code": "engine"}
    return json_answer(msgspec.json.encode({"error": error}), f"{status} Some")


def _embeddings(body: dict[str, Any]) -> dict[str, Any]:
    """Of a text, how long it is; the client asks for them packed."""
    given = body["input"] if isinstance(body["input"], list) else [body["input"]]
    vectors = [[float(len(one)), 0.5] for one in given]
    packed = body.get("encoding_format") == "base64"
    data = [
        {"object": "embedding", "index": at, "embedding": _packed(vector) if packed else vector}
        for at, vector in enumerate(vectors)
    ]
    return {"object": "list", "model": "m", "data": data, "usage": {"prompt_tokens": 1, "total_tokens": 1}}


def _packed(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _pieces(message: dict[str, Any]) -> list[dict[str, Any]]:
    if "tool_calls" not in message:
        return [{"role": "assistant", "content": ""}, *({"content": letter} for letter in message["content"])]
    call = CALL | {"index": 0, "function": {"name": "weather", "arguments": ""}}
    arguments = '{"city": "Ulm"}'
    more = [{"tool_calls": [{"index": 0, "function": {"arguments": letter}}]} for letter in arguments]
    return [{"role": "assistant", "content": None, "tool_calls": [call]}, *more]
