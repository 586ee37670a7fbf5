"""A gateway whose clients need keys, over real sockets."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from kvherd.core.fleet.spec import WorkerSpec
from kvherd.core.ids import Epoch, Rank, WorkerId
from kvherd.ports.completions import Tokenizer
from kvherd.ports.kv_feed import FeedItem, Subscribed
from kvherd.ports.worker import WorkerFacts, WorkerKind
from kvherd.services.gateway.gateway import Gateway, GatewayConfig
from kvherd.testing.kv_feeds import OpenFeed
from kvherd.testing.raw_http import RawClient
from kvherd.testing.tokenizer import ByteTokenizer
from kvherd.testing.workers import FakeWorker

pytestmark = pytest.mark.net

PATIENCE_S = 20.0

ANN = WorkerId("http://ann:1")
FACTS = WorkerFacts(WorkerKind.OPENAI_HTTP, ("m",))
BODY = {"model": "m", "prompt": "hi"}
KEYS = """
[aliases]
gpt = "m"
[[keys]]
name = "team-a"
env = "TEAM_A"
in_flight = 1
"""
ENVIRONMENT = {"TEAM_A": "secret-of-a"}
OURS = {"authorization": "Bearer secret-of-a"}


class NoFeed(OpenFeed):
    async def subscribe(self, cursors: dict[Rank, int], epoch: Epoch | None) -> AsyncGenerator[FeedItem, None]:
        yield Subscribed(None)


@asynccontextmanager
async def guarded(
    worker: FakeWorker, path: Path, *, admin_key: str | None = None, data_key: str | None = None
) -> AsyncIterator[httpx.AsyncClient]:
    async def tokenizer(_: str) -> Tokenizer:
        return ByteTokenizer()

    config = GatewayConfig(
        port=0,
        grpc_port=0,
        workers=(WorkerSpec(worker.id),),
        policy="least_load",
        config_file=path,
        environment=ENVIRONMENT,
        admin_key=admin_key,
        data_key=data_key,
    )
    made = Gateway(
        config, worker_factory=lambda *_: worker, feed_factory=lambda _: NoFeed(), tokenizer_factory=tokenizer
    )
    async with made as it, httpx.AsyncClient(base_url=f"http://127.0.0.1:{it.port}", timeout=PATIENCE_S) as client:
        async with asyncio.timeout(PATIENCE_S):
            while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110 - HTTP has no event to wait for
                await asyncio.sleep(0.01)
        yield client


@pytest.fixture
def path(tmp_path: Path) -> Path:
    written = tmp_path / "herd.toml"
    written.write_text(KEYS)
    return written


async def test_only_who_brings_a_key_is_served_and_the_key_ends_at_the_gateway(path: Path) -> None:
    worker = FakeWorker(ANN, facts=FACTS)
    async with guarded(worker, path) as client:
        nobody = await client.post("/v1/completions", json=BODY)
        stranger = await client.post("/v1/completions", json=BODY, headers={"authorization": "Bearer nonsense"})
        ours = await client.post("/v1/completions", json={**BODY, "model": "gpt"}, headers=OURS)
        metrics = (await client.get("/metrics")).text
    assert (nobody.status_code, nobody.headers["www-authenticate"]) == (401, "Bearer")
    assert nobody.json()["error"]["message"].startswith("give an API key of this gateway")
    assert (stranger.status_code, stranger.json()["error"]["code"]) == (401, "invalid_api_key")
    assert ours.status_code == 200
    (call,) = worker.calls
    assert b"authorization" not in dict(call.headers)
    assert b'"model":"m"' in call.body.replace(b" ", b"")
    assert 'kvherd_key_requests_total{key="team-a",verdict="admitted"} 1.0' in metrics
    assert "secret" not in metrics


async def test_a_key_with_too_many_requests_under_way_is_told_to_wait(path: Path) -> None:
    worker = FakeWorker(ANN, facts=FACTS, first_byte_s=60.0)
    async with guarded(worker, path) as client:
        first = asyncio.ensure_future(client.post("/v1/completions", json=BODY, headers=OURS))
        async with asyncio.timeout(PATIENCE_S):
            while not worker.calls:  # noqa: ASYNC110 - the worker's calls are no event
                await asyncio.sleep(0.01)
        second = await client.post("/v1/completions", json=BODY, headers=OURS)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    assert (second.status_code, second.headers["retry-after"]) == (429, "1")
    assert (
        second.json()["error"]["message"] == "the key 'team-a' may have 1 request under way at a time; try again later"
    )


async def test_what_tells_of_models_wants_a_key_and_what_tells_of_health_does_not(path: Path) -> None:
    async with guarded(FakeWorker(ANN, facts=FACTS), path, admin_key="boss-key") as client:
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/v1/models", headers=OURS)).status_code == 200
        assert (await client.get("/v1/models", headers={"authorization": "Bearer boss-key"})).status_code == 200
        for open_path in ("/health", "/ready", "/metrics"):
            assert (await client.get(open_path)).status_code == 200


async def test_the_admin_key_and_the_data_keys_do_not_stand_in_for_each_other(path: Path) -> None:
    boss = {"authorization": "Bearer boss-key"}
    async with guarded(FakeWorker(ANN, facts=FACTS), path, admin_key="boss-key", data_key="from-outside") as client:
        assert (await client.get("/workers", headers=boss)).status_code == 200
        assert (await client.get("/workers", headers=OURS)).status_code == 403
        assert (await client.post("/v1/completions", json=BODY, headers=boss)).status_code == 401
        outside = {"authorization": "Bearer from-outside"}
        assert (await client.post("/v1/completions", json=BODY, headers=outside)).status_code == 200


async def test_a_file_that_turns_wrong_keeps_the_keys_that_were_and_the_gateway_says_so(path: Path) -> None:
    async with guarded(FakeWorker(ANN, facts=FACTS), path) as client:
        await asyncio.to_thread(path.write_text, KEYS + "in_flght = 2\n")
        async with asyncio.timeout(PATIENCE_S):
            while not (told := (await client.get("/server_info")).json()["config"])["problem"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert told["problem"].startswith(f"{path}, line 8: in_flght: is unknown here")
        assert (await client.post("/v1/completions", json=BODY, headers=OURS)).status_code == 200
        assert (await client.post("/v1/completions", json=BODY)).status_code == 401


async def test_an_empty_file_does_not_open_the_door(path: Path) -> None:
    async with guarded(FakeWorker(ANN, facts=FACTS), path) as client:
        await asyncio.to_thread(path.write_text, "")
        async with asyncio.timeout(PATIENCE_S):
            while not (told := (await client.get("/server_info")).json()["config"])["problem"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert "keys: none is left" in told["problem"]
        assert (await client.post("/v1/completions", json=BODY)).status_code == 401


async def test_a_key_of_the_file_cannot_take_the_place_of_the_environment_s(path: Path) -> None:
    async with guarded(FakeWorker(ANN, facts=FACTS), path, data_key="secret-of-env") as client:
        await asyncio.to_thread(path.write_text, KEYS.replace("team-a", "environment"))
        async with asyncio.timeout(PATIENCE_S):
            while not (told := (await client.get("/server_info", headers=OURS)).json()["config"])["problem"]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert "'environment' is how the key of KVHERD_API_KEY is called" in told["problem"]
        for key in ("secret-of-env", "secret-of-a"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200


# --- whose body is read ---------------------------------------------------------------------------------------------

BIG = 5_000_000
KEY = b"Authorization: Bearer secret-of-a\r\n"
ADMIN = b"Authorization: Bearer secret-of-admin\r\n"
WRONG = b"Authorization: Bearer nonsense\r\n"


def head(path: bytes, *lines: bytes, length: int = BIG) -> bytes:
    told = b"".join(lines)
    return b"POST %b HTTP/1.1\r\nHost: h\r\n%bContent-Length: %d\r\n\r\n" % (path, told, length)


PATHS = [
    (b"/v1/completions", 401),
    (b"/generate", 401),
    (b"/v1/embeddings", 401),
    (b"/odd", 401),
    (b"/flush_cache", 403),
    (b"/%66lush_cache", 403),
    (b"/workers", 403),
]


@pytest.mark.parametrize(("asked", "status"), PATHS)
@pytest.mark.parametrize("key", [b"", WRONG])
async def test_a_body_is_not_read_of_who_has_no_key(path: Path, asked: bytes, status: int, key: bytes) -> None:
    """The answer comes though the body never does, and what is sent of it is taken for no request."""
    keyed = guarded(FakeWorker(ANN, facts=FACTS), path, admin_key="secret-of-admin")
    async with keyed as http, RawClient(port_of(http)) as client:
        client.send(head(asked, key) + b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n" * 10)
        assert (await client.answer()).status == status
        assert await client.reader.read() == b""


@pytest.mark.parametrize(("asked", "status"), PATHS)
@pytest.mark.parametrize("key", [b"", WRONG])
async def test_who_has_no_key_is_not_told_to_go_on(path: Path, asked: bytes, status: int, key: bytes) -> None:
    keyed = guarded(FakeWorker(ANN, facts=FACTS), path, admin_key="secret-of-admin")
    async with keyed as http, RawClient(port_of(http)) as client:
        client.send(head(asked, key, b"Expect: 100-continue\r\n", length=3))
        assert (await client.answer()).status == status


@pytest.mark.parametrize(("asked", "key"), [(b"/v1/completions", KEY), (b"/flush_cache", ADMIN), (b"/odd", KEY)])
async def test_who_has_a_key_is_told_to_go_on(path: Path, asked: bytes, key: bytes) -> None:
    keyed = guarded(FakeWorker(ANN, facts=FACTS), path, admin_key="secret-of-admin")
    async with keyed as http, RawClient(port_of(http)) as client:
        client.send(head(asked, key, b"Expect: 100-continue\r\n"))
        assert (await client.answer()).status == 100


async def test_a_chunked_body_is_not_read_of_who_has_no_key(path: Path) -> None:
    async with guarded(FakeWorker(ANN, facts=FACTS), path) as http, RawClient(port_of(http)) as client:
        client.send(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        assert (await client.answer()).status == 401


async def test_who_sends_all_of_a_long_body_without_a_key_reads_why_it_is_refused(path: Path) -> None:
    async with guarded(FakeWorker(ANN, facts=FACTS), path) as http:
        refused = await http.post("/v1/completions", content=b"x" * BIG)
        metrics = (await http.get("/metrics")).text
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert 'kvherd_gateway_refused_requests_total{code="invalid_api_key"} 1.0' in metrics


async def test_a_short_body_without_a_key_costs_its_client_no_connection(path: Path) -> None:
    async with guarded(FakeWorker(ANN, facts=FACTS), path) as http, RawClient(port_of(http)) as client:
        asked = head(b"/v1/completions", length=3)
        client.send(asked)
        assert (await client.ask(b"abc")).status == 401
        assert (await client.ask(asked + b"abc")).status == 401


async def test_where_no_key_is_wanted_bodies_are_read(tmp_path: Path) -> None:
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    worker = FakeWorker(ANN, facts=FACTS)
    async with guarded(worker, empty) as http:
        answer = await http.post("/v1/completions", json={**BODY, "pad": "x" * BIG})
    assert answer.status_code == 200


def port_of(client: httpx.AsyncClient) -> int:
    port = client.base_url.port
    assert port is not None
    return port
