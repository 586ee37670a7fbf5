"""The data path of a gRPC worker: HTTP bodies in, tokens over the wire, HTTP answers out."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import grpc.aio
import msgspec

from kvherd.adapters.completions import OpenAiCompletions, StreamedAnswer
from kvherd.adapters.generate_dialects import SGLANG_GENERATE, GenerateDialect
from kvherd.adapters.grpc_channel import rpc_errors
from kvherd.adapters.grpc_receivers import Pulled, Pushed, Reader
from kvherd.adapters.grpc_stream import Receiver, WireStream
from kvherd.adapters.grpc_wires import GrpcWires
from kvherd.adapters.native_completions import NativeCompletions
from kvherd.adapters.tokenizer import ModelTokenizer
from kvherd.core.engine.generation import GenerationRequest, TokenDelta
from kvherd.core.errors import (
    FieldInvalid,
    FrameInvalid,
    KvherdError,
    WorkerFailed,
    WorkerUnreachable,
    WorkerUnsupported,
)
from kvherd.core.fleet.refusals import DeadlinePassed
from kvherd.core.ids import Rank, WorkerId
from kvherd.core.text.calls import ChatCall, CompletionCall
from kvherd.ports.worker import Call, Responder
from kvherd.wire.long_lists import decode_long_completion, decode_long_generate
from kvherd.wire.openai.requests import decode_chat, decode_completion
from kvherd.wire.openai.tokens import TokenizeText, decode_detokenize, decode_tokenize
from kvherd.wire.sglang_native import decode_generate
from kvherd.wire.status import worker_error
from kvherd.wire.usual_chunk import UsualChunks

_T = TypeVar("_T")
_Out_co = TypeVar("_Out_co", covariant=True)
Answer = Callable[[Call, Responder], Awaitable[None]]
Ends = tuple[float, float] | None
"""As in a `Call`."""

_JSON = [(b"content-type", b"application/json")]
_CLOCKS_DIFFER_S = 0.1
_MANY_TOKENS = 4096
"""The text of so many takes a millisecond or more, for which others should not wait."""
_LONG_BODY_BYTES = 256 * 1024
"""Reading it takes 10 ms or more."""
_LONG_TEXT_BYTES = 32 * 1024
"""Making tokens of it does."""
_LONGEST_S = 1e8
_EVENT_STREAM = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What the worker says of its model. `takes_custom_params`: it honours the cache salt and the seed."""

    name: str
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    takes_custom_params: bool


class GrpcGenerations:
    def __init__(
        self,
        worker: WorkerId,
        channel: grpc.aio.Channel,
        tokenizer: ModelTokenizer,
        traits: ModelTraits,
        *,
        wires: GrpcWires | None = None,
        dialect: GenerateDialect = SGLANG_GENERATE,
    ) -> None:
        """With `wires` generations take these, which costs a fraction; the channel is for those that have none."""
        self._worker = worker
        self._wires = wires
        self._dialect = dialect
        self._stub = dialect.stub(channel)
        self._tokenizer = tokenizer
        self._traits = traits
        self._completions = OpenAiCompletions(
            tokenizer, traits.name, traits.max_context_tokens, vocab_size=traits.vocab_size
        )
        self._native = NativeCompletions(self._completions)
        self._answers: dict[str, Answer] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._text,
            "/generate": self._generate_natively,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }

    async def answer(self, call: Call, responder: Responder) -> None:
        """As `Worker.forward`. Also raises a `CallerError`, before the answer has started."""
        path = call.path.partition("?")[0]
        answer = self._answers.get(path)
        if answer is None or call.method != "POST":
            raise WorkerUnsupported(self._worker, f"{call.method} {path} over gRPC")
        await answer(call, responder)

    async def generate(self, request: GenerationRequest, ends: Ends = None) -> AsyncGenerator[TokenDelta, None]:
        """Implements `ports.completions.Generate`. Closing it cancels the call, which aborts it on the engine."""
        reader, _ = self._reader(request)
        if self._wires is not None:
            async with aclosing(self._pull(self._wires, request, reader, ends)) as deltas:
                async for delta in deltas:
                    yield delta
            return
        with rpc_errors(self._worker, "Generate"):
            call = self._stub.Generate(self._dialect.encode(request), timeout=_left_s(ends))
            try:
                async for response in call:
                    delta = reader.decode(response.SerializeToString())
                    yield delta
                    if delta.finish is not None:
                        return
            except FrameInvalid as error:
                raise WorkerFailed(self._worker, str(error)) from error
            except grpc.aio.AioRpcError as error:
                raise self._failure(error.code().name, error.details() or "", ends) from error
            finally:
                call.cancel()
        raise self._failure("OK", "", ends)

    def _generate_for(self, call: Call) -> Callable[[GenerationRequest], AsyncGenerator[TokenDelta, None]]:
        return lambda request: self.generate(_at_rank(request, call.rank), call.ends)

    def _reader(self, request: GenerationRequest) -> tuple[Reader, frozenset[int]]:
        """Of its responses, and the tokens that end it. Raises `WorkerUnsupported` for what this worker would drop."""
        if request.cache_salt and not self._traits.takes_custom_params:
            # dropped silently, it would share what the caller wants kept apart
            raise WorkerUnsupported(self._worker, "cache_salt")
        if request.lora and not self._dialect.takes_adapters:
            raise WorkerUnsupported(self._worker, "LoRA adapters over gRPC")
        eos = () if request.limits.ignore_eos else self._traits.eos_token_ids
        ending = frozenset((*request.limits.stop_token_ids, *eos))
        return self._dialect.reader(request, ending), ending

    async def _open(self, wires: GrpcWires, request: GenerationRequest, receiver: Receiver, ends: Ends) -> WireStream:
        data, ends_s = self._dialect.encode(request).SerializeToString(), None if ends is None else ends[0]
        try:
            return await wires.call(self._dialect.path, data, receiver, ends_s=ends_s)
        except OSError as error:
            raise WorkerUnreachable(self._worker, str(error)) from error

    async def _pull(
        self, wires: GrpcWires, request: GenerationRequest, reader: Reader, ends: Ends
    ) -> AsyncGenerator[TokenDelta, None]:
        pulled = Pulled()
        stream = pulled.stream = await self._open(wires, request, pulled, ends)
        complete = False
        try:
            while (data := await pulled.next()) is not None:
                delta = reader.decode(data)
                complete = delta.finish is not None
                yield delta
                if complete:
                    return
        except FrameInvalid as error:
            raise WorkerFailed(self._worker, str(error)) from error
        finally:
            stream.leave() if complete else stream.cancel()
        raise self._failure(*(pulled.status or ("OK", "")), ends)

    async def _push(self, wires: GrpcWires, answer: StreamedAnswer, call: Call, responder: Responder) -> None:
        """As `answer`, for one generation that streams."""
        request = _at_rank(answer.plan.runs[0].request, call.rank)
        head = [*_EVENT_STREAM, *_extra(call)]
        reader, ending = self._reader(request)
        texts = self._tokenizer.token_texts.get(answer.plan.skips_special_tokens)
        pushed = Pushed(
            reader,
            answer,
            responder,
            chunks=UsualChunks(request.request, ending),
            texts=texts if self._dialect.usual_chunks else None,
            head=head,
            on_first_token=call.on_first_token,
        )
        stream = pushed.stream = await self._open(wires, request, pushed, call.ends)
        try:
            await pushed.run()
        finally:
            stream.leave() if pushed.complete else stream.cancel()
        if pushed.finished:
            if call.on_usage is not None:
                call.on_usage(answer.plan.usage())
            responder.write(answer.end())
            return responder.end()
        failure = self._failure(*(pushed.status or ("OK", "")), call.ends)
        if not responder.started:
            raise failure
        return self._break_off(failure, responder)

    def _failure(self, status: str, words: str, ends: Ends) -> KvherdError:
        """Why a generation ended before it was complete."""
        match status:
            case "OK":
                return WorkerFailed(self._worker, "its stream ended without a finish")
            case "INVALID_ARGUMENT":
                return FieldInvalid("request", words or "the worker says that it is not valid")
            case "DEADLINE_EXCEEDED" if ends is not None and _now_s() > ends[0] - _CLOCKS_DIFFER_S:
                return DeadlinePassed(ends[1])  # the engine did as it was told, maybe a moment before we look
            case _:
                return worker_error(self._worker, status, words, what="Generate", after_s=None)

    def _break_off(self, failure: KvherdError, responder: Responder) -> None:
        """Tell the client of an answer that began, and raise it for the worker's health."""
        if isinstance(failure, DeadlinePassed):
            raise failure
        broken = WorkerFailed(self._worker, getattr(failure, "reason", str(failure)))
        responder.fail(str(broken))
        raise broken from failure

    # --- one method a path ------------------------------------------------------------------------------------

    async def _chat(self, call: Call, responder: Responder) -> None:
        chat = await self._decoded(call.body, decode_chat)
        await self._openai(chat, call, responder, brought=True)

    async def _text(self, call: Call, responder: Responder) -> None:
        text = await self._decoded(call.body, decode_completion, decode_long_completion)
        # token ids of the caller's own are the prompt, and checked as such
        brought = len(text.prompts) == 1 and isinstance(text.prompts[0], str)
        await self._openai(text, call, responder, brought=brought)

    async def _openai(
        self, openai: ChatCall | CompletionCall, call: Call, responder: Responder, *, brought: bool
    ) -> None:
        given = [list(call.prompt_token_ids)] if brought and call.prompt_token_ids and self._made(call) else None
        prompts = given or await self._long_prompts(openai, call)
        watch = _Watch(self._generate_for(call), call.on_first_token)
        completions, request, on_usage = self._completions, call.request, call.on_usage
        if openai.options.stream and self._wires is not None:
            answer = completions.streamed(openai, request=request, prompts=prompts)
            if len(answer.plan.runs) == 1:
                return await self._push(self._wires, answer, call, responder)
        if openai.options.stream:
            frames = completions.stream(
                openai, request=request, generate=watch.generate, prompts=prompts, on_usage=on_usage
            )
            return await self._stream(frames, watch, call, responder)
        body = await completions.whole(
            openai, request=request, generate=watch.generate, prompts=prompts, on_usage=on_usage
        )
        return _send(call, responder, body)

    def _made(self, call: Call) -> bool:
        """Whether its tokens are such as this worker's tokenizer makes: of two that say the same there is only one."""
        return call.tokenizer is None or call.tokenizer is self._tokenizer

    async def _generate_natively(self, call: Call, responder: Responder) -> None:
        native = await self._decoded(call.body, decode_generate, decode_long_generate)
        prompts = await self._long_prompts(native.call, call)
        watch = _Watch(self._generate_for(call), call.on_first_token)
        request, on_usage = call.request, call.on_usage
        if native.call.options.stream:
            frames = self._native.stream(
                native, request=request, generate=watch.generate, prompts=prompts, on_usage=on_usage
            )
            return await self._stream(frames, watch, call, responder)
        body = await self._native.whole(
            native, request=request, generate=watch.generate, prompts=prompts, on_usage=on_usage
        )
        return _send(call, responder, body)

    async def _decoded(
        self, body: bytes, decode: Callable[[bytes], _T], decode_long: "_DecodeLong[_T] | None" = None
    ) -> _T:
        """Of a long body the loop does not wait for what it says."""
        if len(body) < _LONG_BODY_BYTES:
            return decode(body)
        if decode_long is None:
            return await asyncio.to_thread(decode, body)
        return await asyncio.to_thread(decode_long, body, most_tokens=self._traits.max_context_tokens or sys.maxsize)

    async def _long_prompts(self, openai: ChatCall | CompletionCall, call: Call) -> list[list[int]] | None:
        """The tokens of what others should not wait for; None if it is short."""
        if len(call.body) < _LONG_TEXT_BYTES:
            return None
        return await asyncio.to_thread(self._completions.prompt_ids, openai)

    async def _tokenize(self, call: Call, responder: Responder) -> None:
        long = len(call.body) >= _LONG_TEXT_BYTES
        token_ids = await asyncio.to_thread(self._tokens_of, call.body) if long else self._tokens_of(call.body)
        answer = {"tokens": token_ids, "count": len(token_ids), "max_model_len": self._traits.max_context_tokens}
        _send(call, responder, msgspec.json.encode(answer))

    def _tokens_of(self, body: bytes) -> list[int]:
        asked = decode_tokenize(body)
        if not isinstance(asked, TokenizeText):
            return self._completions.prompt_ids(asked)[0]
        self._tokenizer.check_length(asked.prompt)
        return self._tokenizer.encode(asked.prompt, add_special_tokens=asked.add_special_tokens)

    async def _detokenize(self, call: Call, responder: Responder) -> None:
        token_ids = await self._decoded(call.body, decode_detokenize)
        vocab_size = self._traits.vocab_size
        strange = max(token_ids, default=0)
        if strange >= vocab_size > 0:
            raise FieldInvalid("tokens", f"token {strange} is not in the vocabulary of {vocab_size}")
        decode = partial(self._tokenizer.decode, token_ids, skip_special_tokens=False)
        text = decode() if len(token_ids) < _MANY_TOKENS else await asyncio.to_thread(decode)
        # vLLM's clients read the one, SGLang's the other
        _send(call, responder, msgspec.json.encode({"prompt": text, "text": text}))

    async def _stream(
        self, frames: AsyncGenerator[bytes, None], watch: "_Watch", call: Call, responder: Responder
    ) -> None:
        async with aclosing(frames) as answer:
            async for frame in answer:
                if watch.failure is not None:
                    break  # this frame only says so, and the responder has its own way
                if not responder.started:
                    responder.start(200, [*_EVENT_STREAM, *_extra(call)])
                responder.write(frame)
                await responder.drain()
        if watch.failure is None:
            return responder.end()
        return self._break_off(watch.failure, responder)


class _DecodeLong(Protocol[_Out_co]):
    def __call__(self, body: bytes, /, *, most_tokens: int) -> _Out_co: ...


class _Watch:
    """Generations of one call, watched for the first token and for what broke one."""

    def __init__(
        self,
        generate: Callable[[GenerationRequest], AsyncGenerator[TokenDelta, None]],
        on_first_token: Callable[[], None] | None,
    ) -> None:
        self.failure: KvherdError | None = None
        self._generate = generate
        self._on_first_token = on_first_token

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        try:
            async with aclosing(self._generate(request)) as deltas:
                async for delta in deltas:
                    if delta.token_ids and self._on_first_token is not None:
                        self._on_first_token()
                        self._on_first_token = None
                    yield delta
        except KvherdError as error:
            self.failure = error
            raise


def _send(call: Call, responder: Responder, body: bytes) -> None:
    responder.start(200, [*_JSON, (b"content-length", b"%d" % len(body)), *_extra(call)])
    responder.write(body)
    responder.end()


def _extra(call: Call) -> list[tuple[bytes, bytes]]:
    return list(call.extra_headers)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _left_s(ends: Ends) -> float | None:
    """As grpc takes it."""
    return None if ends is None else min(max(ends[0] - _now_s(), 0.001), _LONGEST_S)


def _at_rank(request: GenerationRequest, rank: Rank | None) -> GenerationRequest:
    """At this rank, unless the call itself names one."""
    return request if rank is None or request.rank is not None else replace(request, rank=rank)
