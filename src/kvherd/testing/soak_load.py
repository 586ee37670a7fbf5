"""Clients of every manner at once, for as long as is wanted, and what became of what they asked.

Each answer is right, or a clean error, or `wrong`: then `Tally.wrong` has a sentence about it.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from kvherd.testing.raw_http import SSE_HEAD, RawAnswer, RawClient, RawRequest, RawServer, chunk, json_answer

QUICK = "quick"
TINY = "tiny"
ANSWER_S = 60.0
CLEAN = frozenset({429, 502, 503, 504})
DONE = b"data: [DONE]\n\n"
LARGE_BYTES = 4 * 2**20
_TEXTS = tuple(f"Tale {number}: " + f"once upon a time there were {number} kings. " * 6 for number in range(40))
_SAID = {"index": 0, "message": {"role": "assistant", "content": "Paris."}, "finish_reason": "stop"}
_USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
_WHOLE = json_answer(json.dumps({"object": "chat.completion", "choices": [_SAID], "usage": _USAGE}).encode())
_PIECE = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": " word"}}]}
_EVENT = b"data: " + json.dumps(_PIECE).encode() + b"\n\n"
_MODELS = json_answer(json.dumps({"object": "list", "data": [{"id": QUICK, "object": "model"}]}).encode())
_MEASURE = _EVENT * 400


async def quick_worker(request: RawRequest, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A `RawServer`'s script: answers at once. To a prompt with `large` it says megabytes, as its client reads."""
    if request.method == "GET":
        writer.write(_MODELS if request.target == "/v1/models" else json_answer(b"{}"))
    elif b'"stream": true' not in request.body:
        writer.write(_WHOLE)
    else:
        writer.write(SSE_HEAD)
        if b"large" in request.body:
            for _sent in range(0, LARGE_BYTES, len(_MEASURE)):
                writer.write(chunk(_MEASURE))
                await writer.drain()
        else:
            for _sent in range(20):
                writer.write(chunk(_EVENT))
        writer.write(chunk(DONE) + chunk(b""))
    await writer.drain()


class QuickServer(RawServer):
    """One that does not remember who asked."""

    def __init__(self) -> None:
        async def script(request: RawRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.requests.clear()
            await quick_worker(request, reader, writer)

        super().__init__(script)


@dataclass(slots=True)
class Tally:
    """`mortal` is the URL of the worker that may be killed in the middle of an answer."""

    mortal: str = ""
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return self.seen.total()

    def judge(self, answer: RawAnswer, *, stream: bool) -> None:
        if answer.status in CLEAN:
            self._judge_error(answer)
        elif answer.status != 200:
            self._bad(answer)
        elif not answer.whole:
            self._judge_cut(answer, stream=stream)
        elif not stream:
            right = isinstance(json.loads(answer.body).get("choices"), list)
            self._count("answered") if right else self._bad(answer)
        elif answer.body.endswith(DONE):
            self._count("answered")
        else:
            last = answer.body.rstrip().rpartition(b"\n\n")[2]
            self._count("broken with an error event") if b'"error"' in last else self._bad(answer)

    def _judge_error(self, answer: RawAnswer) -> None:
        code = json.loads(answer.body).get("error", {}).get("code")
        self._count(f"{answer.status} {code}") if code and answer.whole else self._bad(answer)

    def _judge_cut(self, answer: RawAnswer, *, stream: bool) -> None:
        """An answer that is no stream can say in no other way that its worker died."""
        if not stream and answer.headers.get("x-kvherd-worker") == self.mortal:
            self._count("cut off with its worker")
        else:
            self._bad(answer)

    def _count(self, what: str) -> None:
        self.seen[what] += 1

    def _bad(self, answer: RawAnswer) -> None:
        self.failed(f"{answer.status} whole={answer.whole} {answer.headers} … {answer.body[-300:]!r}")

    def failed(self, how: str) -> None:
        self.seen["WRONG"] += 1
        if len(self.wrong) < 20:
            self.wrong.append(how)


def post(path: str, body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def some_request(dice: random.Random, model: str, *, stream: bool, max_tokens: int) -> bytes:
    text = dice.choice(_TEXTS)
    more = {"model": model, "stream": stream, "max_tokens": max_tokens, "ignore_eos": True}
    if dice.random() < 0.5:
        return post("/v1/completions", {"prompt": text[: dice.choice((80, 200))], **more})
    return post("/v1/chat/completions", {"messages": [{"role": "user", "content": text[:120]}], **more})


@dataclass(slots=True)
class Clients:
    """What each does until `over` is set; every wait has a deadline."""

    port: int
    tally: Tally
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def chats(self, model: str, seed: int) -> None:
        """Ask again and again over one kept connection, and read all."""
        dice = random.Random(seed)
        while not self.over.is_set():
            async with RawClient(self.port, read_limit_bytes=2**20) as client:
                for _ in range(dice.randrange(1, 200)):
                    stream = dice.random() < 0.5
                    asked = some_request(dice, model, stream=stream, max_tokens=dice.randrange(1, 24))
                    answer = await self._answer(client, asked)
                    if answer is None:
                        break
                    self.tally.judge(answer, stream=stream)
                    if self.over.is_set():
                        return
                    if answer.status != 200:
                        await asyncio.sleep(0.2)

    async def leaves(self, model: str, seed: int) -> None:
        """Begin requests and go away, at every moment of them."""
        dice = random.Random(seed)
        while not self.over.is_set():
            async with RawClient(self.port) as client:
                asked = some_request(dice, model, stream=True, max_tokens=400)
                client.send(asked[: dice.choice((len(asked) // 2, len(asked)))])
                try:
                    async with asyncio.timeout(dice.random()):
                        while await client.reader.read(200):
                            pass
                except (TimeoutError, ConnectionError):
                    pass
            self.tally.seen["left"] += 1

    async def reads_slowly(self, seed: int) -> None:
        """Take a large stream in drops; leave some, read some to their end."""
        dice = random.Random(seed)
        body: dict[str, object] = {"model": QUICK, "prompt": "large", "stream": True}
        while not self.over.is_set():
            async with RawClient(self.port, read_limit_bytes=2**12) as client:
                client.send(post("/v1/completions", body))
                for _ in range(dice.randrange(10, 60)):
                    await client.reader.read(2**12)
                    await asyncio.sleep(0.05)
                if dice.random() < 0.5:
                    left = await self._rest(client)
                    self.tally.failed(f"a slow stream ended with {left!r}") if left else None
            self.tally.seen["slow"] += 1

    async def _rest(self, client: RawClient) -> bytes:
        """Read on to the end of the stream; how it ended if that is not its end."""
        last = b""
        try:
            async with asyncio.timeout(ANSWER_S):
                while not last.endswith(DONE + b"\r\n0\r\n\r\n"):
                    data = await client.reader.read(2**16)
                    if not data:
                        return last or b"nothing"
                    last = (last + data)[-200:]
        except (TimeoutError, ConnectionError) as error:
            return repr(error).encode()
        return b""

    async def orders(self, make: Callable[[], bytes], statuses: Sequence[int], pause_s: float) -> None:
        """Give an operator's order every so often; it is answered with one of these."""
        while not self.over.is_set():
            async with RawClient(self.port, read_limit_bytes=2**20) as client:
                answer = await self._answer(client, make())
                if answer is not None:
                    right = answer.status in statuses and answer.whole
                    self.tally.seen[f"order: {answer.status}"] += 1
                    if not right:
                        self.tally.failed(f"an order was answered {answer.status} {answer.body[:300]!r}")
            await self.pause(pause_s)

    async def every(self, act: Callable[[], Awaitable[None]], pause_s: float) -> None:
        while not self.over.is_set():
            await act()
            await self.pause(pause_s)

    async def pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.over.wait()
        except TimeoutError:
            return

    async def _answer(self, client: RawClient, asked: bytes) -> RawAnswer | None:
        """None where there was none, which is wrong: the gateway keeps connections that are in use."""
        began_s = time.monotonic()
        client.send(asked)
        try:
            return await client.answer(within_s=ANSWER_S)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError) as error:
            after_s = time.monotonic() - began_s
            self.tally.failed(
                f"at {time.strftime('%X')}, after {after_s:.1f} s {error!r} in place of an answer to {asked!r}"
            )
        return None
