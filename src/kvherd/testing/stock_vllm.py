"""A stock vLLM server as far as kvherd touches one: its HTTP answers, its prefix cache, its KV events and their replay.

What it says has the fields of recorded answers of vLLM 0.32; what it reports as cached and publishes is what its cache
does. A token is a byte of the rendered prompt, see `testing/tokenizer.py`. It answers one request at a time.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from kvherd.ports.completions import Tokenizer
from kvherd.testing.paged_cache import PagedCache, Running
from kvherd.testing.publisher import FakePublisher
from kvherd.testing.raw_http import SSE_HEAD, RawRequest, RawServer, chunk, json_answer
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.wire.openai.requests import decode_chat, decode_completion

FINGERPRINT = "vllm-0.32.0-47c0b76c"
MODEL = "smollm2"
Json = dict[str, Any]


@dataclass
class StockVllm:
    """An async context manager. Entered again after it was left, it is another process at the same endpoints.

    `details` is `--enable-prompt-tokens-details`, `force_usage` is `--enable-force-include-usage`, `api_key` is
    `--api-key`. Without `publishes` its events are off, without `replays` it has no replay endpoint by its own word.
    `step_s` is what a token takes. `asked` has every body of a completion as it came.
    """

    blocks: int = 64
    block_size: int = 16
    details: bool = True
    force_usage: bool = False
    dev_mode: bool = True
    publishes: bool = True
    replays: bool = True
    api_key: str = ""
    step_s: float = 0.0
    publisher: FakePublisher = field(default_factory=FakePublisher)
    tokenizer: Tokenizer = field(default_factory=ByteTokenizer)
    asked: list[bytes] = field(default_factory=list)
    running: int = 0
    waiting: int = 0

    def __post_init__(self) -> None:
        self._server = RawServer(self._answer)

    async def __aenter__(self) -> Self:
        self.cache = PagedCache(self.blocks, self.block_size)
        self._turn = asyncio.Lock()
        self._served = 0
        await self.publisher.__aenter__()
        await self._server.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.__aexit__(kind, error, trace)
        await self.publisher.__aexit__(kind, error, trace)

    @property
    def url(self) -> str:
        return self._server.url

    async def _answer(self, request: RawRequest, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = request.target.partition("?")[0]
        match request.method, path:
            case method, _ if method != "OPTIONS" and path.startswith("/v1") and not self._is_known(request):
                writer.write(json_answer(b'{"error":"Unauthorized"}', "401 Unauthorized"))
            case "OPTIONS", "/reset_prefix_cache" if self.dev_mode:
                writer.write(json_answer(b'{"detail":"Method Not Allowed"}', "405 Method Not Allowed"))
            case "POST", "/v1/chat/completions" | "/v1/completions":
                await self._complete(path, request.body, writer)
            case "POST", "/reset_prefix_cache" if self.dev_mode:
                writer.write(_json({"success": self.cache.reset()}))
            case "POST", "/tokenize":
                tokens = self._prompt("/v1/chat/completions" if b'"messages"' in request.body else "", request.body)
                writer.write(_json({"count": len(tokens), "max_model_len": 4096, "tokens": tokens}))
            case "GET", _ if path in self._pages:
                writer.write(self._pages[path])
            case _:
                writer.write(json_answer(b'{"detail":"Not Found"}', "404 Not Found"))

    def _is_known(self, request: RawRequest) -> bool:
        return not self.api_key or request.header("authorization") == f"Bearer {self.api_key}"

    @property
    def _pages(self) -> dict[str, bytes]:
        metrics = (
            f'vllm:cache_config_info{{block_size="{self.block_size}",num_gpu_blocks="{self.blocks + 1}"}} 1\n'
            f'vllm:num_requests_running{{engine="0"}} {self.running}\nvllm:num_requests_waiting{{engine="0"}} '
            f'{self.waiting}\nvllm:kv_cache_usage_perc{{engine="0"}} {self.cache.used_share}\n'
        )
        model = {"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": 4096}
        publisher = self.publisher
        events: Json = {"enable_kv_cache_events": self.publishes, "publisher": "zmq" if self.publishes else "null"}
        events |= {"endpoint": publisher.events_endpoint, "replay_endpoint": None}
        if self.replays:
            events["replay_endpoint"] = publisher.replay_endpoint
        info = {"/server_info": _json({"vllm_config": {"kv_events_config": events}})} if self.dev_mode else {}
        return info | {
            "/health": json_answer(b""),
            "/version": _json({"version": "0.32.0"}),
            "/v1/models": _json({"object": "list", "data": [model]}),
            "/metrics": json_answer(metrics.encode()),
        }

    def _prompt(self, path: str, body: bytes) -> list[int]:
        if path == "/v1/chat/completions":
            document = {"model": MODEL, **json.loads(body)}
            return self.tokenizer.encode(self.tokenizer.render_chat(decode_chat(json.dumps(document).encode())))
        document = {"model": MODEL, **json.loads(body)}
        prompt = decode_completion(json.dumps(document).encode()).prompts[0]
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    async def _complete(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        self.asked.append(body)
        asked = json.loads(body)
        prompt = self._prompt(path, body)
        self.waiting += 1
        async with self._turn:
            self.waiting -= 1
            self.running += 1
            try:
                mode = (asked.get("vllm_xargs") or {}).get("kv_cache_report_mode")
                running = self.cache.begin(prompt, salt=asked.get("cache_salt"), full_report=mode == "full")
                try:
                    tokens = self._tokens(running, asked.get("max_tokens") or 8)
                    answer = _Answer(path, self._name(path), asked, running, len(prompt), self)
                    if asked.get("stream"):
                        await _stream(answer, tokens, writer)
                    else:
                        writer.write(_json(answer.whole([token async for token in tokens])))
                finally:
                    self.cache.end(running)
            finally:
                self.running -= 1

    async def _tokens(self, running: Running, count: int) -> AsyncIterator[str]:
        """One token a step, its events published before it is sent; always the same ones."""
        for token in (b"the quick brown fox jumps over the lazy dog " * (count // 40 + 1))[:count]:
            await asyncio.sleep(self.step_s)
            await self._publish()
            self.cache.decode(running, token)
            yield chr(token)
        await self._publish()

    async def _publish(self) -> None:
        said = self.cache.take_said()
        if said and self.publishes:
            await self.publisher.publish(*said)

    def _name(self, path: str) -> str:
        self._served += 1
        return f"{'chatcmpl' if path == '/v1/chat/completions' else 'cmpl'}-{self._served:016x}"


@dataclass
class _Answer:
    """The bodies of one answer, in the shapes and with the keys that were recorded."""

    path: str
    name: str
    asked: Json
    running: Running
    prompt_tokens: int
    server: StockVllm

    @property
    def chat(self) -> bool:
        return self.path == "/v1/chat/completions"

    @property
    def tells_usage(self) -> bool:
        return self.server.force_usage or bool((self.asked.get("stream_options") or {}).get("include_usage"))

    def whole(self, tokens: list[str]) -> Json:
        text = "".join(tokens)
        end: Json = {"finish_reason": "length", "stop_reason": None, "token_ids": None, "routed_experts": None}
        if self.chat:
            message = {"role": "assistant", "content": text, "refusal": None, "annotations": None, "audio": None}
            message |= {"function_call": None, "reasoning": None}
            choice = {"index": 0, "message": message, "logprobs": None, **end}
        else:
            choice = {"index": 0, "text": text, "logprobs": None, **end}
        return {
            **self._head("chat.completion" if self.chat else "text_completion"),
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": FINGERPRINT,
            "usage": self._usage(len(tokens)) | {"completion_tokens_details": None},
            **dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params")),
            **dict.fromkeys(("ec_transfer_params", "metrics")),
        }

    def opening(self) -> Iterator[Json]:
        if self.chat:
            choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            yield self._chunk(choice | {"finish_reason": None}) | {"prompt_token_ids": None, "prompt_text": None}

    def piece(self, token: str, *, last: bool) -> Json:
        said = {"delta": {"content": token}} if self.chat else {"text": token}
        end: Json = {"finish_reason": "length", "stop_reason": None} if last else {"finish_reason": None}
        event = self._chunk({"index": 0, **said, "logprobs": None, **end, "token_ids": None})
        # Told once: on the last event, and with usage that is the one after this.
        return event | ({"system_fingerprint": FINGERPRINT} if last and not self.tells_usage else {})

    def usage_event(self, tokens: int) -> Json:
        usage = self._usage(tokens)
        details = usage.pop("prompt_tokens_details")
        if details:  # what is null is left out here
            usage["prompt_tokens_details"] = {name: each for name, each in details.items() if each is not None}
        return {**self._chunk(None), "usage": usage, "system_fingerprint": FINGERPRINT}

    def _usage(self, tokens: int) -> Json:
        cached = self.running.cached_tokens
        size = self.server.block_size
        made = len(self.running.tokens) // size * size - cached
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + tokens,
            "completion_tokens": tokens,
            "prompt_tokens_details": {
                "cached_tokens": cached,
                "created_cache_tokens": max(0, made),
                "multimodal_tokens": None,
            }
            if self.server.details
            else None,
        }

    def _chunk(self, choice: Json | None) -> Json:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [] if choice is None else [choice]}

    def _head(self, kind: str) -> Json:
        return {"id": self.name, "object": kind, "created": 1795243838, "model": MODEL}


async def _stream(answer: _Answer, tokens: AsyncIterator[str], writer: asyncio.StreamWriter) -> None:
    writer.write(SSE_HEAD)
    for event in answer.opening():
        writer.write(chunk(_sse(event)))
    held, count = "", 0
    async for token in tokens:
        if count:
            writer.write(chunk(_sse(answer.piece(held, last=False))))
            await writer.drain()
        held, count = token, count + 1
    writer.write(chunk(_sse(answer.piece(held, last=True))))
    if answer.tells_usage:
        writer.write(chunk(_sse(answer.usage_event(count))))
    writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


def _sse(event: Json) -> bytes:
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


def _json(document: Json) -> bytes:
    return json_answer(json.dumps(document, separators=(",", ":")).encode())
