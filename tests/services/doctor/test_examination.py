"""The doctor before servers that have what goes wrong in the field."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import pytest

from kvherd.core.errors import OptionInvalid, StartFailed, WorkerFailed, WorkerLocked, WorkerRefused, WorkerUnreachable
from kvherd.core.ids import EngineHash, Epoch, Rank, WorkerId
from kvherd.core.kv.events import BlocksStored, KvEventBatch
from kvherd.core.kv.frames import Connected, Disconnected, Frame, Received, Replayed
from kvherd.core.kv.stream import EventsUnsupported, StreamBroken
from kvherd.ports.completions import Tokenizer, Usage
from kvherd.ports.kv_feed import FeedItem, Subscribed
from kvherd.ports.worker import Call, Responder, WorkerFacts, WorkerKind
from kvherd.services.doctor.examination import examine
from kvherd.services.doctor.findings import Diagnosis, Finding, Verdict
from kvherd.services.doctor.instruments import Complaint, Instruments
from kvherd.testing.kv_feeds import OpenFeed
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.testing.workers import HOURS, FakeWorker
from kvherd.wire.openai.tokens import TokenizeText, decode_tokenize
from kvherd.wire.vllm_kv import encode_batch

ANN = WorkerId("http://ann:1")
VLLM = WorkerFacts(WorkerKind.VLLM_HTTP, ("m",), block_size=16, version="0.32.0", max_context_tokens=1024)
SGLANG = replace(VLLM, kind=WorkerKind.SGLANG_HTTP, version="0.5.23")
KVHERD_GRPC = replace(VLLM, kind=WorkerKind.SGLANG_GRPC, version="kvherd-0.1.0")
NOW_S = 1_000.0
STORED = BlocksStored((EngineHash(1),), None, tuple(range(16)), 16)


def same(body: bytes) -> list[int]:
    call, tokenizer = decode_tokenize(body), ByteTokenizer()
    return tokenizer.encode(call.prompt if isinstance(call, TokenizeText) else tokenizer.render_chat(call))


@dataclass(frozen=True)
class FakeAnswer:
    status: int
    document: Mapping[str, Any] = field(default_factory=dict)

    def document_if_ok(self) -> Mapping[str, Any]:
        return self.document if self.status == 200 else {}


@dataclass
class FakeDoor:
    """Knows these `METHOD path`, and no others."""

    answers: dict[str, FakeAnswer] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    takes_s: float = 0.0

    async def ask(self, method: str, path: str) -> FakeAnswer:
        self.asked.append(f"{method} {path}")
        await asyncio.sleep(self.takes_s)
        return self.answers.get(f"{method} {path}", FakeAnswer(404))


@dataclass
class FakeFrames:
    """One rank's publisher, as `FrameFeed`. `publishes` has the payloads that a request brings."""

    connects: bool = True
    publishes: list[bytes] = field(default_factory=lambda: [encode_batch(NOW_S, (STORED,), Rank(0))])
    first: int = 0
    answers: bool = True
    can_replay: bool = True
    bad_frames: int = 0
    refuses: Exception | None = None
    live: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    told: bool = False

    async def __aenter__(self) -> Self:
        if self.refuses is not None:
            raise self.refuses
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    async def next(self, *, within_s: float) -> Received | Connected | Disconnected | None:
        if self.connects and not self.told:
            self.told = True
            return Connected()
        try:
            async with asyncio.timeout(within_s):
                return Received(Frame(0, await self.live.get()))
        except TimeoutError:
            return None

    async def replay(self, start: int, *, silence_s: float) -> Replayed:
        frames = (Frame(self.first, b""),) if self.publishes and self.answers else ()
        return Replayed(frames, ended=self.answers)


@dataclass
class FakeStream(OpenFeed):
    """A stream over gRPC."""

    epoch: Epoch | None = field(default_factory=lambda: Epoch("e" * 32))
    refuses: Exception | None = None
    live: asyncio.Queue[BlocksStored] = field(default_factory=asyncio.Queue)
    silent: bool = False

    async def subscribe(self, cursors: dict[Rank, int], epoch: Epoch | None) -> AsyncGenerator[FeedItem, None]:
        if self.silent:
            await asyncio.sleep(9 * HOURS)
        if isinstance(self.refuses, EventsUnsupported):
            raise self.refuses
        yield Subscribed(self.epoch)
        if self.refuses is not None:
            raise self.refuses
        while True:
            yield KvEventBatch(1, NOW_S, Rank(0), (await self.live.get(),))


class Engine(FakeWorker):
    """Its requests bring what its publisher publishes."""

    frames: FakeFrames | None = None
    second: FakeFrames | None = None
    """Rank 1's."""
    stream: FakeStream | None = None
    tokenizes_s = 0.0

    async def tokenize(self, body: bytes) -> list[int]:
        await asyncio.sleep(self.tokenizes_s)
        return await super().tokenize(body)

    async def forward(self, call: Call, responder: Responder) -> None:
        await super().forward(call, responder)
        if self.second is not None and call.rank == 1:
            for payload in self.second.publishes:
                self.second.live.put_nowait(payload)
        elif self.frames is not None:
            for payload in self.frames.publishes:
                self.frames.live.put_nowait(payload)
        if self.stream is not None:
            self.stream.live.put_nowait(STORED)


@dataclass
class Patient:
    """A server that has nothing wrong, but for what a test changes."""

    facts: WorkerFacts = VLLM
    frames: FakeFrames = field(default_factory=FakeFrames)
    second: FakeFrames | None = None
    stream: FakeStream = field(default_factory=FakeStream)
    door: FakeDoor = field(default_factory=lambda: FakeDoor({"OPTIONS /reset_prefix_cache": FakeAnswer(405)}))
    tokens: Callable[[bytes], list[int]] | None = same
    usage: Usage | None = field(default_factory=lambda: Usage(40, 32, 1))
    fails: Exception | None = None
    methods: frozenset[str] = frozenset({"FlushCache"})
    wall_s: float = NOW_S
    expires_at_s: float | None = None
    opened: list[tuple[str, str | None, int, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.worker = Engine(ANN, self.facts, tokens=self.tokens, usage=self.usage)
        self.worker.frames, self.worker.second, self.worker.stream = self.frames, self.second, self.stream

    async def examined(self, url: str = ANN, **complaint: Any) -> dict[str, Finding]:
        diagnosis = await self.diagnosis(url, **complaint)
        return {one.check: one for one in diagnosis.findings}

    async def diagnosis(self, url: str = ANN, **complaint: Any) -> Diagnosis:
        named = {"events": "tcp://ann:5557", "replay": "tcp://ann:5657", "tokenizer": "/model"} | complaint
        self.worker.fails = self.fails  # type: ignore[assignment]

        async def tokenizer(_: str) -> Tokenizer:
            return ByteTokenizer()

        async def methods() -> frozenset[str]:
            return self.methods

        def frames(events: str, replay: str | None, ranks: int, bind: bool) -> dict[Rank, FakeFrames]:
            self.opened.append((events, replay, ranks, bind))
            self.frames.can_replay = replay is not None
            return {Rank(0): self.frames} | ({Rank(1): self.second} if self.second else {})

        over_http = url.startswith("http")
        instruments = Instruments(
            worker=self.worker,
            door=self.door if over_http else None,
            methods=None if over_http else methods,
            frames=frames,
            feed=lambda _: self.stream,
            tokenizer=tokenizer,
            wall=lambda: self.wall_s,
            expires_at_s=lambda: self.expires_at_s,
        )
        async with asyncio.timeout(61.0):
            return await examine(Complaint(url=url, **named), instruments, nonce="n")


def verdicts(findings: Mapping[str, Finding]) -> set[Verdict]:
    return {one.verdict for one in findings.values()}


async def test_a_healthy_vllm_is_told_so_and_nothing_of_it_is_flushed() -> None:
    patient = Patient()
    findings = await patient.examined()
    assert verdicts(findings) == {Verdict.OK}, findings
    checks = "reachable kind health block.size ranks flush tokenizer tokenization KV.events events.arrive clock replay"
    assert list(findings) == [word.replace(".", " ") for word in checks.split()] + ["cached tokens", "usage in streams"]
    assert patient.worker.flushes == 0
    assert [one for one in patient.door.asked if one.startswith("POST")] == []
    bodies = [json.loads(call.body) for call in patient.worker.calls]
    assert [body["max_tokens"] for body in bodies] == [1, 1, 1]
    assert len({body["prompt"] for body in bodies}) == 1


@pytest.mark.parametrize(("days", "verdict"), [(30, Verdict.OK), (13, Verdict.WARNING), (1, Verdict.WARNING)])
async def test_a_certificate_that_expires_soon_is_a_warning(days: int, verdict: Verdict) -> None:
    found = (await Patient(expires_at_s=NOW_S + days * 24 * HOURS).examined())["certificate"]
    assert (found.verdict, found.seen) == (verdict, f"its certificate expires in {days:.1f} days")


async def test_without_requests_none_is_sent() -> None:
    patient = Patient()
    findings = await patient.examined(requests=False)
    assert patient.worker.calls == []
    unseen = {check for check, one in findings.items() if one.verdict is Verdict.UNKNOWN}
    assert unseen == {"events arrive", "cached tokens", "usage in streams"}


@pytest.mark.parametrize("fails", [WorkerUnreachable(ANN), WorkerRefused(ANN, "HTTP 401")])
async def test_a_server_that_cannot_be_reached_is_the_only_finding(fails: Exception) -> None:
    diagnosis = await Patient(fails=fails).diagnosis()
    assert (diagnosis.reachable, diagnosis.fine) == (False, False)
    assert [one.check for one in diagnosis.findings] == ["reachable"]


@pytest.mark.parametrize("shown", [False, True])
async def test_a_server_that_wants_a_key_is_reached_and_says_how_to_give_it_one(shown: bool) -> None:
    diagnosis = await Patient(fails=WorkerLocked(ANN, 401, shown)).diagnosis()
    assert (diagnosis.reachable, diagnosis.fine) == (True, False)
    reached, key = diagnosis.findings
    assert (reached.verdict, key.check, key.verdict) == (Verdict.OK, "API key", Verdict.PROBLEM)
    assert ("does not accept" in key.seen) is shown
    assert "KVHERD_ENGINE_API_KEY" in key.advice


async def test_a_server_that_says_nothing_costs_its_deadline() -> None:
    patient = Patient()
    patient.worker.opens_s = 9 * HOURS
    before_s = asyncio.get_running_loop().time()
    diagnosis = await patient.diagnosis()
    assert not diagnosis.reachable
    assert asyncio.get_running_loop().time() - before_s == 8.0


async def test_a_server_that_hangs_over_everything_is_examined_within_a_minute() -> None:
    patient = Patient(frames=FakeFrames(publishes=[]), door=FakeDoor(takes_s=9 * HOURS))
    patient.worker.first_byte_s = patient.worker.tokenizes_s = 9 * HOURS
    before_s = asyncio.get_running_loop().time()
    findings = await patient.examined()
    assert asyncio.get_running_loop().time() - before_s <= 60.0
    assert findings["cached tokens"].verdict is findings["flush"].verdict is Verdict.UNKNOWN
    assert findings["tokenization"].verdict is Verdict.UNKNOWN
    arrive = findings["events arrive"]
    assert (arrive.verdict, "no answer within" in arrive.seen) == (Verdict.UNKNOWN, True)
    assert len(patient.worker.calls) == 1, "a server that is too slow is asked once"


async def test_events_of_a_slow_server_are_waited_for_as_long_as_its_answer() -> None:
    patient = Patient()
    patient.worker.first_byte_s = 8.0
    findings = await patient.examined()
    assert findings["events arrive"].verdict is findings["cached tokens"].verdict is Verdict.OK


async def test_a_vllm_without_development_mode_cannot_be_flushed_and_the_variable_is_named() -> None:
    found = (await Patient(door=FakeDoor()).examined())["flush"]
    assert found.verdict is Verdict.WARNING
    assert "VLLM_SERVER_DEV_MODE=1" in found.advice


async def test_answers_without_cached_tokens_name_the_flag_of_their_engine() -> None:
    vllm = (await Patient(usage=Usage(40, None, 1)).examined())["cached tokens"]
    assert vllm.verdict is Verdict.WARNING
    assert "--enable-prompt-tokens-details" in vllm.advice
    sglang = (await Patient(facts=SGLANG, usage=Usage(40, None, 1)).examined())["cached tokens"]
    assert "--enable-cache-report" in sglang.advice


async def test_a_cache_that_caches_nothing_is_a_problem() -> None:
    found = (await Patient(usage=Usage(40, 0, 1)).examined())["cached tokens"]
    assert (found.verdict, "--enable-prefix-caching" in found.advice) == (Verdict.PROBLEM, True)


async def test_answers_without_usage_are_warned_of() -> None:
    findings = await Patient(usage=None).examined()
    assert findings["cached tokens"].verdict is findings["usage in streams"].verdict is Verdict.WARNING


async def test_an_endpoint_where_nobody_listens_may_be_one_that_the_engine_connects_to() -> None:
    patient = Patient(frames=FakeFrames(connects=False))
    found = (await patient.examined())["KV events"]
    assert found.verdict is Verdict.PROBLEM
    assert "--bind-events" in found.advice
    ipc = (await patient.examined(events="ipc:///a", replay=None))["KV events"]
    assert "--bind-events" not in ipc.advice
    assert "--kv-events-config" in ipc.advice
    bound = (await patient.examined(bind=True))["KV events"]
    assert bound.seen.startswith("nobody connected to tcp://ann:5557")


async def test_listening_where_somebody_listens_already_is_said() -> None:
    taken = StartFailed("the reader of KV events at tcp://ann:5557", "Address already in use")
    found = (await Patient(frames=FakeFrames(refuses=taken)).examined(bind=True))["KV events"]
    assert (found.verdict, "a bridge" in found.advice) == (Verdict.PROBLEM, True)
    found = (await Patient(frames=FakeFrames(refuses=OptionInvalid("events", "no such host"))).examined())["KV events"]
    assert found.seen == "events: no such host"


async def test_a_publisher_that_is_connected_and_silent_is_a_problem() -> None:
    patient = Patient(frames=FakeFrames(publishes=[]))
    assert (await patient.examined())["events arrive"].verdict is Verdict.PROBLEM
    first, second, *_ = (json.loads(call.body)["prompt"] for call in patient.worker.calls)
    assert first != second, "it may have published before it knew of us"


async def test_events_that_cannot_be_read_are_named() -> None:
    found = (await Patient(frames=FakeFrames(publishes=[b"\xc1"])).examined())["events arrive"]
    assert found.verdict is Verdict.PROBLEM
    assert "KV event" in found.seen


async def test_a_request_that_fails_leaves_open_whether_events_come() -> None:
    patient = Patient()
    patient.worker.breaks = "out of memory"
    findings = await patient.examined()
    assert findings["events arrive"].verdict is findings["cached tokens"].verdict is Verdict.UNKNOWN
    assert "out of memory" in findings["events arrive"].seen


async def test_a_request_that_is_refused_leaves_it_open_too() -> None:
    patient = Patient()
    patient.worker.status = 400
    found = (await patient.examined())["cached tokens"]
    assert (found.verdict, "HTTP 400" in found.seen) == (Verdict.UNKNOWN, True)


async def test_blocks_of_another_size_than_the_server_says_are_a_problem() -> None:
    other = BlocksStored((EngineHash(1),), None, tuple(range(32)), 32)
    frames = FakeFrames(publishes=[encode_batch(NOW_S, (other,), Rank(0))])
    assert (await Patient(frames=frames).examined())["block size of events"].verdict is Verdict.PROBLEM
    untold = Patient(facts=replace(VLLM, block_size=0))
    findings = await untold.examined()
    assert findings["block size"].verdict is Verdict.UNKNOWN
    assert findings["block size of events"].seen == "16 tokens"


@pytest.mark.parametrize(("size", "verdict"), [(1, Verdict.OK), (16, Verdict.OK), (1024, Verdict.WARNING)])
async def test_a_block_size_is_judged(size: int, verdict: Verdict) -> None:
    assert (await Patient(facts=replace(VLLM, block_size=size)).examined())["block size"].verdict is verdict


async def test_clocks_that_differ_are_warned_of() -> None:
    assert "5.0 s behind" in (await Patient(wall_s=NOW_S + 5).examined())["clock"].seen
    assert "5.0 s ahead" in (await Patient(wall_s=NOW_S - 5).examined())["clock"].seen


async def test_a_replay_that_is_missing_silent_or_short() -> None:
    missing = (await Patient().examined(replay=None))["replay"]
    assert (missing.verdict, "replay_endpoint" in missing.advice) == (Verdict.WARNING, True)
    assert (await Patient(frames=FakeFrames(answers=False)).examined())["replay"].verdict is Verdict.PROBLEM
    short = (await Patient(frames=FakeFrames(first=7)).examined())["replay"]
    assert (short.verdict, "batch 7" in short.seen) == (Verdict.WARNING, True)
    nothing = FakeFrames(publishes=[])
    assert (await Patient(frames=nothing).examined())["replay"].seen == "it answers, and nothing was published yet"


async def test_a_chat_template_that_differs_is_warned_of_by_class() -> None:
    def other(body: bytes) -> list[int]:
        tokens = same(body)
        return [*tokens[:3], 0, *tokens[3:]] if b'"tools"' in body else tokens

    findings = await Patient(tokens=other).examined()
    assert findings["tokenization: tools"].verdict is Verdict.WARNING
    assert "number 3 is the first that differs" in findings["tokenization: tools"].seen
    assert "tools" not in findings["tokenization"].seen


async def test_another_chat_template_is_a_problem_that_is_called_so() -> None:
    def other(body: bytes) -> list[int]:
        return [0, *same(body)] if b'"messages"' in body else same(body)

    findings = await Patient(tokens=other).examined()
    chat = findings["tokenization: chat"]
    assert (chat.verdict, "another chat template" in chat.advice) == (Verdict.PROBLEM, True)
    assert findings["tokenization"].seen.endswith(": text")


async def test_another_models_tokenizer_is_a_problem() -> None:
    diagnosis = await Patient(tokens=lambda _: [1, 2, 3]).diagnosis()
    wrong = [one for one in diagnosis.findings if one.check.startswith("tokenization")]
    assert {one.verdict for one in wrong} == {Verdict.PROBLEM}
    assert not diagnosis.fine


async def test_a_server_that_tells_no_tokens_or_refuses_some() -> None:
    assert (await Patient(tokens=None).examined())["tokenization"].verdict is Verdict.UNKNOWN

    def refuses(body: bytes) -> list[int]:
        if b'"tools"' in body:
            raise WorkerRefused(ANN, "no tools")
        return same(body)

    assert (await Patient(tokens=refuses).examined())["tokenization: tools"].verdict is Verdict.UNKNOWN


async def test_a_stock_server_without_a_named_tokenizer_earns_no_credit() -> None:
    found = (await Patient().examined(tokenizer=None))["tokenizer"]
    assert (found.verdict, "tokenizer=DIR" in found.advice) == (Verdict.PROBLEM, True)


async def test_what_is_no_engine_is_a_problem() -> None:
    assert (await Patient(facts=replace(VLLM, kind=WorkerKind.OPENAI_HTTP)).examined())[
        "kind"
    ].verdict is Verdict.PROBLEM
    assert (await Patient(facts=replace(VLLM, models=())).examined())["kind"].verdict is Verdict.PROBLEM


async def test_ranks_need_ports() -> None:
    two = replace(VLLM, ranks=2)
    assert (await Patient(facts=two).examined())["ranks"].verdict is Verdict.WARNING
    assert (await Patient(facts=two).examined(events="ipc:///a"))["ranks"].verdict is Verdict.PROBLEM


async def test_every_rank_is_sent_a_request_and_heard() -> None:
    patient = Patient(facts=replace(VLLM, ranks=2, addressable=True), second=FakeFrames())
    findings = await patient.examined()
    assert findings["events arrive"].seen == "requests were sent to every rank, and all 2 told of stored blocks"
    assert findings["replay"].seen.startswith("all 2 ranks answer")
    assert [call.rank for call in patient.worker.calls] == [0, 1, 0, 0], "the rest is about one rank's cache"


async def test_a_rank_that_is_not_heard_is_named() -> None:
    patient = Patient(facts=replace(VLLM, ranks=2, addressable=True), second=FakeFrames(publishes=[]))
    found = (await patient.examined())["events arrive"]
    assert (found.verdict, "nothing was told of 1 within" in found.seen) == (Verdict.PROBLEM, True)


async def test_a_repeated_prompt_may_have_gone_to_another_rank() -> None:
    patient = Patient(facts=replace(KVHERD_GRPC, ranks=2), usage=Usage(40, 0, 1))
    findings = await patient.examined("grpc://ann:1", events=None, replay=None, tokenizer=None)
    assert findings["cached tokens"].verdict is Verdict.UNKNOWN


async def test_sglang_says_itself_where_its_events_are() -> None:
    config = {"publisher": "zmq", "endpoint": "tcp://*:7", "replay_endpoint": "tcp://*:8"}
    info = FakeAnswer(200, {"kv_events_config": json.dumps(config), "kv_events": {"block_size": 16}})
    door = FakeDoor({"GET /server_info": info, "OPTIONS /flush_cache": FakeAnswer(405)})
    patient = Patient(facts=SGLANG, door=door)
    findings = await patient.examined(events=None, replay=None, host="ann")
    assert verdicts(findings) == {Verdict.OK}, findings
    assert patient.opened == [("tcp://ann:7", "tcp://ann:8", 1, False)]


async def test_an_engine_that_says_it_connects_is_listened_to_only_when_asked() -> None:
    info = FakeAnswer(
        200,
        {
            "vllm_config": {
                "kv_events_config": {
                    "enable_kv_cache_events": True,
                    "publisher": "zmq",
                    "endpoint": "tcp://127.0.0.1:7",
                }
            }
        },
    )
    patient = Patient(door=FakeDoor({"GET /server_info?config_format=json": info}))
    found = (await patient.examined(events=None, replay=None))["KV events"]
    assert (found.verdict, "--bind-events" in found.advice) == (Verdict.PROBLEM, True)
    assert patient.opened == []


def told_by_vllm(**config: object) -> FakeDoor:
    whole = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "ipc:///a", **config}
    info = FakeAnswer(200, {"vllm_config": {"kv_events_config": whole}})
    return FakeDoor({"GET /server_info?config_format=json": info, "OPTIONS /reset_prefix_cache": FakeAnswer(405)})


async def test_nobody_listens_in_the_place_of_an_engine_that_listens_itself() -> None:
    patient = Patient(door=told_by_vllm())
    found = (await patient.examined(events="ipc:///a", bind=True))["KV events"]
    assert (found.verdict, "leave --bind-events out" in found.advice) == (Verdict.PROBLEM, True)
    assert patient.opened == []


async def test_a_wrong_endpoint_is_told_from_the_one_that_the_engine_names() -> None:
    patient = Patient(door=told_by_vllm(), frames=FakeFrames(connects=False))
    found = (await patient.examined(events="ipc:///b"))["KV events"]
    assert "it says that its events are at ipc:///a" in found.seen


async def test_a_replay_that_was_not_named_and_is_there() -> None:
    patient = Patient(door=told_by_vllm(replay_endpoint="ipc:///r"))
    found = (await patient.examined(events="ipc:///a", replay=None))["replay"]
    assert (found.verdict, "ipc:///r" in found.seen) == (Verdict.WARNING, True)


@pytest.mark.parametrize(("facts", "flag"), [(VLLM, "enable_kv_cache_events"), (SGLANG, '"bind": true')])
async def test_events_that_are_off_are_switched_on_by_an_exact_flag(facts: WorkerFacts, flag: str) -> None:
    config: dict[str, Any] = {"vllm_config": {"kv_events_config": None}, "kv_events_config": None}
    door = FakeDoor(
        {path: FakeAnswer(200, config) for path in ("GET /server_info", "GET /server_info?config_format=json")}
    )
    if facts is SGLANG:
        del config["vllm_config"]
    found = (await Patient(facts=facts, door=door).examined(events=None, replay=None))["KV events"]
    assert found.verdict is Verdict.PROBLEM
    assert flag in found.advice


async def test_where_events_are_is_unknown_if_nobody_says() -> None:
    assert (await Patient().examined(events=None, replay=None))["KV events"].verdict is Verdict.UNKNOWN


async def test_our_engine_over_grpc() -> None:
    findings = await Patient(facts=KVHERD_GRPC).examined("grpc://ann:1", events=None, replay=None, tokenizer=None)
    assert verdicts(findings) == {Verdict.OK}, findings
    assert findings["events arrive"].seen.endswith("1 stored blocks were told of")


async def test_a_servicer_without_epoch_or_flush_is_warned_of() -> None:
    stock = replace(KVHERD_GRPC, version="0.5.23")
    patient = Patient(facts=stock, stream=FakeStream(epoch=None), methods=frozenset({"Generate"}))
    findings = await patient.examined("grpc://ann:1", events=None, replay=None, tokenizer=None)
    assert findings["KV events"].verdict is findings["flush"].verdict is Verdict.WARNING
    assert "kvherd bridge" in findings["KV events"].advice


@pytest.mark.parametrize(
    ("stream", "check", "seen"),
    [
        (FakeStream(refuses=EventsUnsupported()), "KV events", "publishes no KV events"),
        (FakeStream(refuses=StreamBroken("reset")), "events arrive", "reset"),
        (FakeStream(silent=True), "KV events", "did not accept a subscription within 4 s"),
    ],
    ids=["unsupported", "broken", "silent"],
)
async def test_a_stream_that_does_not_come(stream: FakeStream, check: str, seen: str) -> None:
    findings = await Patient(stream=stream).examined(events="grpc://bridge:1", replay=None)
    assert findings[check].verdict is Verdict.PROBLEM
    assert seen in findings[check].seen


async def test_a_sick_server_is_a_problem() -> None:
    patient = Patient()

    async def sick() -> None:
        raise WorkerFailed(ANN, "its engine died")

    patient.worker.probe = sick  # type: ignore[method-assign]
    found = (await patient.examined())["health"]
    assert (found.verdict, found.seen) == (Verdict.PROBLEM, "http://ann:1 failed: its engine died")


async def test_a_server_that_may_take_its_time_to_say_that_it_is_well_gets_it() -> None:
    patient = Patient()
    patient.worker.facts = replace(patient.worker.facts, health_s=20.0)

    async def slow() -> None:
        await asyncio.sleep(20.0)

    patient.worker.probe = slow  # type: ignore[method-assign]
    assert (await patient.examined())["health"].verdict is Verdict.OK


async def test_the_json_says_it_all() -> None:
    told = (await Patient(door=FakeDoor()).diagnosis()).as_json()
    assert (told["url"], told["reachable"], told["fine"]) == (ANN, True, True)
    flush = next(one for one in told["checks"] if one["check"] == "flush")
    assert flush["verdict"] == "warning"
    assert flush.keys() == {"check", "verdict", "seen", "do"}
