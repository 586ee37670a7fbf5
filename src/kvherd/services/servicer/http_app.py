"""The engine's HTTP door: OpenAI's calls, vLLM's tokenizer calls, SGLang's flush, and what it says of itself."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvherd.core.engine.reports import OrderReport
from kvherd.core.errors import FieldInvalid, ModelUnknown, OrderTimedOut
from kvherd.core.ids import OrderId
from kvherd.core.text.calls import CallOptions, ChatCall, CompletionCall
from kvherd.ports.completions import Completions, NativeCompletions, Tokenizer
from kvherd.ports.scheduler import Scheduler
from kvherd.services.servicer.config import ServicerConfig
from kvherd.services.servicer.facts import EngineFacts, rank_state
from kvherd.services.servicer.generations import Generations
from kvherd.services.servicer.grpc_service import checked_timeout, flush_message
from kvherd.services.servicer.http_edge import (
    FrameStream,
    body_within,
    endpoint,
    json_answer,
    new_request_id,
    not_served,
    unless_client_leaves,
)
from kvherd.services.servicer.metrics import CONTENT_TYPE, EngineMetrics
from kvherd.wire.openai.requests import decode_chat, decode_completion
from kvherd.wire.openai.tokens import TokenizeText, decode_detokenize, decode_tokenize
from kvherd.wire.sglang_native import decode_generate

T = TypeVar("T")

LONG_BODY_BYTES = 16 * 2**10
"""A body of this size takes the tokenizer some milliseconds."""


class HttpDoor:
    """The handlers; `app` is the ASGI application."""

    def __init__(
        self,
        *,
        config: ServicerConfig,
        scheduler: Scheduler,
        generations: Generations,
        completions: Completions,
        native: NativeCompletions,
        tokenizer: Tokenizer,
        facts: EngineFacts,
        metrics: EngineMetrics,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._generations = generations
        self._completions = completions
        self._native = native
        self._tokenizer = tokenizer
        self._facts = facts
        self._metrics = metrics

    def app(self) -> Starlette:
        def route(path: str, handler: Callable[[Request], Awaitable[Response]], *methods: str) -> Route:
            made = Route(path, endpoint(handler), methods=list(methods))
            if "POST" in methods and made.methods:
                made.methods.discard("HEAD")  # comes with GET, and a HEAD must order nothing
            return made

        return Starlette(
            exception_handlers={HTTPException: not_served},
            routes=[
                route("/v1/chat/completions", self.chat, "POST"),
                route("/v1/completions", self.text, "POST"),
                route("/generate", self.native, "POST"),
                route("/v1/models", self.models, "GET"),
                route("/tokenize", self.tokenize, "POST"),
                route("/detokenize", self.detokenize, "POST"),
                route("/flush_cache", self.flush, "GET", "POST"),
                route("/health", self.health, "GET"),
                route("/server_info", self.server_info, "GET"),
                route("/get_server_info", self.server_info, "GET"),
                route("/get_model_info", self.model_info, "GET"),
                route("/get_loads", self.loads, "GET"),
                route("/metrics", self.metrics, "GET"),
            ],
        )

    # --- generation ------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        return await self._complete(request, decode_chat(body), size_bytes=len(body))

    async def text(self, request: Request) -> Response:
        body = await self._body(request)
        return await self._complete(request, decode_completion(body), size_bytes=len(body))

    async def _complete(self, request: Request, call: ChatCall | CompletionCall, *, size_bytes: int) -> Response:
        self._check_model(call.options)
        prompts = await _off_the_loop(size_bytes, partial(self._completions.prompt_ids, call))
        name, generate = new_request_id(), self._generations.generate
        if call.options.stream:
            frames = self._completions.stream(call, request=name, generate=generate, prompts=prompts)
            return await _streamed(request, frames)
        return await _whole(request, self._completions.whole(call, request=name, generate=generate, prompts=prompts))

    async def native(self, request: Request) -> Response:
        """SGLang's own form names no model: the one that is served is meant."""
        body = await self._body(request)
        call = decode_generate(body)
        prompts = await _off_the_loop(len(body), partial(self._completions.prompt_ids, call.call))
        name, generate = new_request_id(), self._generations.generate
        if call.call.options.stream:
            return await _streamed(request, self._native.stream(call, request=name, generate=generate, prompts=prompts))
        return await _whole(request, self._native.whole(call, request=name, generate=generate, prompts=prompts))

    def _check_model(self, options: CallOptions) -> None:
        if options.model != self._config.model_name:
            raise ModelUnknown(options.model, (self._config.model_name,))

    # --- tokens ------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        call = decode_tokenize(body)
        token_ids = await _off_the_loop(len(body), partial(self._token_ids, call))
        limit = self._scheduler.ranks[0].max_context_tokens
        return json_answer({"count": len(token_ids), "max_model_len": limit, "tokens": token_ids})

    def _token_ids(self, call: ChatCall | TokenizeText) -> list[int]:
        if isinstance(call, ChatCall):
            text = self._tokenizer.render_chat(call)
            self._tokenizer.check_length(text)
            return self._tokenizer.encode(text)
        self._tokenizer.check_length(call.prompt)
        return self._tokenizer.encode(call.prompt, add_special_tokens=call.add_special_tokens)

    async def detokenize(self, request: Request) -> Response:
        token_ids = decode_detokenize(await self._body(request))
        vocab_size = self._scheduler.ranks[0].vocab_size
        strange = next((token for token in token_ids if token >= vocab_size), None)
        if strange is not None:
            raise FieldInvalid("tokens", f"token {strange} is not in the vocabulary of {vocab_size}")
        return json_answer({"prompt": self._tokenizer.decode(token_ids, skip_special_tokens=False)})

    # --- orders ------------------------------------------------------------------

    async def flush(self, request: Request) -> Response:
        """200 when every rank cleared its cache; 400 when one refused or was still busy at the time's end."""
        timeout_s = _timeout(request, self._config.order_timeout_limit_s)
        hold = request.query_params.get("hold", "false").lower() in ("1", "true")
        await self._body(request)  # means nothing, but what follows it is how a client's leaving is seen
        flush = self._scheduler.flush(timeout_s=timeout_s, hold=hold)
        report = await unless_client_leaves(request.receive, flush)
        answer = {
            "success": report.done,
            "timed_out": bool(report.silent) or any(each.timed_out for each in report.answers),
            "message": flush_message(report),
            "ranks": [
                {"rank": each.rank, "done": each.done, "message": each.message, "cleared_blocks": each.cleared_blocks}
                for each in report.answers
            ]
            + [{"rank": rank, "done": False, "message": "no answer", "cleared_blocks": 0} for rank in report.silent],
        }
        if report.silent:
            return json_answer(answer, 504)
        return json_answer(answer, 200 if report.done else 400)

    # --- what it is and how it does ------------------------------------------------

    async def models(self, request: Request) -> Response:
        card = {
            "id": self._config.model_name,
            "object": "model",
            "created": int(self._facts.started.timestamp()),
            "owned_by": "kvherd",
            "max_model_len": self._scheduler.ranks[0].max_context_tokens,
        }
        return json_answer({"object": "list", "data": [card]})

    async def health(self, request: Request) -> Response:
        failure = self._facts.failure
        if failure is None:
            return json_answer({"status": "ok"})
        return json_answer({"status": "failed", "reason": str(failure)}, 503)

    async def server_info(self, request: Request) -> Response:
        return json_answer(self._facts.server_info(await self._state()))

    async def model_info(self, request: Request) -> Response:
        facts = self._scheduler.ranks[0]
        return json_answer(
            {
                "model_path": self._config.model_path,
                "tokenizer_path": self._config.model_name,
                "served_model_name": self._config.model_name,
                "is_generation": True,
                "max_context_length": facts.max_context_tokens,
                "vocab_size": facts.vocab_size,
            }
        )

    async def loads(self, request: Request) -> Response:
        report = await self._state()
        ranks = [rank_state(each.rank, each.load) for each in report.answers if each.load is not None]
        return json_answer({"loads": ranks})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    # --- shared --------------------------------------------------------------------

    async def _body(self, request: Request) -> bytes:
        return await body_within(request, self._config.body_limit_bytes, within_s=self._config.body_within_s)

    async def _state(self) -> OrderReport:
        """Raises `OrderTimedOut` unless every rank answered."""
        report = await self._scheduler.state()
        if report.silent:
            raise OrderTimedOut(OrderId("state"), tuple(report.silent), 5.0)
        return report


async def _whole(request: Request, work: Awaitable[bytes]) -> Response:
    return Response(await unless_client_leaves(request.receive, work), media_type="application/json")


async def _streamed(request: Request, frames: AsyncGenerator[bytes, None]) -> Response:
    """What can be refused is refused before the first frame, and then it still has a status of its own."""
    first = await unless_client_leaves(request.receive, anext(frames))
    return FrameStream(first, frames)


async def _off_the_loop(size_bytes: int, tokenize: Callable[[], T]) -> T:
    """Tokenize a long text in a thread, so that other requests do not wait for it."""
    return tokenize() if size_bytes < LONG_BODY_BYTES else await asyncio.to_thread(tokenize)


def _timeout(request: Request, limit_s: float) -> float:
    text = request.query_params.get("timeout", "0")
    try:
        timeout_s = float(text)
    except ValueError:
        raise FieldInvalid("timeout", f"{text!r} is not a number of seconds") from None
    return checked_timeout(timeout_s, limit_s)
