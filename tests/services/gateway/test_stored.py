"""What is kept under a name is asked for where it is kept, with workers that keep what the test says."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from kvherd.core.errors import FieldInvalid, WorkerFailed, WorkerUnreachable
from kvherd.core.fleet.refusals import DeadlinePassed, KeeperSilent, NameUnknown
from kvherd.core.fleet.spec import WorkerSpec
from kvherd.core.ids import RequestId, WorkerId
from kvherd.ports.worker import Call, Responder, WorkerFacts, WorkerKind
from kvherd.services.gateway.fleet.fleet import Fleet
from kvherd.services.gateway.metrics import GatewayMetrics
from kvherd.services.gateway.relay.edge import DataHandler, DataRequest
from kvherd.services.gateway.turns.access import AccessLog
from kvherd.services.gateway.turns.stored import at_keepers
from kvherd.testing.workers import FakeResponder, FakeWorker

ANN, BOB, CAT = (WorkerId(f"http://{name}:1") for name in ("ann", "bob", "cat"))
EVE = WorkerId("grpc://eve:1")
JSON = (b"content-type", b"application/json")


class NoFollowing:
    def remove(self, worker: WorkerId) -> None: ...


@dataclass
class Keeping(FakeWorker):
    """Answers 200 below a path that it keeps, 404 below others; `asked` are the calls that only asked for it."""

    keeps: set[str] = field(default_factory=set)
    hangs: bool = False
    takes_s: float = 0.0
    asked: list[str] = field(default_factory=list)

    async def forward(self, call: Call, responder: Responder) -> None:
        self.asked.append(call.path)
        if self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(self.takes_s)
        self._check()
        responder.start(200 if call.path in self.keeps else 404, [JSON])
        responder.end()


@dataclass
class Inner:
    """In place of the data path: keeps what it was told, and answers with `answer`."""

    answer: bytes = b"{}"
    type: bytes = b"application/json"
    status: int = 200
    worker: WorkerId = ANN
    more: tuple[tuple[bytes, bytes], ...] = ()
    keepers: list[WorkerId | None] = field(default_factory=list)
    requests: list[DataRequest] = field(default_factory=list)

    async def __call__(self, incoming: DataRequest, responder: Responder, keeper: WorkerId | None = None) -> None:
        self.keepers.append(keeper)
        self.requests.append(incoming)
        worker = (b"x-kvherd-worker", self.worker.encode())
        responder.start(self.status, [(b"content-type", self.type), worker, *self.more])
        responder.write(self.answer)
        responder.end()


@dataclass
class Room:
    handle: DataHandler
    inner: Inner
    fleet: Fleet
    workers: dict[WorkerId, Keeping]

    async def post(self, path: str = "/v1/responses", **body: object) -> FakeResponder:
        return await self.ask("POST", path, json.dumps(body).encode())

    async def ask(
        self, method: str, path: str, body: bytes = b"", more: tuple[tuple[bytes, bytes], ...] = ()
    ) -> FakeResponder:
        responder = FakeResponder()
        headers = [(b"accept-encoding", b"gzip"), (b"x-mine", b"1"), *more]
        await self.handle(DataRequest(method, path, "", headers, body, "127.0.0.1:1", RequestId("r")), responder)
        return responder

    @property
    def keeper(self) -> WorkerId | None:
        """That the data path was told last."""
        return self.inner.keepers[-1]


@asynccontextmanager
async def room(*names: WorkerId, most_names: int = 100) -> AsyncIterator[Room]:
    facts = WorkerFacts(WorkerKind.OPENAI_HTTP, ("m",))
    workers = {name: Keeping(name, facts=facts) for name in names}
    fleet = Fleet(
        worker_factory=lambda url, _: workers[WorkerId(url)],
        feed_factory=lambda _: None,  # type: ignore[arg-type,return-value]
        tokenizer_factory=lambda _: None,  # type: ignore[arg-type,return-value]
        following=NoFollowing(),  # type: ignore[arg-type]
    )
    inner = Inner()
    async with fleet:
        for name in names:
            fleet.add(WorkerSpec(name))
        await asyncio.sleep(0.1)
        handle = at_keepers(inner, fleet, AccessLog(GatewayMetrics()), most_names=most_names)
        yield Room(handle, inner, fleet, workers)


async def test_what_is_not_stored_goes_by_untouched() -> None:
    async with room(ANN, BOB) as it:
        await it.post("/v1/chat/completions", previous_response_id="resp_1")
        assert it.keeper is None
        assert (b"accept-encoding", b"gzip") in it.inner.requests[0].headers


async def test_a_response_goes_on_where_its_past_is() -> None:
    async with room(ANN, BOB) as it:
        it.inner.answer, it.inner.worker = b'{"id": "resp_1", "conversation": {"id": "conv_1"}}', BOB
        answer = await it.post(input="hi")
        assert (answer.body, it.keeper) == (it.inner.answer, None)
        assert it.inner.requests[0].headers == [(b"x-mine", b"1")]  # compressed, nothing could be learned
        it.inner.answer, it.inner.worker = b'{"id": "resp_2"}', ANN
        await it.post(input="and?", previous_response_id="resp_1")
        assert it.keeper == BOB
        await it.post(input="and?", conversation="conv_1")
        assert it.keeper == BOB
        for method, path in {"GET": "", "POST": "/cancel", "DELETE": ""}.items():
            await it.ask(method, f"/v1/responses/resp_1{path}")
            assert it.keeper == BOB
        assert not any(worker.asked for worker in it.workers.values())


async def test_to_find_who_keeps_it_is_part_of_what_a_client_s_own_deadline_allows() -> None:
    async with room(ANN, BOB) as it:
        it.workers[BOB].keeps, it.workers[BOB].takes_s = {"/v1/responses/resp_1"}, 3.0
        it.workers[ANN].hangs = True
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(DeadlinePassed, match=r"1\.5 s"):
            await it.ask("GET", "/v1/responses/resp_1", more=((b"x-request-timeout", b"1.5"),))
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(1.5)
        assert not it.inner.requests
        await it.ask("GET", "/v1/responses/resp_1", more=((b"x-request-timeout", b"5"),))
        assert (it.keeper, dict(it.inner.requests[0].headers)[b"x-request-timeout"]) == (BOB, b"2.000")
        assert it.inner.requests[0].waited_s == pytest.approx(3.0)
        with pytest.raises(FieldInvalid, match="x-request-timeout"):
            await it.ask("GET", "/v1/responses/resp_1", more=((b"x-request-timeout", b"soon"),))


async def test_once_it_is_found_nobody_waits_for_a_worker_that_is_silent() -> None:
    async with room(ANN, BOB, CAT) as it:
        it.workers[ANN].hangs = it.workers[CAT].hangs = True
        it.workers[BOB].keeps, it.workers[BOB].takes_s = {"/v1/responses/resp_1"}, 0.5
        began_s = asyncio.get_running_loop().time()
        await it.ask("GET", "/v1/responses/resp_1")
        assert it.keeper == BOB
        assert it.inner.requests[0].waited_s == pytest.approx(0.5)
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(0.5)


async def test_a_stream_s_name_is_known_before_the_stream_has_ended() -> None:
    async with room(ANN, BOB) as it:

        class Unfinished(Inner):
            async def __call__(
                self, incoming: DataRequest, responder: Responder, keeper: WorkerId | None = None
            ) -> None:
                self.keepers.append(keeper)
                responder.start(200, [(b"content-type", b"text/event-stream"), (b"x-kvherd-worker", BOB.encode())])
                responder.write(b'data: {"response": {"id": "resp_1"}}\n\n')
                responder.fail("the worker died")

        inner = Unfinished()
        handle = at_keepers(inner, it.fleet, AccessLog(GatewayMetrics()))
        for body in (b'{"stream": true}', b'{"previous_response_id": "resp_1"}'):
            request = DataRequest("POST", "/v1/responses", "", [], body, "127.0.0.1:1", RequestId("r"))
            await handle(request, FakeResponder())
        assert inner.keepers == [None, BOB]


async def test_a_name_that_another_gateway_saw_is_asked_for_once() -> None:
    async with room(ANN, BOB, EVE) as it:
        it.workers[BOB].keeps = {"/v1/responses/resp_1", "/v1/conversations/conv_1"}
        for _ in range(2):
            await it.post(previous_response_id="resp_1")
            assert it.keeper == BOB
        await it.post(conversation={"id": "conv_1"})
        await it.ask("GET", "/v1/conversations/conv_1/items")
        assert it.keeper == BOB
        assert it.workers[ANN].asked == it.workers[BOB].asked == ["/v1/responses/resp_1", "/v1/conversations/conv_1"]
        assert it.workers[EVE].asked == []


async def test_of_one_worker_nothing_is_asked_beforehand() -> None:
    async with room(ANN, EVE) as it:
        await it.ask("GET", "/v1/responses/resp_1")
        assert it.keeper == ANN
        assert it.workers[ANN].asked == []
    async with room(EVE) as it:
        await it.ask("GET", "/v1/responses/resp_1")
        assert it.keeper is None


async def test_a_name_that_nobody_keeps_is_not_found() -> None:
    async with room(ANN, BOB) as it:
        with pytest.raises(NameUnknown, match="'resp_1'"):
            await it.ask("GET", "/v1/responses/resp_1")
        with pytest.raises(NameUnknown, match="'resp_1'"):
            await it.post(previous_response_id="resp_1")
        assert it.inner.keepers == []


@pytest.mark.parametrize("silence", ["down", "broken", "hangs"])
async def test_where_not_everyone_answers_it_is_not_said_to_be_unknown(silence: str) -> None:
    async with room(ANN, BOB, CAT) as it:
        match silence:
            case "down":
                it.workers[ANN].fails = WorkerUnreachable(ANN)
            case "broken":
                it.workers[ANN].fails = WorkerFailed(ANN, "died")
            case _:
                it.workers[ANN].hangs = True
        with pytest.raises(KeeperSilent, match="http://ann:1 gave no answer"):
            await it.ask("GET", "/v1/responses/resp_1")
        it.workers[CAT].keeps = {"/v1/responses/resp_1"}
        await it.ask("GET", "/v1/responses/resp_1")
        assert it.keeper == CAT


async def test_what_a_worker_kept_that_left_is_asked_for_anew() -> None:
    async with room(ANN, BOB, CAT) as it:
        it.inner.answer, it.inner.worker = b'{"id": "resp_1"}', BOB
        await it.post(input="hi")
        await it.fleet.remove(BOB)
        with pytest.raises(NameUnknown):
            await it.ask("GET", "/v1/responses/resp_1")


@pytest.mark.parametrize(
    ("status", "more"), [(400, ()), (200, ((b"content-encoding", b"gzip"),))], ids=["an error", "compressed"]
)
async def test_nothing_is_learned_from(status: int, more: tuple[tuple[bytes, bytes], ...]) -> None:
    async with room(ANN, BOB) as it:
        it.inner.answer, it.inner.status, it.inner.more = b'{"id": "resp_1"}', status, more
        await it.post(input="hi")
        with pytest.raises(NameUnknown):
            await it.post(previous_response_id="resp_1")


async def test_names_are_remembered_within_bounds_and_the_oldest_are_asked_for() -> None:
    async with room(ANN, BOB, most_names=2) as it:
        for number in range(3):
            it.inner.answer = b'{"id": "resp_%d"}' % number
            await it.post(input="hi")
        await it.post(previous_response_id="resp_2")
        assert it.keeper == ANN
        with pytest.raises(NameUnknown):
            await it.post(previous_response_id="resp_0")


@pytest.mark.parametrize("path", ["/v1/responses/a%2fb", "/v1/responses/a?b", "/v1/responses/" + "x" * 300])
async def test_what_cannot_be_a_name_is_asked_of_nobody(path: str) -> None:
    async with room(ANN, BOB) as it:
        with pytest.raises(NameUnknown):
            await it.ask("GET", path)
        with pytest.raises(FieldInvalid):
            await it.post(previous_response_id="../flush_cache")
        assert it.workers[ANN].asked == []
