"""The engine's HTTP door: OpenAI's calls, vLLM's tokenizer calls, SGLang's flush, and what it says of itself."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from kvherd.core.errors import FieldInvalid, ModelUnknown
from kvherd.core.text.calls import CallOptions, ChatCall, CompletionCall
from kvherd.ports.completions import Completions, NativeCompletions, Tokenizer
from kvherd.ports.scheduler import Scheduler
from kvherd.services.servicer.config import ServicerConfig
from kvherd.services.servicer.facts import EngineFacts, rank_state
from kvherd.services.servicer.generations import Generations
from kvherd.services.servicer.http_edge import (
    FrameStream,
    body_within,
    json_answer,
    new_request_id,
    not_served,
    route,
    unless_client_leaves,
)
from kvherd.services.servicer.operator_door import OperatorDoor
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
        operators: OperatorDoor,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._generations = generations
        self._completions = completions
        self._native = native
        self._tokenizer = tokenizer
        self._facts = facts
        self._operators = operators

    def app(self) -> Starlette:
        return Starlette(
            exception_handlers={HTTPException: not_served},
            routes=[
                route("/v1/chat/completions", self.chat, "POST"),
                route("/v1/completions", self.text, "POST"),
                route("/generate", self.native, "POST"),
                route("/v1/models", self.models, "GET"),
                route("/tokenize", self.tokenize, "POST"),
                route("/detokenize", self.detokenize, "POST"),
                route("/get_model_info", self._operators.guarded(self.model_info), "GET"),
                route("/get_loads", self._operators.guarded(self.loads), "GET"),
                *self._operators.routes(),
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
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return json_answer({"prompt": text, "text": text})  # as vLLM has it, and as SGLang

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
        report = await self._operators.state()
        ranks = [rank_state(each.rank, each.load) for each in report.answers if each.load is not None]
        return json_answer({"loads": ranks})

    # --- shared --------------------------------------------------------------------

    async def _body(self, request: Request) -> bytes:
        return await body_within(request, self._config.body_limit_bytes, within_s=self._config.body_within_s)


async def _whole(request: Request, work: Awaitable[bytes]) -> Response:
    return Response(await unless_client_leaves(request.receive, work), media_type="application/json")


async def _streamed(request: Request, frames: AsyncGenerator[bytes, None]) -> Response:
    """What can be refused is refused before the first frame, and then it still has a status of its own."""
    first = await unless_client_leaves(request.receive, anext(frames))
    return FrameStream(first, frames)


async def _off_the_loop(size_bytes: int, tokenize: Callable[[], T]) -> T:
    """Tokenize a long text in a thread, so that other requests do not wait for it."""
    return tokenize() if size_bytes < LONG_BODY_BYTES else await asyncio.to_thread(tokenize)
