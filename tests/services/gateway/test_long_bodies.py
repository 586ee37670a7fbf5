"""Long bodies: read in a thread, and to the same end."""

import asyncio
import json
import threading
from dataclasses import dataclass

import pytest

from kvherd.core.errors import BodyNotJson, PromptTooLong
from kvherd.core.kv.hashing import PrefixHasher
from kvherd.services.gateway.reading.encodings import EncodingCache
from kvherd.services.gateway.reading.prompts import Prompt, read_prompt
from kvherd.services.gateway.turns.credit import Naming
from kvherd.services.gateway.turns.long_bodies import LongBodies
from kvherd.testing.patience import until
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.wire.openai.routing import peek

pytestmark = pytest.mark.net

HASHER, STRANGER = PrefixHasher(b"k"), PrefixHasher(b"another")
IDS = [number % 256 for number in range(400_000)]
TEXT = "The river runs. " * 40_000
CHAT = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "So?"}, {"role": "user", "content": "Go."}]
BODIES: list[tuple[str, dict[str, object]]] = [
    ("/v1/completions", {"prompt": IDS}),
    ("/v1/completions", {"prompt": [IDS, [1, 2]]}),
    ("/v1/completions", {"prompt": TEXT}),
    ("/v1/completions", {"prompt": "short", "deep": {"prompt": IDS}}),
    ("/v1/completions", {"prompt": TEXT, "suffix": "of which nobody can tell"}),
    ("/v1/chat/completions", {"messages": CHAT}),
    ("/v1/chat/completions", {"messages": [*CHAT, {"role": "user", "content": "<|im_end|>"}]}),
    ("/v1/chat/completions", {"messages": TEXT}),
    ("/generate", {"input_ids": IDS}),
    ("/generate", {"text": TEXT}),
    ("/v1/embeddings", {"input": IDS}),
]


@dataclass
class ThreadedTokenizer(ByteTokenizer):
    """Encodes only where the loop can go on meanwhile."""

    loop_went_on: threading.Event = None  # type: ignore[assignment]
    threads: set[int] = None  # type: ignore[assignment]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if text:
            self.threads.add(threading.get_ident())
            assert self.loop_went_on.wait(30), "the loop stands still while a long text is encoded"
        return super().encode(text, add_special_tokens=add_special_tokens)


async def read(path: str, fields: dict[str, object], long: LongBodies | None = None) -> Prompt:
    body, long = json.dumps({"model": "m", "cache_salt": "s", **fields}).encode(), long or LongBodies()
    asked, cut = await long.peek(body)
    return await long.prompt(path, body, asked, cut, ByteTokenizer())


@pytest.mark.parametrize(("path", "fields"), BODIES)
async def test_a_long_body_is_read_as_a_short_one(path: str, fields: dict[str, object]) -> None:
    body = json.dumps({"model": "m", "cache_salt": "s", **fields}).encode()
    whole = await read_prompt(path, body, peek(body), ByteTokenizer(), EncodingCache())
    found = await read(path, fields)
    assert (found.text, found.salt, found.model) == (whole.text, whole.salt, whole.model)
    assert (found.classes, found.several) == (whole.classes, whole.several)
    assert (found.token_ids is None) == (whole.token_ids is None)
    assert list(found.token_ids or ()) == list(whole.token_ids or ())


@pytest.mark.parametrize("size", [0, 16, 5])
@pytest.mark.parametrize("bigrams", [False, True])
async def test_its_blocks_get_the_names_that_they_would_get_later(size: int, bigrams: bool) -> None:
    if size == 0 and bigrams:
        return
    prompt, again = await read(*BODIES[0]), await read(*BODIES[0])
    naming = Naming("m", size, None, bigrams=bigrams)
    await LongBodies(piece_blocks=1000).name(prompt, HASHER, [naming])
    if size:
        named = prompt.chain(STRANGER, "m", size, bigrams=bigrams)
        assert named == again.chain(HASHER, "m", size, bigrams=bigrams)
    else:
        named = prompt.text_chain(STRANGER, "m")
        assert named == again.text_chain(HASHER, "m")
    assert len(named) > 1000


async def test_what_was_not_tokenized_or_is_no_token_gets_no_names() -> None:
    naming = Naming("m", 16, None, bigrams=False)
    prompt = Prompt(b"text")
    await LongBodies().name(prompt, HASHER, [naming])
    assert prompt.chain(HASHER, "m", 16) == []
    prompt.token_ids = [2**32] * 16
    await LongBodies().name(prompt, HASHER, [naming])
    assert prompt.chain(HASHER, "m", 16) == []


@pytest.mark.parametrize("field", [{"prompt": TEXT}, {"messages": CHAT}])
async def test_the_loop_goes_on_while_a_long_text_is_encoded(field: dict[str, object]) -> None:
    path = "/v1/completions" if "prompt" in field else "/v1/chat/completions"
    body, long = json.dumps({"model": "m", **field}).encode(), LongBodies()
    tokenizer = ThreadedTokenizer(loop_went_on=threading.Event(), threads=set())
    asked, cut = await long.peek(body)
    reading = asyncio.create_task(long.prompt(path, body, asked, cut, tokenizer))
    while not tokenizer.threads:  # noqa: ASYNC110 - a thread tells it, and it is no event
        await asyncio.sleep(0.001)
    tokenizer.loop_went_on.set()
    assert (await reading).token_ids
    assert threading.get_ident() not in tokenizer.threads


async def test_bodies_are_read_one_at_a_time_whoever_has_left() -> None:
    long, at_once, most = LongBodies(), 0, 0
    begun, go_on = threading.Event(), threading.Event()

    def work() -> int:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        begun.set()
        assert go_on.wait(30)
        at_once -= 1
        return most

    left = asyncio.create_task(long._run(work))
    await asyncio.to_thread(begun.wait, 30)
    others = [asyncio.create_task(long._run(work)) for _ in range(3)]
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    go_on.set()
    assert await asyncio.gather(*others) == [1, 1, 1]


async def test_a_model_is_renamed_without_a_look_at_the_list() -> None:
    body, long = json.dumps({"model": "alias", "prompt": IDS}).encode(), LongBodies()
    _, cut = await long.peek(body)
    assert cut is not None
    assert json.loads(await long.with_model(body, "m", cut)) == {"model": "m", "prompt": IDS}
    assert json.loads(await long.with_model(body, "m", None)) == {"model": "m", "prompt": IDS}


async def test_what_cannot_fit_is_not_looked_through() -> None:
    class Short(ByteTokenizer):
        def check_length(self, text: str, *, after_chars: int = 0) -> None:
            raise PromptTooLong(10**6, 0, 4096, at_least=True)

    tokenizer, long = Short(), LongBodies()
    body = json.dumps({"model": "m", "messages": CHAT}).encode()
    asked, cut = await long.peek(body)
    prompt = await long.prompt("/v1/chat/completions", body, asked, cut, tokenizer)
    assert (prompt.token_ids, prompt.classes, tokenizer.encoded) == (None, (), [])


@pytest.mark.parametrize(
    "bad", [b'{"model":"m","prompt":"' + b"x" * 2_000_000 + b'",}', b'{"a":"' + b"\xff" * 2_000_000]
)
async def test_what_is_wrong_with_a_long_body_is_told_in_short(bad: bytes) -> None:
    with pytest.raises(BodyNotJson):
        await LongBodies().peek(bad)


async def test_clients_that_leave_occupy_one_thread_and_the_next_has_its_turn_when_that_is_free() -> None:
    long, goes_on, begun = LongBodies(), threading.Event(), []

    def work() -> None:
        begun.append(threading.get_ident())
        assert goes_on.wait(60)

    try:
        left = [asyncio.ensure_future(long._run(work)) for _ in range(100)]
        await until(lambda: len(begun) == 1)
        for one in left:
            one.cancel()
            for _ in range(5):  # the next has its turn, if it is one
                await asyncio.sleep(0)
        asked = asyncio.ensure_future(long._run(lambda: len(begun)))
        async with asyncio.timeout(30):
            assert await asyncio.to_thread(lambda: "others have theirs") == "others have theirs"
        assert not asked.done()
    finally:
        goes_on.set()
    assert await asked == 1
    assert all(one.cancelled() for one in left)
