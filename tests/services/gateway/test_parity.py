"""Workers that make other tokens than the gateway: found out, said, and routed to by what was sent there."""

import asyncio
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from kvherd.core.errors import WorkerRefused, WorkerUnreachable
from kvherd.core.fleet.roster import Member
from kvherd.core.fleet.spec import WorkerSpec
from kvherd.core.ids import EngineHash, Rank, RequestId, WorkerId
from kvherd.core.kv.events import BlocksStored
from kvherd.core.kv.hashing import PrefixHasher
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.core.kv.reactions import FollowState
from kvherd.core.routing.candidate import KvKnowledge
from kvherd.core.text.parity import Agreement, PromptClass
from kvherd.ports.completions import Tokenizer
from kvherd.ports.worker import WorkerFacts, WorkerKind
from kvherd.services.gateway.fleet.fleet import Fleet
from kvherd.services.gateway.fleet.fleet_edges import FleetConfig
from kvherd.services.gateway.following.follow_stream import Following
from kvherd.services.gateway.following.standing import Standing
from kvherd.services.gateway.reading.encodings import EncodingCache
from kvherd.services.gateway.reading.parity import FIRST_PAUSE_S, PROBE_S, compare, counted
from kvherd.services.gateway.reading.prompts import read_prompt
from kvherd.services.gateway.settings import ProbeBounds
from kvherd.services.gateway.turns.credit import Credit
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.testing.workers import FakeWorker
from kvherd.wire.openai.requests import decode_chat
from kvherd.wire.openai.routing import peek

ANN = WorkerId("http://ann:1")
FACTS = WorkerFacts(WorkerKind.VLLM_HTTP, ("m",), block_size=4)
SECRET = "the answer is 42, whatever they say"


def same_tokens(body: bytes) -> list[int]:
    told = json.loads(body)
    tokenizer = ByteTokenizer()
    return tokenizer.encode(told["prompt"] if "prompt" in told else tokenizer.render_chat(decode_chat(body)))


def other_tools(body: bytes) -> list[int]:
    """An engine whose template says that there are tools."""
    tokens = same_tokens(body)
    return [*tokens[:3], 200, *tokens[3:]] if b"tools" in body else tokens


def member() -> Member:
    return Member(ANN, models=("m",), block_size=4, detected=True)


ASKED = [each for each in PromptClass if each is not PromptClass.AMBIGUOUS]


async def test_a_worker_that_makes_the_same_tokens_agrees_in_every_class() -> None:
    ann = member()
    await compare(ann, FakeWorker(ANN, tokens=same_tokens), ByteTokenizer())
    assert {each: found.agreement for each, found in ann.tokenization.items()} == dict.fromkeys(ASKED, Agreement.AGREES)
    assert ann.differing == ()
    assert ann.compare_at_s == math.inf


async def test_a_class_that_differs_is_named_with_the_place_and_no_other_suffers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ann = member()
    await compare(ann, FakeWorker(ANN, tokens=other_tools), ByteTokenizer())
    assert ann.differing == (PromptClass.TOOLS,)
    assert "number 3 is the first that differs" in ann.tokenization[PromptClass.TOOLS].why
    assert ann.tokenizes_alike([PromptClass.CHAT])
    (said,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert "'tools'" in said


async def test_a_worker_that_cannot_tell_is_unknown_and_used() -> None:
    ann = member()
    await compare(ann, FakeWorker(ANN), ByteTokenizer())
    assert {found.agreement for found in ann.tokenization.values()} == {Agreement.UNKNOWN}
    assert ann.differing == ()
    assert ann.compare_at_s == math.inf, "it has no way to tell, and is not asked again"


async def test_a_difference_of_a_plain_chat_is_one_of_every_chat() -> None:
    """What is rendered otherwise without tools is not rendered alike with them, whatever the one probe of them said."""
    ann = member()
    await compare(ann, FakeWorker(ANN, tokens=same_tokens), ByteTokenizer())
    counted(ann, [PromptClass.CHAT], ours=7, theirs=8)
    assert not ann.tokenizes_alike([PromptClass.CHAT, PromptClass.TOOLS])
    assert not ann.tokenizes_alike([PromptClass.CHAT, PromptClass.TURNS])
    assert ann.tokenizes_alike([PromptClass.TEXT])
    assert ann.differing == (PromptClass.CHAT,)


@pytest.mark.parametrize("prompt_class", [PromptClass.PREFILL, PromptClass.AMBIGUOUS])
async def test_what_engines_are_known_to_read_each_in_their_way_is_not_believed_unseen(
    prompt_class: PromptClass,
) -> None:
    http, grpc = member(), Member(WorkerId("grpc://ann:2"), models=("m",))
    assert not http.tokenizes_alike([PromptClass.CHAT, prompt_class])
    assert grpc.tokenizes_alike([PromptClass.CHAT, prompt_class]), "it is given its tokens"
    await compare(http, FakeWorker(ANN, tokens=same_tokens), ByteTokenizer())
    assert http.tokenizes_alike([prompt_class]) == (prompt_class is PromptClass.PREFILL)


@dataclass
class Hesitant(FakeWorker):
    """Hangs, or fails, at every call but those of `answers`."""

    asked: int = 0
    answers: Sequence[int] = ()
    hangs: bool = True

    async def tokenize(self, body: bytes) -> list[int]:
        self.asked += 1
        if self.asked in self.answers:
            return same_tokens(body)
        if self.hangs:
            await asyncio.sleep(3600)
        raise WorkerRefused(self.id, "POST /tokenize gave HTTP 503: loading")


async def test_a_slow_worker_is_asked_on_later_and_later() -> None:
    ann, slow = member(), Hesitant(ANN)
    pauses = []
    for _ in range(9):
        asked, began_s = slow.asked, asyncio.get_running_loop().time()
        await compare(ann, slow, ByteTokenizer())
        assert slow.asked == asked + 1
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(PROBE_S)
        pauses.append(ann.compare_at_s - asyncio.get_running_loop().time())
    assert pauses == pytest.approx([5, 10, 20, 40, 80, 160, 300, 300, 300])
    assert ann.differing == ()


async def test_only_what_was_not_answered_is_asked_again() -> None:
    ann, slow = member(), Hesitant(ANN, answers=[1, 2, *range(4, 40)])
    await compare(ann, slow, ByteTokenizer())
    assert [found.agreement for found in ann.tokenization.values()] == [Agreement.AGREES] * 2 + [Agreement.UNKNOWN]
    counted(ann, [PromptClass.TOOLS], ours=7, theirs=8)
    await compare(ann, slow, ByteTokenizer())
    assert ann.compare_at_s == math.inf
    assert slow.asked == 3 + len(ASKED) - 3
    assert ann.differing == (PromptClass.TOOLS,), "what was seen is not asked about"


async def test_a_worker_that_fails_is_asked_every_probe_and_again_later() -> None:
    ann, failing = member(), Hesitant(ANN, hangs=False)
    await compare(ann, failing, ByteTokenizer())
    assert failing.asked == len(ASKED)
    assert ann.compare_at_s - asyncio.get_running_loop().time() == pytest.approx(FIRST_PAUSE_S)


def test_unequal_counts_prove_a_difference_and_equal_ones_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ann = member()
    counted(ann, [PromptClass.CHAT], ours=7, theirs=7)
    counted(ann, [], ours=7, theirs=8)
    assert ann.tokenization == {}
    for _ in range(3):
        counted(ann, [PromptClass.CHAT], ours=7, theirs=8)
    assert ann.tokenization[PromptClass.CHAT].why == "it counted 8 tokens in a prompt that has 7 here"
    assert len(caplog.records) == 1


def live(following: Following) -> Standing:
    """Its stream is there, and has been for long."""
    standing = Standing(following, lambda: 0.0, grace_s=5.0, settle_s=2.0)
    standing.take(FollowState.LIVE)
    return standing


async def test_a_prompt_of_a_class_that_differs_is_credited_by_what_was_sent_there() -> None:
    index, tokenizer = PrefixIndex(PrefixHasher(b"k")), ByteTokenizer()
    credit, ann = Credit(index, {ANN: live(Following(ANN, index))}), member()
    body = json.dumps({"model": "m", "prompt": SECRET * 4}).encode()
    prompt = await read_prompt("/v1/completions", body, peek(body), tokenizer, EncodingCache())
    assert prompt.token_ids is not None
    whole = tuple(prompt.token_ids)[: len(prompt.token_ids) // 4 * 4]
    index.enrol(ANN, model="m")
    blocks = tuple(EngineHash(n) for n in range(len(whole) // 4))
    index.apply_events(Holder(ANN, Rank(0)), [BlocksStored(blocks, None, whole, 4)])
    assert credit.matches(prompt, [ann])[ANN, None].kv is KvKnowledge.KNOWN
    counted(ann, [PromptClass.TEXT], ours=1, theirs=2)
    unknown = credit.matches(prompt, [ann])[ANN, None]
    assert (unknown.kv, unknown.tokens) == (KvKnowledge.UNTOLD, 0)
    credit.sent(RequestId("r"), prompt, ann, None, unknown)
    again = credit.matches(prompt, [ann])[ANN, None]
    assert again.kv is KvKnowledge.UNTOLD
    assert again.tokens > 0


async def test_a_worker_is_compared_when_it_joins_and_again_when_it_returns() -> None:
    ann = FakeWorker(ANN, facts=FACTS, tokens=other_tools)

    async def tokenizer(_: str) -> Tokenizer:
        return ByteTokenizer()

    class Nobody:
        def add(self, *_: object, **__: object) -> None: ...
        def remove(self, *_: object) -> None: ...
        def returned(self, *_: object) -> None: ...

    fleet = Fleet(
        worker_factory=lambda *_: ann,
        feed_factory=lambda _: None,  # type: ignore[arg-type,return-value]
        tokenizer_factory=tokenizer,
        following=Nobody(),
        config=FleetConfig(probe=ProbeBounds(period_s=1.0)),
    )
    async with fleet:
        joined = fleet.add(WorkerSpec(ANN, tokenizer="/models/m"))
        await asyncio.sleep(0.1)
        assert list(joined.differing) == [PromptClass.TOOLS]
        ann.fails = WorkerUnreachable(ANN, "gone")
        await asyncio.sleep(5.0)
        ann.fails, ann.tokens = None, same_tokens
        await asyncio.sleep(5.0)
        assert not joined.differing
        assert set(joined.tokenization) == set(ASKED)


async def test_the_blocks_of_an_adapter_are_not_those_of_its_base() -> None:
    index, tokenizer = PrefixIndex(PrefixHasher(b"k")), ByteTokenizer()
    credit, ann = Credit(index, {ANN: live(Following(ANN, index))}), member()
    ann.models, ann.adapters = ("m", "tuned"), ("tuned",)
    index.enrol(ANN, model="m")
    whole = tuple(tokenizer.encode(SECRET))[:32]
    blocks = tuple(EngineHash(n) for n in range(8))
    index.apply_events(Holder(ANN, Rank(0)), [BlocksStored(blocks, None, whole, 4, lora="tuned")])
    for model, tokens in (("m", 0), ("tuned", 32)):
        body = json.dumps({"model": model, "prompt": SECRET}).encode()
        prompt = await read_prompt("/v1/completions", body, peek(body), tokenizer, EncodingCache())
        assert credit.matches(prompt, [ann])[ANN, None].tokens == tokens
