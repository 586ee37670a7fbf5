"""The gateway's HTTP beside the data path."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from kvherd.core.errors import WorkerUnreachable, WorkerUnsupported
from kvherd.core.fleet.roster import Member
from kvherd.core.fleet.spec import WorkerSpec
from kvherd.core.fleet.truth import Claim, Truth
from kvherd.core.ids import Epoch, Rank, RequestId, WorkerId
from kvherd.core.text.parity import Agreement, Finding, PromptClass
from kvherd.ports.completions import Tokenizer
from kvherd.ports.worker import ProfileAnswer, RankOutcome, WorkerFacts, WorkerKind, WorkerLoad
from kvherd.services.gateway.doors.admin import build_app
from kvherd.services.gateway.doors.console import Console
from kvherd.services.gateway.fleet.fleet import Fleet
from kvherd.services.gateway.fleet.orders import UNHEEDED
from kvherd.services.gateway.metrics import GatewayMetrics
from kvherd.testing.kv_feeds import NoFollowing
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.testing.workers import HOURS, FakeWorker, cannot_flush, refusing_ranks
from kvherd.wire.audit_json import Audited, audit_report
from kvherd.wire.fleet_json import KvView

ANN, BOB = WorkerId("grpc://ann:1"), WorkerId("http://bob:1")
FACTS = WorkerFacts(WorkerKind.SGLANG_GRPC, ("m",), block_size=16, max_context_tokens=2048)


@asynccontextmanager
async def gateway_and_fleet(
    *workers: FakeWorker, admin_key: str | None = None, peer: str = "127.0.0.1"
) -> AsyncIterator[tuple[httpx.AsyncClient, Fleet]]:
    known = {worker.id: worker for worker in workers}

    async def tokenizer(_: str) -> Tokenizer:
        return ByteTokenizer()

    fleet = Fleet(
        worker_factory=lambda url, _: known.get(WorkerId(url)) or FakeWorker(WorkerId(url)),
        feed_factory=lambda _: None,  # type: ignore[arg-type,return-value]
        tokenizer_factory=tokenizer,
        following=NoFollowing(),
    )
    metrics = GatewayMetrics()
    console = Console(
        fleet=fleet,
        kv=lambda _: KvView("live", 7, Epoch("e" * 32), lag_s=0.0025, worst_lag_s=0.5),
        heed=UNHEEDED,
        metrics=metrics,
        admin_key=admin_key,
    )
    metrics.watch(fleet.roster, console.kv, asyncio.get_running_loop().time)
    transport = httpx.ASGITransport(build_app(console, policy="kv"), client=(peer, 1234))
    async with fleet, httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        for worker in workers:
            fleet.add(WorkerSpec(worker.id))
        await asyncio.sleep(0.1)
        yield client, fleet


@asynccontextmanager
async def gateway(
    *workers: FakeWorker, admin_key: str | None = None, peer: str = "127.0.0.1"
) -> AsyncIterator[httpx.AsyncClient]:
    async with gateway_and_fleet(*workers, admin_key=admin_key, peer=peer) as (client, _):
        yield client


def fake(worker: WorkerId, **acts: object) -> FakeWorker:
    return FakeWorker(worker, facts=FACTS, **acts)  # type: ignore[arg-type]


async def test_workers_are_listed_with_all_that_is_known_of_them() -> None:
    async with gateway(fake(ANN, loaded=WorkerLoad(running=2, waiting=1))) as client:
        (one,) = (await client.get("/workers")).json()["workers"]
    assert (one["id"], one["url"], one["kind"], one["models"]) == ("grpc-ann-1", ANN, "sglang-grpc", ["m"])
    assert (one["state"], one["running"], one["waiting"], one["outstanding"]) == ("up", 2, 1, 0)
    assert one["kv"] == {
        "state": "live",
        "blocks": 7,
        "epoch": "e" * 32,
        "reason": "",
        "lag_s": 0.0025,
        "worst_lag_s": 0.5,
        "complete": True,
        "healings": 0,
    }
    assert (one["breaker"], one["truth"]["available"]) == ("closed", False)


async def test_a_worker_is_added_looked_at_and_removed_at_run_time() -> None:
    async with gateway() as client:
        added = await client.post("/workers", json={"url": "http://bob:1/", "events": "grpc://bob:2"})
        again = await client.post("/workers", json={"url": "http://bob:1"})
        assert (added.status_code, again.status_code) == (201, 200)
        assert (added.json()["url"], added.json()["events_url"]) == (BOB, "grpc://bob:2")
        assert (await client.get("/workers/http-bob-1")).json()["url"] == BOB
        assert (await client.get("/workers/http%3A%2F%2Fbob%3A1")).json()["url"] == BOB
        removed = await client.delete("/workers/http-bob-1")
        assert removed.json() == {"id": "http-bob-1", "url": BOB, "drained": True}
        assert (await client.get("/workers")).json() == {"workers": []}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"url": "bob"}, "url: 'bob' is not of the form grpc|grpcs|http|https://HOST:PORT"),
        ({"url": "grpc://bob"}, "url: 'grpc://bob' names no port"),
        ({"url": "ftp://bob:1"}, "url: 'ftp://bob:1' is not of the form grpc|grpcs|http|https://HOST:PORT"),
        ({"url": "http://169.254.1.1:80"}, "url: 169.254.1.1 is a link-local address, which no worker may have"),
        ({"url": "http://bob:99999"}, "url: 'http://bob:99999' is not of the form grpc|grpcs|http|https://HOST:PORT"),
        ({"url": 5}, "url: must be a text such as grpc://HOST:PORT or http://HOST:PORT"),
        (
            {"url": "http://b:1", "events": "http://b:2"},
            "events: 'http://b:2' is not of the form grpc://HOST:PORT, tcp://HOST:PORT or ipc://PATH",
        ),
        ({"url": "http://b:1", "replay": "tcp://b:2"}, "replay: says nothing without events"),
        (
            {"url": "http://b:1", "events": "grpc://b:2", "replay": "tcp://b:2"},
            "replay: is for events at an engine's own sockets only",
        ),
        ({"url": "http://b:1", "events": "tcp://b:2", "bind": 1}, "bind: must be true or false"),
        (
            {"url": "http://b:1", "evnts": ""},
            (
                "evnts: is unknown here; a worker has url, events, replay, tokenizer, bind, labels, weight, draining, "
                "engine_key"
            ),
        ),
        ([], "body: must be a JSON object, not a list"),
    ],
)
async def test_a_worker_that_cannot_be_is_refused_in_a_sentence(body: object, sentence: str) -> None:
    async with gateway() as client:
        answer = await client.post("/workers", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == sentence


@pytest.mark.parametrize(
    ("said", "mend"),
    [
        ({"weight": 3}, "PATCH changes that"),
        ({"labels": {"zone": "b"}}, "PATCH changes that"),
        ({"draining": True}, "PATCH changes that"),
        ({"engine_key": "another-key"}, "PATCH changes that"),
        ({"events": "grpc://bob:3"}, "DELETE it first"),
        ({"events": "tcp://bob:3"}, "DELETE it first"),
        ({"tokenizer": "/models/other"}, "DELETE it first"),
    ],
)
async def test_who_says_something_else_of_a_member_is_told_that_it_is_not_done(
    said: dict[str, object], mend: str
) -> None:
    first = {"url": BOB, "events": "grpc://bob:2", "labels": {"zone": "a", "rack": "7"}, "weight": 2.0}
    async with gateway() as client:
        assert (await client.post("/workers", json=first)).status_code == 201
        for same in (first, {"url": BOB}, {"url": BOB, "labels": {"zone": "a"}}):
            assert (await client.post("/workers", json=same)).status_code == 200
        answer = await client.post("/workers", json={"url": BOB} | said)
    (name,) = said
    sentence = f"{name}: {BOB} is a member already, and this is not what it has; {mend}"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, sentence)


async def test_a_worker_that_is_leaving_is_not_said_to_be_added() -> None:
    async with gateway_and_fleet(fake(BOB)) as (client, fleet):
        member = fleet.roster.get(BOB)
        assert member is not None
        member.leaves_at_s = asyncio.get_running_loop().time() + HOURS
        answer = await client.post("/workers", json={"url": BOB})
    sentence = f"url: {BOB} is leaving; add it again when it has left"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, sentence)


async def test_an_unknown_worker_is_not_found() -> None:
    async with gateway() as client:
        for method in ("GET", "DELETE"):
            answer = await client.request(method, "/workers/nobody")
            assert answer.status_code == 404
            assert "no worker 'nobody' is registered here" in answer.json()["error"]["message"]


async def test_labels_weight_and_draining_are_changed_while_a_worker_is_a_member() -> None:
    async with gateway(fake(ANN)) as client:
        answer = await client.patch("/workers/grpc-ann-1", json={"labels": {"zone": "a", "rack": "1"}, "weight": 2})
        assert answer.status_code == 200
        assert (answer.json()["labels"], answer.json()["weight"]) == ({"zone": "a", "rack": "1"}, 2.0)
        answer = await client.patch("/workers/grpc-ann-1", json={"labels": {"rack": None}, "draining": True})
        assert answer.json()["labels"] == {"zone": "a"}
        assert (answer.json()["state"], answer.json()["weight"]) == ("draining", 2.0)
        assert (await client.get("/ready")).json()["problems"] == ["no worker takes requests for m now"]
        answer = await client.patch("/workers/grpc-ann-1", json={"draining": False})
        assert answer.json()["state"] == "up"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "body: changes nothing; give one of labels, weight, draining, engine_key"),
        ({"url": "http://x:1"}, "url: cannot be changed while it is a member; DELETE it, then POST it anew"),
        ({"wait": 2}, "wait: is unknown here; what can be changed is labels, weight, draining, engine_key"),
        ({"labels": {"zone": 1}}, 'labels: must be an object of texts, such as {"zone": "a"}; null takes one away'),
        ({"labels": {"zone": ""}}, "labels.zone: a name and a value have 1 to 256 characters each"),
        ({"weight": 0}, "weight: must be above 0 and at most 1000; to send nothing there, drain it"),
        ({"weight": True}, "weight: must be a number"),
        ({"draining": "yes"}, "draining: must be true or false"),
    ],
)
async def test_a_change_that_cannot_be_is_refused_in_a_sentence(body: dict[str, object], sentence: str) -> None:
    async with gateway(fake(ANN)) as client:
        answer = await client.patch("/workers/grpc-ann-1", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == sentence
        assert (await client.get("/workers/grpc-ann-1")).json()["labels"] == {}


async def test_one_worker_is_shown_with_what_is_under_way_there() -> None:
    async with gateway_and_fleet(fake(ANN)) as (client, fleet):
        member = fleet.roster.get(ANN)
        assert member is not None
        now_s = asyncio.get_running_loop().time()
        member.begin(RequestId("late"), prompt_tokens=7, uncached_tokens=7, now_s=now_s)
        member.begin(RequestId("early"), prompt_tokens=9, uncached_tokens=7, now_s=now_s - 2.5)
        shown = (await client.get("/workers/grpc-ann-1")).json()
    assert shown["outstanding"] == 2
    assert shown["under_way"] == [
        {"request": "early", "seconds": 2.5, "prompt_tokens": 9},
        {"request": "late", "seconds": 0.0, "prompt_tokens": 7},
    ]


async def test_aliases_are_models_too() -> None:
    async with gateway_and_fleet(fake(ANN)) as (client, fleet):
        fleet.roster.aliases = {"gpt": "m", "lost": "nowhere"}
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(one["id"], one["root"], one["max_model_len"]) for one in listed] == [
            ("m", "m", 2048),
            ("gpt", "m", 2048),
        ]
        ready = await client.get("/ready")
    assert ready.status_code == 503
    assert ready.json()["problems"] == ["no worker takes requests for nowhere now"]


async def test_ready_waits_for_the_models_that_are_required() -> None:
    async with gateway_and_fleet(fake(ANN)) as (client, fleet):
        assert (await client.get("/ready")).status_code == 200
        fleet.roster.required = ("m", "n")
        assert (await client.get("/ready")).json()["problems"] == ["no worker takes requests for n now"]


async def test_a_flush_reports_on_every_worker() -> None:
    stuck = fake(BOB, takes_s=9 * HOURS)
    async with gateway(fake(ANN), stuck) as client:
        answer = await client.post("/flush_cache?timeout=30")
    assert answer.status_code == 207
    report = answer.json()
    entries = report.pop("workers")
    assert report == {
        "success": False,
        "message": "1 of 2 workers flushed; timed_out: http://bob:1",
        "workers_flushed": 1,
        "total_workers": 2,
        "total_http_workers": 1,
        "total_grpc_workers": 1,
    }
    assert [(one["url"], one["kind"], one["outcome"]) for one in entries] == [
        (ANN, "sglang-grpc", "done"),
        (BOB, "sglang-grpc", "timed_out"),
    ]
    assert entries[1]["seconds"] == pytest.approx(35.0)


async def test_the_ranks_of_a_refusal_are_told_apart() -> None:
    async with gateway(fake(ANN, answer=refusing_ranks("", "busy"))) as client:
        answer = await client.post("/flush_cache")
    assert answer.status_code == 502
    assert answer.json()["workers"][0]["ranks"] == [
        {"rank": 0, "outcome": "done", "message": ""},
        {"rank": 1, "outcome": "refused", "message": "busy"},
    ]


async def test_a_flush_may_hold_and_a_hold_that_is_neither_is_refused() -> None:
    ann = FakeWorker(ANN)
    async with gateway(ann) as client:
        assert (await client.post("/flush_cache?hold=1")).status_code == 200
        assert ann.held == 1
        answer = await client.post("/flush_cache?hold=perhaps")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "hold: must be 1 or 0, not 'perhaps'")


async def test_a_fleet_that_cannot_flush_says_so() -> None:
    async with gateway(fake(ANN, fails=None)) as client:
        assert (await client.post("/flush_cache")).status_code == 200
    broken = fake(ANN)
    async with gateway(broken) as client:
        broken.fails = cannot_flush(ANN)
        answer = await client.post("/flush_cache")
    assert (answer.status_code, answer.json()["workers"][0]["outcome"]) == (502, "unsupported")


async def test_a_flush_without_workers_is_unavailable() -> None:
    async with gateway() as client:
        answer = await client.post("/flush_cache")
    assert (answer.status_code, answer.json()["success"], answer.headers["retry-after"]) == (503, False, "5")


@pytest.mark.parametrize("text", ["-1", "nan", "inf", "soon", "3601", "", "1_0"])
async def test_a_timeout_that_is_none_is_refused(text: str) -> None:
    async with gateway(fake(ANN)) as client:
        answer = await client.post(f"/flush_cache?timeout={text}")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("timeout: must be a number of seconds")


async def test_ready_means_every_model_has_a_worker() -> None:
    ann = fake(ANN)
    async with gateway(ann) as client:
        assert (await client.get("/ready")).status_code == 200
        ann.fails = WorkerUnreachable(ANN)
        await asyncio.sleep(10.0)
        answer = await client.get("/ready")
        assert (answer.status_code, answer.json()["problems"]) == (503, ["no worker takes requests for m now"])
        assert (await client.get("/health")).status_code == 200
    async with gateway() as client:
        assert (await client.get("/ready")).json()["problems"] == ["no worker is registered"]
    async with gateway(fake(ANN, fails=WorkerUnreachable(ANN, "connection refused"))) as client:
        (problem,) = (await client.get("/ready")).json()["problems"]
        assert problem == f"{ANN} is not connected: cannot be reached: connection refused"


async def test_programs_of_this_field_find_what_they_ask_for() -> None:
    async with gateway(fake(ANN)) as client:
        models = (await client.get("/v1/models")).json()
        assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("m", 2048)
        assert (await client.get("/get_model_info")).json()["model_path"] == "m"
        server = (await client.get("/server_info")).json()
        assert server == (await client.get("/get_server_info")).json()
        assert (server["router_manager"], server["tokenizer_path"]) == (True, "m")
        assert (await client.get("/get_loads")).json()["loads"][0]["url"] == ANN
        metrics = await client.get("/metrics")
        assert f'kvherd_worker_state{{state="up",worker="{ANN}"}} 1.0' in metrics.text
        assert f'kvherd_worker_kv_blocks{{worker="{ANN}"}} 7.0' in metrics.text


async def test_without_a_key_only_this_machine_may_order() -> None:
    async with gateway(fake(ANN), peer="10.0.0.9") as client:
        for method, path in (("POST", "/flush_cache"), ("GET", "/workers"), ("DELETE", "/workers/x")):
            answer = await client.request(method, path)
            assert answer.status_code == 403
            assert "only callers on this machine" in answer.json()["error"]["message"]
        assert (await client.get("/v1/models")).status_code == 200


async def test_a_key_opens_to_whoever_has_it_and_closes_to_this_machine() -> None:
    async with gateway(fake(ANN), peer="10.0.0.9", admin_key="secret") as client:
        good = await client.get("/workers", headers={"authorization": "Bearer secret"})
        wrong = await client.get("/workers", headers={"authorization": "Bearer wrong"})
    assert (good.status_code, wrong.status_code) == (200, 403)
    async with gateway(fake(ANN), admin_key="secret") as client:
        assert (await client.get("/workers")).status_code == 403


@pytest.mark.parametrize("peer", ["::1", "::ffff:127.0.0.1", "127.8.8.8"])
async def test_this_machine_has_several_addresses(peer: str) -> None:
    async with gateway(peer=peer) as client:
        assert (await client.get("/workers")).status_code == 200


async def test_what_is_not_here_is_said_in_json() -> None:
    async with gateway() as client:
        for path in ("/nothing", "/health/"):
            missing = await client.get(path)
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
            assert missing.json()["error"]["message"] == f"GET {path} is not served here"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/flush_cache", "POST"),
        ("POST", "/health", "GET, HEAD"),
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/responses", "POST"),
        ("HEAD", "/generate", "POST"),
        ("PUT", "/workers", "GET, HEAD, POST"),
        ("POST", "/workers/bob", "DELETE, GET, HEAD, PATCH"),
    ],
)
async def test_a_method_that_a_path_does_not_take_is_told_those_that_it_does(
    method: str, path: str, allowed: str
) -> None:
    async with gateway() as client:
        wrong, asked = await client.request(method, path), await client.options(path)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, allowed)
    if method != "HEAD":
        sentence = f"{method} {path} is not served here; this path takes {allowed}"
        assert (wrong.json()["error"]["code"], wrong.json()["error"]["message"]) == ("method_not_allowed", sentence)
    assert (asked.status_code, asked.headers["allow"], asked.content) == (204, allowed, b"")


async def test_one_model_is_told_by_its_name_and_another_is_not_found() -> None:
    async with gateway(fake(ANN)) as client:
        served = (await client.get("/v1/models")).json()["data"]
        assert served
        for each in served:
            assert (await client.get(f"/v1/models/{each['id']}")).json() == each
        missing = await client.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    assert "org/other" in missing.json()["error"]["message"]


def audited(kind: str = "vllm-http", kv: str = "live", **truth: object) -> tuple[bool, str]:
    """Whether a worker is fine, and the advice on it."""
    member = Member(ANN, kind=kind, truth=Truth(**truth))  # type: ignore[arg-type]
    entry = audit_report([Audited(member, KvView(kv))])["workers"][0]
    return entry["fine"], entry["advice"]


@pytest.mark.parametrize(
    ("kind", "flag"), [("vllm-http", "--enable-prompt-tokens-details"), ("sglang-http", "--enable-cache-report")]
)
def test_an_engine_that_does_not_report_is_advised_the_flag_to_set(kind: str, flag: str) -> None:
    fine, advice = audited(kind, unavailable=3, tells=False)
    assert not fine
    assert flag in advice


def test_advice_says_what_keeps_a_worker_from_a_verdict() -> None:
    assert "no KV events" in audited(kv="unfollowed")[1]
    assert "include_usage" in audited(unavailable=3)[1]
    assert "because of: overlap" in audited(undecided_by=Counter(overlap=3, cleared=1))[1]
    assert audited() == (False, "no answer yet")


async def test_an_audit_is_fine_when_of_every_worker_something_was_decided_and_little_was_wrong() -> None:
    async with gateway_and_fleet(fake(ANN), fake(BOB)) as (client, fleet):
        assert (await client.get("/audit")).json()["fine"] is False, "nothing was decided"
        (first, *_) = fleet.roster
        first.truth.answered(Claim(16, 16), 16)
        assert (await client.get("/audit")).json()["fine"] is True, "the other was not asked yet"
        first.truth = Truth()
        first.truth.answered(Claim(16, 16), None)
        assert (await client.get("/audit")).json()["fine"] is False, "an answer that decides nothing is not fine"
        for member in fleet.roster:
            member.truth.answered(Claim(16, 16), 16)
        assert (await client.get("/audit")).json()["fine"] is True
        for _ in range(3):
            member.truth.answered(Claim(16, 16), 0, at_s=1_000.0)
        report = (await client.get("/audit")).json()
        assert report["fine"] is False
        ann, bob = report["workers"]
        assert (ann["fine"], bob["fine"], bob["decided"], bob["wrong"], bob["error_rate"]) == (True, False, 4, 3, 0.75)
        assert bob["last_wrong"] == {"predicted_tokens": 16, "reported_tokens": 0, "at_s": 1_000.0}
        assert ann["differing_prompts"] == []
        (first, _) = fleet.roster
        first.tokenization[PromptClass.TOOLS] = Finding(Agreement.DIFFERS, "it counted 7 tokens")
        ann, _ = (await client.get("/audit")).json()["workers"]
        assert ann["differing_prompts"] == ["tools"]
        entry, _ = (await client.get("/workers")).json()["workers"]
        assert entry["tokenization"] == {"tools": {"verdict": "differs", "why": "it counted 7 tokens"}}
        member.truth.rebuilt(0.0)
        assert (await client.get("/audit")).json()["fine"] is False, "nothing was decided since"


async def test_an_empty_fleet_is_no_fine_one() -> None:
    async with gateway() as client:
        assert (await client.get("/audit")).json() == {"fine": False, "workers": []}


# --- profiles ---------------------------------------------------------------------------------------------


async def test_one_worker_is_profiled_by_itself_and_several_when_they_are_named() -> None:
    alone, ann, bob = fake(ANN), fake(ANN), fake(BOB)
    async with gateway(alone) as client:
        assert (await client.post("/start_profile")).status_code == 200
    async with gateway(ann, bob) as client:
        answer = await client.post("/start_profile", json={"num_steps": "5", "output_dir": None})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("worker: is missing; name one with ?worker=URL")
        assert (await client.post(f"/start_profile?worker={BOB}", json={"num_steps": "5"})).status_code == 200
        report = (await client.post("/stop_profile?worker=all")).json()
        unknown = await client.post("/stop_profile?worker=http://nobody:1")
    assert (alone.profiled, ann.profiled, bob.profiled) == ([{}], [], [{"num_steps": "5"}])
    assert (report["success"], report["message"]) == (True, "2 of 2 workers stopped")
    assert [one["files"] for one in report["workers"]] == [["/tmp/profile-1-rank0.trace.json"]] * 2
    assert unknown.status_code == 404


async def test_a_field_of_a_profile_that_nobody_knows_reaches_no_worker() -> None:
    ann = fake(ANN)
    async with gateway(ann) as client:
        for body in (b'{"num_stepz": 5}', b'{"num_steps": "five"}', b"{", b'{"with_stack": 1}'):
            assert (await client.post("/start_profile", content=body)).status_code == 400
        assert (await client.post("/stop_profile", json={"now": True})).status_code == 400
    assert ann.profiled == []


async def test_a_worker_that_cannot_be_profiled_costs_its_own_entry() -> None:
    async with gateway(fake(ANN), fake(BOB, fails=WorkerUnsupported(BOB, "profiling"))) as client:
        answer = await client.post("/start_profile?worker=all")
        outcomes = [one["outcome"] for one in answer.json()["workers"]]
    assert (answer.status_code, outcomes) == (200, ["done", "unsupported"])
    assert answer.json()["success"] is False


async def test_the_ranks_of_a_profile_are_told_apart() -> None:
    class OfTwo(FakeWorker):
        async def start_profile(self, fields: object) -> ProfileAnswer:
            ranks = RankOutcome(Rank(0), done=True, message="on"), RankOutcome(Rank(1), done=False, message="disk full")
            return ProfileAnswer("rank 1: disk full", done=False, ranks=ranks)

    async with gateway(OfTwo(ANN)) as client:
        answer = await client.post("/start_profile")
    assert answer.status_code == 502
    told = answer.json()["workers"][0]
    assert (told["outcome"], told["message"]) == ("refused", "rank 1: disk full")
    assert told["ranks"] == [
        {"rank": 0, "outcome": "done", "message": "on"},
        {"rank": 1, "outcome": "refused", "message": "disk full"},
    ]


async def test_a_worker_that_never_answers_an_order_to_profile_times_out() -> None:
    async with gateway(fake(ANN), fake(BOB, takes_s=HOURS)) as client:
        report = (await client.post("/stop_profile?worker=all", timeout=HOURS)).json()
    assert [one["outcome"] for one in report["workers"]] == ["done", "timed_out"]
    assert asyncio.get_running_loop().time() == pytest.approx(605.1, abs=0.5)


@pytest.mark.net  # they are merged in a thread, which virtual time does not know
async def test_engines_metrics_are_one_page() -> None:
    async with gateway(fake(ANN, tells_metrics=b"up 1\n"), fake(BOB, tells_metrics=b"up 0\n")) as client:
        text = (await client.get("/engine_metrics")).text
    assert f'up{{worker="{ANN}"}} 1.0' in text
    assert f'up{{worker="{BOB}"}} 0.0' in text


@pytest.mark.parametrize(
    "header",
    [
        ("X-Forwarded-For", "127.0.0.1"),
        ("X-Forwarded-For", "9.9.9.9"),
        ("Forwarded", "for=127.0.0.1"),
        ("X-Real-IP", "127.0.0.1"),
        ("Via", "1.1 proxy"),
        ("Origin", "http://evil.test"),
        ("Origin", "null"),
    ],
)
async def test_without_a_key_who_comes_through_a_proxy_or_a_web_page_is_not_on_this_machine(
    header: tuple[str, str],
) -> None:
    async with gateway_and_fleet(FakeWorker(ANN, FACTS)) as (client, _):
        for call in (client.get("/workers", headers=[header]), client.post("/flush_cache", headers=[header])):
            answer = await call
            assert (answer.status_code, "no proxies or web pages" in answer.text) == (403, True)
        assert (await client.get("/workers", headers={"origin": "http://localhost:8080"})).status_code == 200
    async with gateway_and_fleet(FakeWorker(ANN, FACTS), peer="9.9.9.9") as (client, _):
        assert (await client.get("/workers", headers=[header])).status_code == 403
    async with gateway_and_fleet(FakeWorker(ANN, FACTS), admin_key="k") as (client, _):
        headers = [header, ("authorization", "Bearer k")]
        assert (await client.get("/workers", headers=headers)).status_code == 200
