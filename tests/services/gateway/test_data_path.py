"""One request on the data path, with workers that do what the test says."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from kvherd.core.errors import (
    BodyNotJson,
    FieldInvalid,
    KvherdError,
    ModelUnknown,
    NoWorker,
    Unsupported,
    WorkerFailed,
    WorkerRefused,
    WorkerTimedOut,
    WorkerUnreachable,
    WorkerUnsupported,
)
from kvherd.core.fleet.breaker import BreakerConfig, BreakerState
from kvherd.core.fleet.refusals import DeadlinePassed
from kvherd.core.fleet.roster import Member
from kvherd.core.fleet.spec import WorkerSpec
from kvherd.core.ids import EngineHash, Rank, RequestId, WorkerId
from kvherd.core.kv.bigrams import bigram_key
from kvherd.core.kv.events import BlocksStored, KvEventBatch, SnapshotChunk
from kvherd.core.kv.hashing import PrefixHasher
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.core.kv.reactions import FollowState
from kvherd.core.kv.watch import Watch
from kvherd.core.routing.policy import make_policy
from kvherd.core.text.calls import ChatCall
from kvherd.ports.completions import Tokenizer, Usage
from kvherd.ports.kv_feed import KvFeed
from kvherd.ports.worker import Call, Responder, WorkerFacts, WorkerKind, WorkerLoad
from kvherd.services.gateway.fleet.fleet import Fleet
from kvherd.services.gateway.following.follow_stream import Following
from kvherd.services.gateway.following.standing import Standing
from kvherd.services.gateway.metrics import GatewayMetrics
from kvherd.services.gateway.relay.edge import DataRequest
from kvherd.services.gateway.settings import Bounds, HealMode
from kvherd.services.gateway.turns import chat
from kvherd.services.gateway.turns.audit import Audit
from kvherd.services.gateway.turns.chat import DataPath, PathConfig
from kvherd.services.gateway.turns.credit import Credit
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.testing.workers import FakeResponder, FakeWorker

ANN, BOB = WorkerId("grpc://ann:1"), WorkerId("grpc://bob:1")
FACTS = WorkerFacts(WorkerKind.SGLANG_GRPC, ("m",), block_size=5)


class NoFeed:
    """A feed of a worker whose events the test applies itself."""


@dataclass
class NoFollowing:
    added: list[WorkerId] = field(default_factory=list)

    def add(self, worker: WorkerId, feed: KvFeed, *, model: str) -> None:
        self.added.append(worker)

    def remove(self, worker: WorkerId) -> None:
        pass

    def returned(self, worker: WorkerId) -> None:
        pass


@dataclass
class FakeEntries:
    """What is watched, what was answered, and what was rebuilt why."""

    watches: list[Watch] = field(default_factory=list)
    answers: list[WorkerId] = field(default_factory=list)
    rebuilt: dict[WorkerId, str] = field(default_factory=dict)
    tiers: bool = False

    def watch(self, worker: WorkerId) -> Watch:
        self.watches.append(Watch(1_000.0))
        return self.watches[-1]

    def unwatch(self, worker: WorkerId, watch: Watch) -> None:
        self.watches = [one for one in self.watches if one is not watch]

    def answered(self, worker: WorkerId, watch: Watch) -> None:
        self.answers.append(worker)

    def rebuild(self, worker: WorkerId, reason: str) -> None:
        self.rebuilt[worker] = reason

    def beyond_device(self, worker: WorkerId) -> bool:
        return self.tiers


class Way(Enum):
    """How a request is given to the data path: with a task, or without, where there is a connection and where none."""

    AWAITED = "awaited"
    LAUNCHED = "launched"
    CONNECTING = "launched before there is a connection"


way: ContextVar[Way] = ContextVar("way", default=Way.AWAITED)


@pytest.fixture(params=Way, ids=lambda one: one.value, autouse=True)
def _ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever is true of a request is so in each way."""
    before = way.set(request.param)
    yield
    way.reset(before)


async def launched(path: DataPath, request: DataRequest, responder: Responder) -> None:
    """What a client's connection does, as far as it matters here."""
    landing: asyncio.Future[Exception | Coroutine[Any, Any, None] | None] = asyncio.get_running_loop().create_future()
    flight = path.launch(request, responder, landing.set_result)
    if flight is None:
        await path(request, responder)
        return
    try:
        outcome = await landing
    except asyncio.CancelledError:
        flight.cancel()
        await asyncio.sleep(0)  # the fake worker's own task takes a step to end
        raise
    if isinstance(outcome, Coroutine):
        await outcome
    elif outcome is not None:
        raise outcome


@dataclass
class Herd:
    """A data path over fake workers."""

    path: DataPath
    fleet: Fleet
    index: PrefixIndex
    workers: dict[WorkerId, FakeWorker]
    standings: dict[WorkerId, Standing]
    followings: dict[WorkerId, Following]
    entries: FakeEntries
    metrics: GatewayMetrics

    async def ask(self, prompt: str = "hello world", **more: object) -> FakeResponder:
        return await self.send({"model": "m", "prompt": prompt, **more})

    async def send(
        self,
        body: object,
        path: str = "/v1/completions",
        headers: tuple[tuple[bytes, bytes], ...] = (),
        keeper: WorkerId | None = None,
    ) -> FakeResponder:
        responder = FakeResponder()
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = DataRequest("POST", path, "", list(headers), data, "127.0.0.1", RequestId("r"))
        if keeper is None and way.get() is not Way.AWAITED:
            await launched(self.path, request, responder)
        else:
            await self.path(request, responder, keeper)
        return responder

    def member(self, worker: WorkerId) -> Member:
        member = self.fleet.roster.get(worker)
        assert member is not None
        return member

    def store(self, worker: WorkerId, text: str, rank: int = 0) -> None:
        """That worker says that this rank of it holds the blocks of this text."""
        tokens = text.encode()
        blocks = len(tokens) // 5
        stored = BlocksStored(
            tuple(EngineHash(hash(tokens[: 5 * (n + 1)]) & 0xFFFF) for n in range(blocks)),
            None,
            tuple(tokens[: 5 * blocks]),
            5,
        )
        self.index.apply(Holder(worker, Rank(rank)), KvEventBatch(0, 0.0, Rank(rank), (stored,)))


def live(following: Following) -> Standing:
    """Its stream is there, and has been for long."""
    standing = Standing(following, lambda: 0.0, grace_s=5.0, settle_s=2.0)
    standing.take(FollowState.LIVE)
    return standing


def doubt(following: Following) -> None:
    """A snapshot of nothing says that it may hold more than was told."""
    following.take(SnapshotChunk(0, 1, 1, KvEventBatch(0, 1.0, Rank(0), ())), now_s=0.0)


@asynccontextmanager
async def herd(
    *workers: FakeWorker, policy: str = "kv", config: PathConfig | None = None, dice: Iterable[float] = ()
) -> AsyncIterator[Herd]:
    """`dice` fall in this order, and 0 from then on; the policy throws them too, once a request."""
    throws = iter(dice)
    known = {worker.id: worker for worker in workers}
    for worker in workers:
        worker.launches = way.get() is Way.LAUNCHED
    index = PrefixIndex(PrefixHasher(b"key"))
    followings = {worker: Following(worker, index) for worker in known}
    standings = {worker: live(following) for worker, following in followings.items()}
    credit = Credit(index, standings)

    async def tokenizer(_: str) -> Tokenizer:
        return ByteTokenizer()

    fleet = Fleet(
        worker_factory=lambda url, _: known[WorkerId(url)],
        feed_factory=lambda _: NoFeed(),  # type: ignore[arg-type,return-value]
        tokenizer_factory=tokenizer,
        following=NoFollowing(),
        dice=lambda: 0.5,
    )
    metrics, entries = GatewayMetrics(), FakeEntries()
    path = DataPath(
        fleet=fleet,
        policy=make_policy(policy),
        credit=credit,
        metrics=metrics,
        audit=Audit(entries, metrics, wall=lambda: 1_000.0),
        incomplete=lambda worker: followings[worker].incomplete,
        config=config,
        dice=lambda: next(throws, 0.0),
    )
    async with fleet:
        for worker in workers:
            fleet.add(WorkerSpec(worker.id))
            index.enrol(worker.id, model="m")
        await asyncio.sleep(0.1)
        yield Herd(path, fleet, index, known, standings, followings, entries, metrics)


def fake(worker: WorkerId, **acts: object) -> FakeWorker:
    return FakeWorker(worker, facts=FACTS, **acts)  # type: ignore[arg-type]


async def test_an_answer_is_passed_on_and_its_headers_say_who_gave_it() -> None:
    async with herd(fake(ANN)) as it:
        answer = await it.ask()
    assert (answer.status, answer.body, answer.ended) == (200, b'{"ok":true}', True)
    assert answer.headers["x-kvherd-worker"] == ANN
    assert answer.headers["x-kvherd-predicted-cached-tokens"] == "0"


async def test_a_prompt_goes_where_its_prefix_is_and_the_header_says_how_much() -> None:
    async with herd(fake(ANN), fake(BOB)) as it:
        it.store(BOB, "hello worl")
        answer = await it.ask("hello world")
    assert answer.headers["x-kvherd-worker"] == BOB
    assert answer.headers["x-kvherd-predicted-cached-tokens"] == "10"
    assert it.workers[BOB].calls[0].prompt_token_ids == list(b"hello world")
    assert it.workers[BOB].calls[0].tokenizer is it.fleet.tokenizer("m")


@pytest.mark.parametrize(("paired", "tokens", "predicted"), [(False, 33, "32"), (True, 33, "16"), (True, 34, "32")])
async def test_small_pages_earn_credit_by_sixteen_tokens_and_pairs_by_one_token_less(
    paired: bool, tokens: int, predicted: str
) -> None:
    text = bytes(range(65, 65 + 40))
    keys = tuple((bigram_key(text[number + 1]),) for number in range(39)) if paired else ()
    pages = BlocksStored(tuple(map(EngineHash, range(39))), None, tuple(text[:39]), 1, extra_keys=keys)
    async with herd(FakeWorker(ANN, facts=replace(FACTS, block_size=1)), fake(BOB)) as it:
        it.index.apply_events(Holder(ANN, Rank(0)), [pages])
        answer = await it.ask(text[:tokens].decode())
    assert answer.headers["x-kvherd-worker"] == ANN
    assert answer.headers["x-kvherd-predicted-cached-tokens"] == predicted


@pytest.mark.net
async def test_a_long_body_is_read_in_a_thread_and_goes_where_its_prefix_is(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def encode(tokenizer: ByteTokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
        threads.add(threading.get_ident() if text else None)
        return list(text.encode())

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    async with herd(fake(ANN), fake(BOB)) as it:
        it.store(BOB, "hello worl")
        answer = await it.ask("hello world" + " and so on" * 110_000)
        ids = await it.send({"model": "m", "prompt": list(b"hello world") + [7] * 600_000})
        sent = [call.prompt_token_ids for call in it.workers[BOB].calls]
    assert [one.headers["x-kvherd-worker"] for one in (answer, ids)] == [BOB, BOB]
    assert [one.headers["x-kvherd-predicted-cached-tokens"] for one in (answer, ids)] == ["10", "10"]
    assert [bytes(list(one or ())[:14]) for one in sent] == [b"hello world an", b"hello world\7\7\7"]
    assert threading.get_ident() not in threads


@pytest.mark.net
async def test_a_chat_that_takes_a_thread_is_rendered_no_more_than_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered, render = [], ByteTokenizer.render_chat

    def counted(tokenizer: ByteTokenizer, call: ChatCall) -> str:
        rendered.append(call)
        return render(tokenizer, call)

    monkeypatch.setattr(ByteTokenizer, "render_chat", counted)
    async with herd(fake(ANN)) as it:
        messages = [{"role": "user", "content": "so it goes " * 40_000}]
        answer = await it.send({"model": "m", "messages": messages}, "/v1/chat/completions")
    assert answer.status == 200
    assert len(rendered) == 2


@pytest.mark.net
async def test_a_long_body_that_is_no_json_is_refused_as_a_short_one() -> None:
    async with herd(fake(ANN)) as it:
        with pytest.raises(BodyNotJson):
            await it.send(b'{"model":"m","prompt":[' + b"1," * 1_000_000 + b"]}")


@pytest.mark.net
async def test_a_long_body_for_an_alias_names_the_model_when_it_is_sent() -> None:
    async with herd(fake(ANN)) as it:
        await it.send({"prompt": [7] * 600_000})
        (call,) = it.workers[ANN].calls
    assert json.loads(call.body) == {"prompt": [7] * 600_000, "model": "m"}


TWO_RANKS = replace(FACTS, ranks=2, addressable=True)


async def test_each_rank_that_can_be_named_is_credited_and_chosen_by_itself() -> None:
    async with herd(FakeWorker(ANN, facts=TWO_RANKS), fake(BOB)) as it:
        it.store(ANN, "hello worl", rank=1)
        answer = await it.ask("hello world")
        (sent,) = it.workers[ANN].calls
    assert (answer.headers["x-kvherd-worker"], answer.headers["x-kvherd-rank"], sent.rank) == (ANN, "1", 1)
    assert answer.headers["x-kvherd-predicted-cached-tokens"] == "10"


async def test_requests_under_way_count_where_they_were_sent() -> None:
    async with herd(FakeWorker(ANN, facts=TWO_RANKS, first_byte_s=10.0)) as it:
        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(it.ask(f"{number} hello worlds"))
        ranks = sorted(call.rank for call in it.workers[ANN].calls if call.rank is not None)
    assert ranks == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("more", "headers"),
    [
        ({"data_parallel_rank": 0}, ()),
        ({"routed_dp_rank": 0}, ()),
        ({}, ((b"x-data-parallel-rank", b"0"),)),
    ],
)
async def test_a_rank_that_the_client_names_is_the_one_that_serves_it(
    more: dict[str, object], headers: tuple[tuple[bytes, bytes], ...]
) -> None:
    async with herd(FakeWorker(ANN, facts=TWO_RANKS)) as it:
        it.store(ANN, "hello worl", rank=1)
        answer = await it.send({"model": "m", "prompt": "hello world", **more}, headers=headers)
        (sent,) = it.workers[ANN].calls
    assert (answer.headers["x-kvherd-rank"], sent.rank) == ("0", None), "its own words say it already"
    assert answer.headers["x-kvherd-predicted-cached-tokens"] == "0"


async def test_a_rank_that_there_is_not_is_for_the_worker_to_refuse() -> None:
    async with herd(FakeWorker(ANN, facts=TWO_RANKS)) as it:
        answer = await it.ask("hello world", data_parallel_rank=7)
    assert (answer.headers["x-kvherd-worker"], "x-kvherd-rank" in answer.headers) == (ANN, False)


async def test_a_rank_of_thousands_of_digits_is_none() -> None:
    async with herd(fake(ANN)) as it:
        headers = ((b"x-data-parallel-rank", b"9" * 9000),)
        assert (await it.send({"model": "m", "prompt": "hi"}, headers=headers)).status == 200


async def test_ranks_that_cannot_be_named_are_credited_with_what_all_of_them_hold() -> None:
    async with herd(FakeWorker(ANN, facts=replace(FACTS, ranks=2))) as it:
        it.store(ANN, "hello worl", rank=1)
        answer = await it.ask("hello world")
        it.store(ANN, "hello", rank=0)
        again = await it.ask("hello world")
    assert answer.headers["x-kvherd-predicted-cached-tokens"] == "0"
    assert again.headers["x-kvherd-predicted-cached-tokens"] == "5"


async def test_the_last_token_is_never_predicted_to_be_cached() -> None:
    async with herd(fake(ANN)) as it:
        it.store(ANN, "hello worl")
        answer = await it.ask("hello worl")
    assert answer.headers["x-kvherd-predicted-cached-tokens"] == "5"


async def test_a_quarantined_worker_gets_no_credit_and_still_serves() -> None:
    async with herd(fake(ANN)) as it:
        it.store(ANN, "hello worl")
        it.standings[ANN].take(FollowState.QUARANTINED)
        answer = await it.ask("hello world")
    assert (answer.status, answer.headers["x-kvherd-predicted-cached-tokens"]) == (200, "0")


async def test_requests_that_come_together_follow_the_first_to_its_worker() -> None:
    async with herd(fake(ANN, first_byte_s=1.0), fake(BOB, first_byte_s=1.0)) as it:
        shared = "a prefix that is long enough to matter, " * 50
        async with asyncio.TaskGroup() as group:
            first = group.create_task(it.ask(shared + "one"))
            await asyncio.sleep(0.9)
            second = group.create_task(it.ask(shared + "two"))
        assert first.result().headers["x-kvherd-worker"] == second.result().headers["x-kvherd-worker"]
        assert second.result().headers["x-kvherd-predicted-cached-tokens"] == "2000"


async def test_a_worker_that_fails_before_its_first_byte_is_replaced() -> None:
    async with herd(fake(ANN), fake(BOB)) as it:
        it.workers[ANN].fails = WorkerUnreachable(ANN)
        answers = [await it.ask() for _ in range(4)]
    assert [answer.headers["x-kvherd-worker"] for answer in answers] == [BOB] * 4


async def test_only_a_whole_answer_is_told_to_who_keeps_account_of_the_worker() -> None:
    async with herd(fake(ANN)) as it:
        await it.ask("hello")
        assert it.entries.answers == [ANN]
        it.workers[ANN].breaks = "died"
        with suppress(WorkerFailed):
            await it.ask("hello")
        assert it.entries.answers == [ANN]


async def test_a_worker_that_fails_after_its_first_byte_is_not() -> None:
    async with herd(fake(ANN, breaks="died"), fake(BOB, breaks="died")) as it:
        answer = await it.ask()
    assert (answer.status, answer.failed) == (200, "died")
    assert len(it.workers[ANN].calls) + len(it.workers[BOB].calls) == 1


async def test_a_worker_that_forgets_to_end_its_broken_answer_does_not_leave_the_client_waiting() -> None:
    class Forgetful(FakeWorker):
        async def forward(self, call: object, responder: FakeResponder) -> None:  # type: ignore[override]
            responder.start(200, [])
            raise WorkerFailed(self.id, "died")

    async with herd(Forgetful(ANN, facts=FACTS)) as it:
        answer = await it.ask()
    assert answer.failed == "grpc://ann:1 failed: died"


async def test_tries_are_bounded() -> None:
    names = [WorkerId(f"grpc://w{n}:1") for n in range(5)]
    async with herd(*(fake(name) for name in names), config=PathConfig(tries=2)) as it:
        for name in names:
            it.workers[name].fails = WorkerFailed(name, "died")
        with pytest.raises(WorkerFailed):
            await it.ask()
        assert sum(len(worker.calls) for worker in it.workers.values()) == 2


async def test_a_stored_conversation_is_never_tried_twice() -> None:
    async with herd(fake(ANN), fake(BOB)) as it:
        for name, worker in it.workers.items():
            worker.fails = WorkerFailed(name, "died")
        with pytest.raises(WorkerFailed):
            await it.send({"model": "m", "input": "hi"}, path="/v1/responses")
        assert sum(len(worker.calls) for worker in it.workers.values()) == 1


async def test_what_one_worker_keeps_is_asked_of_no_other() -> None:
    async with herd(fake(ANN), fake(BOB)) as it:
        for keeper in (ANN, BOB, BOB, BOB):
            answer = await it.send({"model": "m", "input": "hi"}, path="/v1/responses", keeper=keeper)
            assert answer.headers["x-kvherd-worker"] == keeper
            assert (await it.send(b"", path="/v1/responses/resp_1", keeper=keeper)).status == 200
        it.member(BOB).draining = True
        with pytest.raises(NoWorker, match="is draining"):
            await it.send(b"", path="/v1/responses/resp_1", keeper=BOB)
        with pytest.raises(BodyNotJson):
            await it.send(b"", path="/v1/responses", keeper=ANN)


async def test_nobody_left_is_said_with_the_reasons() -> None:
    async with herd(fake(ANN)) as it:
        it.workers[ANN].fails = WorkerUnreachable(ANN, "connection refused")
        with pytest.raises(NoWorker) as caught:
            await it.ask()
        assert "connection refused" in str(caught.value)
        await asyncio.sleep(5.0)
        with pytest.raises(NoWorker, match="is down"):
            await it.ask()


async def test_a_fleet_in_trouble_says_so_however_often_it_is_asked() -> None:
    async with herd(fake(ANN)) as it:
        it.workers[ANN].fails = WorkerUnreachable(ANN, "connection refused")
        for _ in range(50):
            with pytest.raises(NoWorker):
                await it.ask()


async def test_retries_of_a_burst_are_bounded_and_those_that_are_not_made_are_counted() -> None:
    """1. Six hundred are sent to one worker of a gateway that was quiet. 2. It fails before it began any answer."""
    async with herd(fake(ANN, first_byte_s=2.0), fake(BOB)) as it:
        it.member(BOB).draining = True
        burst = [asyncio.ensure_future(it.ask()) for _ in range(600)]
        await asyncio.sleep(1.0)
        assert len(it.workers[ANN].calls) == 600
        it.member(BOB).draining = False
        it.workers[ANN].fails = WorkerFailed(ANN, "died")
        ended = await asyncio.gather(*burst, return_exceptions=True)
        assert sum(isinstance(one, FakeResponder) for one in ended) == 220, "a fifth of them, and 10 a second"
        assert sum(isinstance(one, WorkerFailed) for one in ended) == 380
        told = it.metrics.text().decode()
        assert f'kvherd_gateway_retries_total{{worker="{ANN}"}} 220.0' in told
        assert f'kvherd_gateway_retries_refused_total{{worker="{ANN}"}} 380.0' in told


async def test_requests_that_waited_for_longer_than_the_budget_looks_back_are_retried_as_others() -> None:
    async with herd(fake(ANN, first_byte_s=70.0), fake(BOB)) as it:
        it.member(BOB).draining = True
        burst = [asyncio.ensure_future(it.ask()) for _ in range(600)]
        await asyncio.sleep(60.0)
        it.member(BOB).draining = False
        it.workers[ANN].fails = WorkerFailed(ANN, "died")
        ended = await asyncio.gather(*burst, return_exceptions=True)
        assert sum(isinstance(one, FakeResponder) for one in ended) == 220


async def test_a_refusal_is_the_workers_own_and_no_sign_of_illness() -> None:
    async with herd(fake(ANN)) as it:
        it.workers[ANN].fails = WorkerRefused(ANN, "queue full")
        for _ in range(10):
            with pytest.raises(WorkerRefused):
                await it.ask()
        it.workers[ANN].fails = None
        assert (await it.ask()).status == 200


async def test_who_always_says_no_where_another_answers_is_asked_ever_more_rarely_however_well_it_did_before() -> None:
    async with herd(fake(ANN), fake(BOB)) as it:
        it.store(ANN, "hello world hello world")
        for _ in range(100):
            assert (await it.ask("hello world hello world")).headers["x-kvherd-worker"] == ANN
        it.workers[ANN].fails = WorkerRefused(ANN, "queue full")
        for _ in range(100):
            assert (await it.ask("hello world hello world")).headers["x-kvherd-worker"] == BOB
            await asyncio.sleep(0.01)
        assert len(it.workers[ANN].calls) == 100 + BreakerConfig().in_a_row
        await asyncio.sleep(BreakerConfig().open_s)
        assert (await it.ask("hello world hello world")).headers["x-kvherd-worker"] == BOB
        assert len(it.workers[ANN].calls) == 100 + BreakerConfig().in_a_row + 1, "one was to try it"
        assert it.member(ANN).breaker.state(asyncio.get_running_loop().time()) is BreakerState.OPEN


async def test_what_all_say_no_to_speaks_against_none() -> None:
    async with herd(fake(ANN), fake(BOB)) as it:
        for name, worker in it.workers.items():
            worker.fails = WorkerRefused(name, "too many")
        for _ in range(20):
            with pytest.raises(WorkerRefused):
                await it.ask()
        assert all(it.member(name).breaker.closed for name in it.workers)


class Broken(FakeWorker):
    """It answers whatever it is asked with an error of its own."""

    async def forward(self, call: Call, responder: Responder) -> None:
        self.calls.append(call)
        responder.start(500, [*call.extra_headers])
        responder.write(b'{"error": "out of memory"}')
        responder.end()


async def test_who_answers_all_with_an_error_of_its_own_is_not_given_all_that_comes() -> None:
    async with herd(Broken(ANN, facts=FACTS), fake(BOB)) as it:
        it.store(ANN, "hello world hello world")
        answers = [(await it.ask("hello world hello world")).status for _ in range(100)]
        assert answers == [500] * BreakerConfig().min_requests + [200] * (100 - BreakerConfig().min_requests)


async def test_where_all_answer_with_errors_of_their_own_somebody_is_asked_all_the_same() -> None:
    async with herd(Broken(ANN, facts=FACTS), Broken(BOB, facts=FACTS)) as it:
        assert {(await it.ask()).status for _ in range(100)} == {500}
        assert [it.member(name).breaker.closed for name in it.workers].count(True) == 1


async def test_an_error_of_the_caller_is_not_tried_elsewhere() -> None:
    class Strict(FakeWorker):
        async def forward(self, call: object, responder: object) -> None:
            self.calls.append(call)  # type: ignore[arg-type]
            raise FieldInvalid("temperature", "must be at least 0")

    async with herd(Strict(ANN, facts=FACTS), Strict(BOB, facts=FACTS)) as it:
        with pytest.raises(FieldInvalid):
            await it.ask()
        assert sum(len(worker.calls) for worker in it.workers.values()) == 1


async def test_a_worker_that_never_begins_is_given_up() -> None:
    async with herd(fake(ANN, first_byte_s=9000.0), config=PathConfig(bounds=Bounds(first_byte_s=60.0))) as it:
        with pytest.raises(WorkerTimedOut, match="within 60 s"):
            await it.ask()


async def test_a_worker_that_accepts_and_is_down_is_replaced_long_before_its_time() -> None:
    async with herd(fake(ANN, first_byte_s=9000.0), fake(BOB)) as it:
        it.store(ANN, "hello world hello world")

        async def stop() -> None:
            await asyncio.sleep(1.0)
            it.workers[ANN].fails = WorkerUnreachable(ANN, "nobody there")

        async with asyncio.TaskGroup() as group:
            group.create_task(stop())
            began_s = asyncio.get_running_loop().time()
            assert (await it.ask("hello world hello world")).headers["x-kvherd-worker"] == BOB
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(Bounds().down_s, abs=0.1)
        assert it.workers[ANN].cancelled == 1
        assert not it.member(ANN).in_flight


async def test_why_a_worker_is_down_stays_what_it_was_however_many_requests_find_it_so() -> None:
    """Each is told why, and what it is told says nothing new of the worker."""
    async with herd(fake(ANN, first_byte_s=9000.0)) as it:

        async def stop() -> None:
            await asyncio.sleep(1.0)
            it.workers[ANN].fails = WorkerFailed(ANN, "out of memory")

        stopping = asyncio.ensure_future(stop())
        told = await asyncio.gather(*(it.ask() for _ in range(20)), return_exceptions=True)
        await stopping
        assert {str(one).count("it gave no byte of an answer for 15 s") for one in told} == {1}
        assert it.member(ANN).reason == "failed: out of memory"


async def test_a_worker_that_is_slow_and_well_is_waited_for() -> None:
    async with herd(fake(ANN, first_byte_s=500.0), fake(BOB)) as it:
        it.store(ANN, "hello world hello world")
        assert (await it.ask("hello world hello world")).headers["x-kvherd-worker"] == ANN


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_s_own_deadline_ends_its_request_on_the_worker(begun: bool) -> None:
    class Slow(FakeWorker):
        async def forward(self, call: Call, responder: Responder) -> None:
            if begun:
                responder.start(200, [])
            await super().forward(call, responder)

    async with herd(Slow(ANN, facts=FACTS, first_byte_s=100.0)) as it:
        body = {"model": "m", "prompt": "hello"}
        with pytest.raises(DeadlinePassed, match=r"1\.5 s"):
            await it.send(body, headers=((b"x-request-timeout", b"1.5"),))
        assert it.workers[ANN].cancelled == 1
        assert it.member(ANN).failures_total == 0
        with pytest.raises(FieldInvalid, match="x-request-timeout"):
            await it.send(body, headers=((b"x-request-timeout", b"-1"),))
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()


async def test_each_worker_is_told_what_is_left_of_the_client_s_deadline() -> None:
    async with herd(fake(ANN, first_byte_s=2.0, fails=None), fake(BOB)) as it:
        it.store(ANN, "hello world hello world")

        async def break_down() -> None:
            await asyncio.sleep(1.0)
            it.workers[ANN].fails = WorkerFailed(ANN, "out of memory")

        async with asyncio.TaskGroup() as group:
            group.create_task(break_down())
            body = {"model": "m", "prompt": "hello world hello world"}
            answer = await it.send(body, headers=((b"x-request-timeout", b"5"), (b"x-other", b"1")))
        assert answer.headers["x-kvherd-worker"] == BOB
        told = [dict(worker.calls[0].headers) for worker in (it.workers[ANN], it.workers[BOB])]
        assert [one[b"x-request-timeout"] for one in told] == [b"5.000", b"3.000"]
        ends = [it.workers[worker].calls[0].ends for worker in (ANN, BOB)]
        assert ends == [(asyncio.get_running_loop().time() + 3.0, 5.0)] * 2, "it ends when it ends, whoever serves it"
        assert [one[b"x-other"] for one in told] == [b"1", b"1"]


class Moody(FakeWorker):
    """Its probes succeed; the requests of a model that is ill fail."""

    ill = False

    async def forward(self, call: Call, responder: Responder) -> None:
        if self.ill:
            self.calls.append(call)
            raise WorkerFailed(self.id, "out of memory")
        await super().forward(call, responder)


@asynccontextmanager
async def moody(**acts: object) -> AsyncIterator[tuple[Herd, Moody, Callable[[], Awaitable[str]]]]:
    """A worker that is preferred and another; the third asks one request and says who answered."""
    ann = Moody(ANN, facts=FACTS, **acts)  # type: ignore[arg-type]
    async with herd(ann, fake(BOB)) as it:
        it.store(ANN, "hello world hello world")

        async def ask() -> str:
            answer = await it.ask("hello world hello world")
            await asyncio.sleep(0.3)  # time for the probe that a failure brings
            return answer.headers["x-kvherd-worker"]

        yield it, ann, ask


async def test_a_worker_whose_circuit_opens_takes_no_new_request_and_finishes_its_streams() -> None:
    async with moody(chunk_s=10.0) as (it, ann, ask):
        stream = asyncio.ensure_future(it.ask("hello world hello world", stream=True))
        await asyncio.sleep(0.1)
        ann.ill = True
        assert {await ask() for _ in range(12)} == {BOB}, "each was tried elsewhere before its first byte"
        assert it.member(ANN).failures_total >= BreakerConfig().min_requests
        assert it.member(ANN).breaker.state(asyncio.get_running_loop().time()) is not BreakerState.CLOSED
        tried = len(ann.calls)
        assert (await ask(), len(ann.calls)) == (BOB, tried)
        assert not stream.done()
        assert (await stream).ended


async def test_when_its_time_is_over_one_request_tries_a_broken_worker_and_its_success_lets_all_in() -> None:
    async with moody() as (it, ann, ask):
        ann.ill = True
        for _ in range(BreakerConfig().min_requests):
            await ask()
        assert "its circuit breaker is open" in it.member(ANN).unavailable(asyncio.get_running_loop().time())
        ann.ill, ann.first_byte_s = False, 1.0
        await asyncio.sleep(BreakerConfig().open_s)
        many = await asyncio.gather(*(ask() for _ in range(8)))
        assert sorted(many) == [ANN] + 7 * [BOB]
        assert await ask() == ANN


async def test_the_log_tells_when_a_circuit_opens_and_when_it_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    async with moody() as (_, ann, ask):
        ann.ill = True
        for _ in range(10):
            await ask()
        ann.ill = False
        await asyncio.sleep(BreakerConfig().max_open_s)
        assert await ask() == ANN
    assert [line for line in caplog.messages if "circuit breaker" in line] == [
        f"worker {ANN} failed too often: its circuit breaker is open",
        f"worker {ANN} answers again: its circuit breaker is closed",
    ]


async def test_a_try_that_fails_keeps_a_broken_worker_out_for_longer_and_costs_its_client_nothing() -> None:
    async with moody() as (_, ann, ask):
        ann.ill = True
        tries = []
        for _ in range(400):
            before = len(ann.calls)
            assert await ask() == BOB
            if len(ann.calls) > before:
                tries.append(asyncio.get_running_loop().time())
        waits = [later - earlier for earlier, later in pairwise(tries[BreakerConfig().min_requests - 1 :])]
        assert waits[:4] == pytest.approx([1.5, 3.0, 6.0, 12.0], abs=0.31)
        assert max(waits) <= BreakerConfig().max_open_s


async def test_an_answer_that_has_begun_may_take_its_time() -> None:
    class Slow(FakeWorker):
        async def forward(self, call: object, responder: FakeResponder) -> None:  # type: ignore[override]
            responder.start(200, [])
            await asyncio.sleep(9000.0)
            responder.end()

    async with herd(Slow(ANN, facts=FACTS), config=PathConfig(bounds=Bounds(first_byte_s=60.0))) as it:
        assert (await it.ask()).ended


async def test_a_client_that_leaves_cancels_the_request() -> None:
    async with herd(fake(ANN, first_byte_s=60.0)) as it:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.0):
                await it.ask()
        member = it.fleet.roster.get(ANN)
        assert it.workers[ANN].cancelled == 1
        assert member is not None
        assert (member.in_flight, member.unavailable(1.0)) == ({}, "")


async def test_an_unknown_model_is_answered_with_those_there_are() -> None:
    async with herd(fake(ANN)) as it:
        with pytest.raises(ModelUnknown, match="served: m"):
            await it.send({"model": "x", "prompt": "hi"})


async def test_the_only_model_need_not_be_named() -> None:
    async with herd(fake(ANN)) as it:
        assert (await it.send({"text": "hi"}, path="/generate")).status == 200
        for body, sent in {
            b'{"prompt": "hi", "x": 1.50}': b'{"prompt": "hi", "x": 1.50,"model":"m"}',
            b'{"model": null, "prompt": "hi"}': b'{"model": "m", "prompt": "hi"}',
            b'{"model": "", "prompt": "hi"}': b'{"model": "m", "prompt": "hi"}',
            b'{"prompt": "hi", "y": {"model": null}}': b'{"prompt": "hi", "y": {"model": null},"model":"m"}',
        }.items():
            assert (await it.send(body)).status == 200
            assert it.workers[ANN].calls[-1].body == sent
    assert it.workers[ANN].calls[0].body == b'{"text": "hi"}'


async def test_of_several_models_one_must_be_named() -> None:
    other = FakeWorker(BOB, facts=replace(FACTS, models=("n",)))
    async with herd(fake(ANN), other) as it:
        with pytest.raises(FieldInvalid, match="name one of m, n"):
            await it.send({"prompt": "hi"})


async def test_workers_that_cannot_do_it_at_all_cost_neither_a_try_nor_an_unkind_status() -> None:
    names = [WorkerId(f"grpc://w{n}:1") for n in range(9)]
    async with herd(*(fake(name) for name in names), config=PathConfig(tries=2)) as it:
        for name in names:
            it.workers[name].fails = WorkerUnsupported(name, "POST /v1/embeddings over gRPC")
        for _ in range(30):
            with pytest.raises(Unsupported, match=r"^POST /v1/embeddings over gRPC is not supported here"):
                await it.send({"model": "m", "input": "hi"}, path="/v1/embeddings")
        it.workers[names[0]].fails = None
        assert (await it.send({"model": "m", "input": "hi"}, path="/v1/embeddings")).status == 200
        it.workers[names[0]].fails = WorkerUnreachable(names[0], "connection refused")
        with pytest.raises(NoWorker, match="connection refused"):
            await it.send({"model": "m", "input": "hi"}, path="/v1/embeddings")


@pytest.mark.parametrize(
    ("body", "error"), [(b"{", BodyNotJson), (b"[]", FieldInvalid), (b'{"model": 5}', FieldInvalid)]
)
async def test_a_body_that_cannot_be_read_is_the_callers_fault(body: bytes, error: type[KvherdError]) -> None:
    async with herd(fake(ANN)) as it:
        with pytest.raises(error):
            await it.send(body)


async def test_an_empty_fleet_has_no_worker_rather_than_no_model() -> None:
    async with herd() as it:
        with pytest.raises(NoWorker, match="none is registered"):
            await it.ask()


async def test_an_explanation_is_given_when_asked_for() -> None:
    async with herd(fake(ANN), fake(BOB)) as it:
        it.store(BOB, "hello worl")
        body = {"model": "m", "prompt": "hello world"}
        answer = await it.send(body, headers=((b"x-kvherd-explain", b"1"),))
        plain = await it.send(body)
    explained = json.loads(answer.headers["x-kvherd-explain"])
    assert explained["chosen"] == BOB
    assert [one["worker"] for one in explained["candidates"]] == [BOB, ANN]
    assert explained["candidates"][0]["costs_s"].keys() == {"backlog", "slots", "uncached", "evicted"}
    assert "x-kvherd-explain" not in plain.headers


async def test_two_requests_of_one_id_reach_a_worker_under_two() -> None:
    async with herd(fake(ANN, first_byte_s=1.0)) as it, asyncio.TaskGroup() as group:
        group.create_task(it.ask())
        group.create_task(it.ask())
        await asyncio.sleep(0.5)
        assert {call.request for call in it.workers[ANN].calls} == {"r", "r-2"}


@pytest.mark.net
async def test_two_requests_of_one_id_that_are_read_in_a_thread_reach_a_worker_under_two() -> None:
    both, named = asyncio.Event(), []

    class Together(FakeWorker):
        async def forward(self, call: Call, responder: Responder) -> None:
            named.append(call.request)
            if len(named) == 2:
                both.set()
            await both.wait()
            await super().forward(call, responder)

    async with herd(Together(ANN, facts=FACTS)) as it:
        await asyncio.gather(*(it.ask(f"{number} and so on" * 30_000) for number in range(2)))
        assert sorted(named) == ["r", "r-2"]
        assert not it.member(ANN).in_flight


async def test_names_for_many_requests_of_one_id_are_not_looked_for_from_the_first_one_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A proxy that gives every request the same id would have each pay for all others."""
    tried: list[str] = []

    def name(text: str) -> RequestId:
        tried.append(text)
        return RequestId(text)

    monkeypatch.setattr(chat, "RequestId", name)
    async with herd(fake(ANN, first_byte_s=1.0)) as it:
        for _ in range(2):
            many = [asyncio.ensure_future(it.ask()) for _ in range(300)]
            await asyncio.gather(*many)
        assert len({call.request for call in it.workers[ANN].calls}) == 300
    assert len(tried) < 2 * 300


async def test_the_log_has_the_figures_and_never_the_prompt(caplog: pytest.LogCaptureFixture) -> None:
    usage = Usage(prompt_tokens=11, cached_tokens=10, completion_tokens=2)
    async with herd(fake(ANN, usage=usage)) as it:
        it.store(ANN, "hello worl")
        with caplog.at_level(logging.INFO, "kvherd.access"):
            await it.ask("hello world")
        member = it.fleet.roster.get(ANN)
        assert member is not None
        assert (member.truth.decided, member.truth.error_rate) == (1, 0.0)
    line = json.loads(caplog.records[-1].message)
    assert (line["worker"], line["outcome"], line["status"]) == (ANN, "answered", 200)
    assert (line["prompt_tokens"], line["predicted_cached_tokens"], line["cached_tokens"]) == (11, 10, 10)
    assert "hello" not in caplog.text


async def test_the_line_of_a_stream_tells_the_time_to_and_between_its_tokens(caplog: pytest.LogCaptureFixture) -> None:
    usage = Usage(prompt_tokens=11, cached_tokens=10, completion_tokens=5)
    streaming = fake(ANN, usage=usage, first_byte_s=2.0, chunk_s=0.5)
    async with herd(streaming) as it:
        with caplog.at_level(logging.INFO, "kvherd.access"):
            await it.send(
                {"model": "m", "prompt": "secret words", "stream": True}, headers=((b"x-kvherd-explain", b"1"),)
            )
    line = json.loads(caplog.records[-1].message)
    assert line.pop("explain")["chosen"] == ANN
    assert line.pop("at").endswith("+00:00")
    assert line == {
        "request": "r",
        "key": None,
        "path": "/v1/completions",
        "model": "m",
        "worker": ANN,
        "rank": None,
        "stream": True,
        "outcome": "answered",
        "status": 200,
        "tries": 1,
        "prompt_tokens": 11,
        "completion_tokens": 5,
        "predicted_cached_tokens": 0,
        "cached_tokens": 10,
        "held_s": 0.0,
        "ttft_s": 2.0,
        "itl_s": 0.25,
        "seconds": 3.0,
    }
    assert "secret" not in caplog.text


async def test_what_was_waited_before_it_was_read_is_in_a_request_s_times(caplog: pytest.LogCaptureFixture) -> None:
    body = json.dumps({"model": "m", "prompt": "hello world", "stream": True}).encode()
    request = DataRequest("POST", "/v1/completions", "", [], body, "127.0.0.1", RequestId("r"))
    async with herd(fake(ANN, first_byte_s=2.0, chunk_s=0.5)) as it:
        with caplog.at_level(logging.INFO, "kvherd.access"):
            await it.path(request.changed(waited_s=4.0).changed(key="k"), FakeResponder())
    line = json.loads(caplog.records[-1].message)
    assert (line["ttft_s"], line["seconds"]) == (6.0, 7.0)
    told = it.metrics.text().decode()
    assert f'kvherd_gateway_time_to_first_token_seconds_sum{{worker="{ANN}"}} 6.0' in told
    assert f'kvherd_gateway_e2e_request_latency_seconds_sum{{worker="{ANN}"}} 7.0' in told


async def test_a_request_that_is_refused_has_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    async with herd(fake(ANN)) as it:
        with caplog.at_level(logging.INFO, "kvherd.access"), pytest.raises(ModelUnknown):
            await it.send({"model": "other", "prompt": "secret words"})
    line = json.loads(caplog.records[-1].message)
    assert (line["request"], line["outcome"], line["status"]) == ("r", "ModelUnknown", 404)
    assert "secret" not in caplog.text


async def test_a_request_that_no_worker_answers_has_the_status_that_its_client_was_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with herd(fake(ANN)) as it:
        it.workers[ANN].fails = WorkerFailed(ANN, "broke")
        with caplog.at_level(logging.INFO, "kvherd.access"), pytest.raises(NoWorker):
            await it.ask("secret words")
    line = json.loads(caplog.records[-1].message)
    assert (line["worker"], line["outcome"], line["status"], line["tries"]) == (ANN, "NoWorker", 503, 1)
    assert "secret" not in caplog.text


async def test_a_client_that_left_before_an_answer_was_told_no_status(caplog: pytest.LogCaptureFixture) -> None:
    async with herd(fake(ANN, first_byte_s=3600.0)) as it:
        asking = asyncio.ensure_future(it.ask("secret words"))
        await asyncio.sleep(1.0)
        with caplog.at_level(logging.INFO, "kvherd.access"):
            asking.cancel()
            await asyncio.wait([asking])
    line = json.loads(caplog.records[-1].message)
    assert (line["outcome"], line["status"], line["worker"], line["tries"]) == ("left", None, ANN, 1)


async def test_every_try_counts_however_it_ended(caplog: pytest.LogCaptureFixture) -> None:
    """1. One worker fails before its answer begins. 2. Of another's the client's own time is over."""
    async with herd(fake(ANN), fake(BOB, first_byte_s=100.0)) as it:
        it.store(ANN, "hello world hello world")
        it.workers[ANN].fails = WorkerFailed(ANN, "broke")
        body = {"model": "m", "prompt": "hello world hello world"}
        with caplog.at_level(logging.INFO, "kvherd.access"), pytest.raises(DeadlinePassed):
            await it.send(body, headers=((b"x-request-timeout", b"5"),))
    line = json.loads(caplog.records[-1].message)
    assert (line["outcome"], line["worker"], line["tries"]) == ("DeadlinePassed", BOB, 2)


async def test_a_stream_teaches_the_prefill_rate() -> None:
    async with herd(fake(ANN, first_byte_s=2.0)) as it:
        await it.ask("x" * 400, stream=True)
        member = it.fleet.roster.get(ANN)
        assert member is not None
        assert member.rate.learned == pytest.approx(200.0)


async def test_a_worker_that_has_not_shown_its_rate_is_thought_as_fast_as_its_peers() -> None:
    async with herd(fake(ANN, first_byte_s=0.01), fake(BOB, first_byte_s=0.01)) as it:
        await it.ask("x" * 4000, stream=True)
        answer = await it.send({"model": "m", "prompt": "y" * 4000}, headers=((b"x-kvherd-explain", b"1"),))
    first, second = json.loads(answer.headers["x-kvherd-explain"])["candidates"]
    assert first["costs_s"]["uncached"] == second["costs_s"]["uncached"] < 0.1


async def test_an_answer_that_does_not_say_what_was_cached_decides_nothing() -> None:
    silent, telling = Usage(11, None, 2), Usage(11, 0, 2)
    async with herd(fake(ANN, usage=silent)) as it:
        truth = it.member(ANN).truth
        await it.ask()
        assert (truth.unavailable, truth.decided, truth.tells) == (1, 0, False)
        it.workers[ANN].usage = telling
        await it.ask()
        assert (truth.unavailable, truth.decided, truth.tells) == (1, 1, True)


async def test_of_a_vllm_that_was_seen_to_tell_silence_is_a_zero() -> None:
    worker = FakeWorker(ANN, facts=WorkerFacts(WorkerKind.VLLM_HTTP, ("m",), block_size=5), usage=Usage(11, 10, 2))
    async with herd(worker) as it:
        it.store(ANN, "hello worl")
        await it.ask("hello world")
        worker.usage = Usage(11, None, 2)
        await it.ask("other world")
        truth = it.member(ANN).truth
        assert (truth.decided, truth.wrong, truth.unavailable) == (2, 0, 0)


@pytest.mark.parametrize(("host", "storage"), [(5, 0), (0, 5), (2, 3)])
async def test_tokens_that_came_from_elsewhere_were_not_predicted_to_be_on_the_device(host: int, storage: int) -> None:
    usage = Usage(11, 10, 2, host_tokens=host, storage_tokens=storage)
    async with herd(fake(ANN, usage=usage)) as it:
        it.store(ANN, "hello")
        await it.ask("hello world")
        assert (it.member(ANN).truth.decided, it.member(ANN).truth.wrong) == (1, 0)


async def test_more_than_was_predicted_may_have_come_from_another_tier_where_there_is_one() -> None:
    async with herd(fake(ANN, usage=Usage(11, 10, 2))) as it:
        it.entries.tiers = True
        it.store(ANN, "hello")
        await it.ask("hello world")
        assert it.member(ANN).truth.undecided_by == {"other tiers": 1}
        it.workers[ANN].usage = Usage(11, 7, 2)
        await it.ask("hello world")
        it.workers[ANN].usage = Usage(11, 0, 2)
        await it.ask("hello world")
        assert (it.member(ANN).truth.decided, it.member(ANN).truth.wrong) == (2, 1)


async def test_requests_that_overlap_decide_nothing_even_if_one_fits_within_the_other() -> None:
    async with herd(fake(ANN, first_byte_s=9.0, usage=Usage(11, 0, 2))) as it, asyncio.TaskGroup() as group:
        group.create_task(it.ask())
        await asyncio.sleep(1.0)
        it.workers[ANN].first_byte_s = 1.0
        await it.ask()
        await asyncio.sleep(8.0)
        truth = it.member(ANN).truth
        assert (truth.undecided_by, truth.decided) == ({"overlap": 2}, 0)
    assert it.entries.watches == [], "whatever is watched is let go"


async def test_an_engine_that_runs_what_we_did_not_send_decides_nothing() -> None:
    async with herd(fake(ANN, usage=Usage(11, 0, 2), loaded=WorkerLoad(running=1, waiting=0))) as it:
        await it.ask()
        assert it.member(ANN).truth.undecided_by == {"overlap elsewhere": 1}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"n": 2}, "several"),
        ({"prompt": ["hello world", "b"]}, "several"),
        ({"prompt": "other length"}, "tokens differ"),
    ],
)
async def test_answers_about_more_or_other_than_was_predicted_decide_nothing(more: dict[str, object], why: str) -> None:
    async with herd(fake(ANN, usage=Usage(11, 0, 2))) as it:
        await it.ask(**more)  # type: ignore[arg-type]
        assert it.member(ANN).truth.undecided_by == {why: 1}


async def test_a_quarantined_worker_decides_nothing() -> None:
    async with herd(fake(ANN, usage=Usage(11, 10, 2))) as it:
        it.standings[ANN].take(FollowState.QUARANTINED)
        await it.ask()
        assert it.member(ANN).truth.undecided_by == {"quarantined": 1}


async def test_the_third_wrong_answer_has_the_worker_rebuilt_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    async with herd(fake(ANN, usage=Usage(11, 10, 2))) as it:
        for _ in range(2):
            await it.ask("hello world")
        assert it.entries.rebuilt == {}
        await it.ask("hello world")
        assert "100.0%" in it.entries.rebuilt[ANN]
        truth = it.member(ANN).truth
        assert (truth.rebuilds, truth.error_rate, truth.wrong) == (1, 0.0, 3)
        it.entries.rebuilt.clear()
        for _ in range(3):
            await it.ask("hello world")
        assert it.entries.rebuilt == {}, "not again within a minute"
        await asyncio.sleep(60.0)
        await it.ask("hello world")
        assert it.entries.rebuilt.keys() == {ANN}
    assert any("is rebuilt from zero" in record.message for record in caplog.records)


EVENT_STREAM = ((b"content-type", b"text/event-stream"), (b"content-length", b"999"))
FINISH = b'data: {"choices":[{"finish_reason":"stop"}]}\n\n'
EXTRA = b'data: {"choices":[],"usage":{"prompt_tokens":11,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


class Streaming(FakeWorker):
    """Ends a stream with its usage if it is asked to, or `forced` to."""

    forced = False

    async def forward(self, call: Call, responder: Responder) -> None:
        self.usage = Usage(11, 0, 2) if self.forced or b"include_usage" in call.body else None
        self.chunks = (FINISH, EXTRA, DONE) if self.usage else (FINISH, DONE)
        await super().forward(call, responder)


def streaming(kind: WorkerKind = WorkerKind.VLLM_HTTP) -> Streaming:
    return Streaming(ANN, facts=WorkerFacts(kind, ("m",), block_size=5), answer_headers=EVENT_STREAM)


async def test_of_streams_that_ask_for_no_usage_some_are_asked_and_the_client_does_not_see_it() -> None:
    async with herd(streaming(), config=PathConfig(usage_sample=0.5), dice=[0.0, 0.0, 0.5, 0.0, 0.49]) as it:
        headers = ((b"accept-encoding", b"gzip"), (b"x-mine", b"1"))
        sent = b'{"model":"m","prompt":"hello world","temperature": 1.0e0,"stream":true}'
        answers = [await it.send(sent, headers=headers) for _ in range(3)]
        unseen, refused, sampled = it.workers[ANN].calls
        truth = it.member(ANN).truth
        assert (truth.decided, truth.unavailable) == (1, 2)
    assert [answer.body for answer in answers] == [FINISH + DONE] * 3
    assert [answer.ended for answer in answers] == [True] * 3
    assert unseen.body == refused.body == sent, "first it is seen what such a stream has by itself"
    assert sampled.body == sent[:-1] + b',"stream_options":{"include_usage":true}}'
    assert (list(unseen.headers), sampled.headers) == (list(headers), [(b"x-mine", b"1")])
    assert ("content-length" in answers[0].headers, "content-length" in answers[2].headers) == (True, False)


async def asked_of_streams(worker: Streaming, **more: object) -> list[bool]:
    """Of three streams in turn, which were asked for their usage by the gateway."""
    async with herd(worker, config=PathConfig(usage_sample=1.0)) as it:
        for _ in range(3):
            await it.ask(**{"stream": True, **more})  # type: ignore[arg-type]
        return [b'"include_usage":true' in call.body for call in it.workers[ANN].calls]


async def test_only_streams_whose_usage_could_decide_something_are_asked() -> None:
    assert await asked_of_streams(streaming()) == [False, True, True]
    assert not any(await asked_of_streams(streaming(), stream=False))
    assert not any(await asked_of_streams(streaming(), n=2))
    assert not any(await asked_of_streams(streaming(), stream_options={"include_usage": False}))
    assert not any(await asked_of_streams(streaming(WorkerKind.OPENAI_HTTP))), "it may refuse what it does not know"
    forced = streaming()
    forced.forced = True
    assert not any(await asked_of_streams(forced)), "its clients see the usage anyway"


async def test_an_engine_that_reports_no_cached_tokens_is_not_asked_again() -> None:
    worker = streaming()
    async with herd(worker, config=PathConfig(usage_sample=1.0)) as it:
        it.member(ANN).truth.used(None)
        for _ in range(3):
            await it.ask(stream=True)
        assert not any(b"include_usage" in call.body for call in worker.calls)


FULL = b',"vllm_xargs":{"kv_cache_report_mode":"full"}}'


def vllm(**acts: object) -> FakeWorker:
    facts = WorkerFacts(WorkerKind.VLLM_HTTP, ("m",), block_size=5)
    return FakeWorker(ANN, facts=facts, **acts)  # type: ignore[arg-type]


async def test_a_vllm_that_may_hold_untold_blocks_is_asked_to_tell_the_chains_that_are_not_known() -> None:
    async with herd(vllm()) as it:
        body = b'{"model":"m","prompt":"hello world"}'
        await it.send(body)
        doubt(it.followings[ANN])
        it.store(ANN, "hello")
        await it.send(body)
        it.store(ANN, "hello worl")
        await it.send(body)
        whole, healed, known = [call.body for call in it.workers[ANN].calls]
        assert (whole, healed, known) == (body, body[:-1] + FULL, body)
        assert it.member(ANN).healings == 1


@pytest.mark.parametrize("mode", [HealMode.OFF, HealMode.FLUSH])
async def test_nobody_is_asked_to_tell_where_an_operator_chose_otherwise(mode: HealMode) -> None:
    async with herd(vllm(), config=PathConfig(heal=mode)) as it:
        doubt(it.followings[ANN])
        await it.ask("hello world")
        assert b"vllm_xargs" not in it.workers[ANN].calls[0].body


async def test_only_a_vllm_whose_stream_is_live_is_asked_to_tell() -> None:
    async with herd(fake(ANN)) as it:
        doubt(it.followings[ANN])
        await it.ask("hello world")
        assert b"vllm_xargs" not in it.workers[ANN].calls[0].body, "SGLang knows no such thing"
    async with herd(vllm()) as it:
        doubt(it.followings[ANN])
        it.standings[ANN].take(FollowState.QUARANTINED)
        await it.ask("hello world")
        assert b"vllm_xargs" not in it.workers[ANN].calls[0].body, "what it tells is lost"


async def test_of_a_worker_that_may_hold_untold_blocks_more_than_was_predicted_is_no_error_and_less_is() -> None:
    async with herd(vllm(usage=Usage(11, 10, 2))) as it:
        doubt(it.followings[ANN])
        it.store(ANN, "hello")
        await it.ask("hello world")
        truth = it.member(ANN).truth
        assert (truth.undecided_by, truth.wrong) == ({"incomplete": 1}, 0)
        it.workers[ANN].usage = Usage(11, 0, 2)
        await it.ask("hello world")
        assert (truth.decided, truth.wrong) == (1, 1)


async def test_a_stream_may_be_asked_for_both_and_the_client_s_own_fields_stay() -> None:
    worker = streaming()
    async with herd(worker, config=PathConfig(usage_sample=1.0)) as it:
        doubt(it.followings[ANN])
        sent = b'{"model":"m","prompt":"hello world", "stream" :true, "vllm_xargs": { "a": 1 }}'
        await it.send(sent)
        answer = await it.send(sent)
    assert worker.calls[1].body == (
        b'{"model":"m","prompt":"hello world", "stream" :true, "vllm_xargs": {"kv_cache_report_mode":"full", "a": 1 }'
        b',"stream_options":{"include_usage":true}}'
    )
    assert answer.body == FINISH + DONE


@pytest.mark.parametrize("policy", ["round_robin", "least_load", "power_of_two", "consistent_hash", "prefix_tree"])
async def test_policies_without_tokens_do_not_tokenize(policy: str) -> None:
    async with herd(fake(ANN), fake(BOB), policy=policy) as it:
        answer = await it.ask()
        assert answer.status == 200
        assert "x-kvherd-predicted-cached-tokens" not in answer.headers
        assert all(call.prompt_token_ids is None for worker in it.workers.values() for call in worker.calls)


async def test_round_robin_takes_turns() -> None:
    async with herd(fake(ANN), fake(BOB), policy="round_robin") as it:
        answers = [(await it.ask()).headers["x-kvherd-worker"] for _ in range(4)]
    assert answers == [ANN, BOB, ANN, BOB]


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "gpt", "prompt": "hi"}',
        b'{"prompt": "say \\"model\\": \\"gpt\\"", "x": {"model": "gpt"}, "model" : "gpt", "y": {"model": "gpt"}}',
    ],
)
async def test_an_alias_reaches_the_worker_under_the_model_s_own_name(body: bytes) -> None:
    async with herd(fake(ANN)) as it:
        it.fleet.roster.aliases = {"gpt": "m"}
        await it.send(body)
        call = it.workers[ANN].calls[0]
    assert call.model == "m"
    given, sent = json.loads(body), json.loads(call.body)
    assert sent == {**given, "model": "m"}
    assert len(call.body) == len(body) - 2


async def test_an_unknown_model_is_refused_with_those_there_are() -> None:
    async with herd(fake(ANN)) as it:
        it.fleet.roster.aliases = {"gpt": "m", "lost": "n"}
        with pytest.raises(ModelUnknown, match="model 'other' is not served here; served: m, gpt"):
            await it.send(b'{"model": "other", "prompt": "hi"}')
        with pytest.raises(NoWorker, match="no worker can serve 'n' now"):
            await it.send(b'{"model": "lost", "prompt": "hi"}')


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/completions"])
async def test_of_several_models_each_path_honours_the_one_that_is_asked_for(path: str) -> None:
    other = replace(FACTS, models=("n",))
    async with herd(fake(ANN), FakeWorker(BOB, facts=other)) as it:
        for model, worker in (("m", ANN), ("n", BOB), ("m", ANN)):
            answer = await it.send(b'{"model": "%b", "prompt": "hi"}' % model.encode(), path=path)
            assert answer.headers["x-kvherd-worker"] == worker
        with pytest.raises(FieldInvalid, match="model: is missing; name one of m, n"):
            await it.send(b'{"prompt": "hi"}', path=path)


# --- requests that no task waits for -------------------------------------------------------------------------------


def asks(prompt: str, name: str = "r") -> DataRequest:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    return DataRequest("POST", "/v1/completions", "", [], body, "127.0.0.1", RequestId(name))


async def test_a_client_that_leaves_in_the_turn_in_which_it_asked_costs_no_worker_anything() -> None:
    async with herd(fake(ANN)) as it:
        landings: list[object] = []
        flight = it.path.launch(asks("hello"), FakeResponder(), landings.append)
        assert flight is not None
        flight.cancel()
        await asyncio.sleep(1.0)
        assert (it.workers[ANN].calls, landings) == ([], [])
        assert (it.member(ANN).in_flight, it.path._alive) == ({}, {})


async def test_a_prompt_that_breaks_what_reads_it_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(self: ByteTokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if text == "bad":
            raise RuntimeError(text)
        return list(text.encode())

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    async with herd(fake(ANN)) as it:
        outcomes: dict[str, object] = {}
        for name, prompt in (("r", "bad"), ("s", "good")):
            assert it.path.launch(asks(prompt, name), FakeResponder(), partial(outcomes.__setitem__, name)) is not None
        await asyncio.sleep(1.0)
        assert isinstance(outcomes["r"], RuntimeError)
        assert [call.request for call in it.workers[ANN].calls] in (["s"], [])
        assert "r" not in it.path._alive


async def test_the_prompts_of_a_turn_are_read_before_any_of_its_requests_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    encode = ByteTokenizer.encode

    def noted(self: ByteTokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
        log.append(f"read {text}")
        return encode(self, text, add_special_tokens=add_special_tokens)

    class Noting(FakeWorker):
        async def forward(self, call: Call, responder: Responder) -> None:
            log.append(f"send {call.request}")
            await super().forward(call, responder)

    monkeypatch.setattr(ByteTokenizer, "encode", noted)
    async with herd(Noting(ANN, facts=FACTS)) as it:
        log.clear()
        for name in ("r", "s"):
            assert it.path.launch(asks(f"hello {name}", name), FakeResponder(), lambda _: None) is not None
        assert log == [], "all that the turn reads comes first"
        await asyncio.sleep(1.0)
        assert [line for line in log if "hello" in line or "send" in line][:2] == ["read hello r", "read hello s"]
