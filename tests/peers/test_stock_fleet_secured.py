"""A stock vLLM and a stock SGLang behind TLS and a key, of two models, and before them a gateway that has both from its
file: clients with keys of their own, labels, aliases, and changes while it runs.

`make test-fleet` installs them and runs these tests.
"""

import json
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from kvherd.testing.certificates import Authority, IssuedFiles
from kvherd.testing.doctors import OWN, examined
from kvherd.testing.herds import Start
from kvherd.testing.processes import KvherdProcess, free_ports, wait_until
from kvherd.testing.stock_engines import StockEngine, StockServer, model_directory, sglang, vllm
from kvherd.testing.stock_herds import ANSWER_S

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

ENGINE_KEY, WEB, BATCH, BOSS = "sesame-of-the-engines", "secret-of-the-web", "secret-of-the-batch", "secret-of-the-boss"
LLAMA, QWEN = "llama", "qwen"
PATIENCE_S = 60.0
LONG = "Say it again, please, and once more. " * 12


@dataclass(slots=True)
class Secured:
    folder: Path
    llama: StockServer
    qwen: StockServer
    bridge: str
    files: IssuedFiles
    gateway: KvherdProcess
    client: httpx.Client
    """Of an operator: the admin key opens every route but the data path."""

    @property
    def config(self) -> Path:
        return self.folder / "herd.toml"

    def write(self, *, weight: float = 1, alias: str = LLAMA, zone: str = "a", extra: str = "") -> None:
        self.config.write_text(f"""
models = ["{LLAMA}", "{QWEN}"]

[[workers]]
url = "{self.llama.url}"
events = "grpc://{self.bridge}"
labels = {{ zone = "{zone}" }}
weight = {weight}

[[workers]]
url = "{self.qwen.url}"
events = "{self.qwen.events}"
replay = "{self.qwen.replay}"
tokenizer = "{model_directory()}"
labels = {{ zone = "b" }}

[aliases]
"gpt-4o" = "{alias}"

[[keys]]
name = "web"
env = "WEB_KEY"

[[keys]]
name = "batch"
file = "{self.folder / "batch.key"}"
in_flight = 1
{extra}
""")

    def chat(self, model: str, *, key: str | None = WEB, content: str = LONG, **fields: object) -> httpx.Response:
        body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}
        headers = {"authorization": f"Bearer {key}" if key else ""}
        return self.client.post("/v1/chat/completions", json=body, headers=headers, timeout=ANSWER_S)

    def workers(self) -> dict[str, dict[str, Any]]:
        """By URL."""
        return {one["url"]: one for one in self.client.get("/workers").json()["workers"]}

    def is_ready(self) -> bool:
        try:
            if self.client.get("/ready").status_code != 200:
                return False
        except httpx.TransportError:
            return False
        return all(one["kv"]["state"] == "live" for one in self.workers().values())


@pytest.fixture(scope="module")
def secured() -> Iterator[Secured]:
    with (
        TemporaryDirectory(prefix="kht-", dir="/tmp") as name,
        pytest.MonkeyPatch.context() as environment,
        ExitStack() as stack,
    ):
        folder = Path(name)
        for variable, key in (("KVHERD_ENGINE_API_KEY", ENGINE_KEY), ("WEB_KEY", WEB), ("KVHERD_ADMIN_KEY", BOSS)):
            environment.setenv(variable, key)
        (folder / "batch.key").write_text(BATCH + "\n")
        files = Authority().issue(folder, "all")
        port = free_ports((0, 1, 2))
        llama = vllm(free_ports((0,)), events=f"ipc://{folder}/e", replay=f"ipc://{folder}/r", name=LLAMA)
        events, replay = (f"tcp://127.0.0.1:{port + offset}" for offset in (1, 2))
        qwen = sglang(port, events=events, replay=replay, name=QWEN, options=("--sleep-on-idle",))
        llama, qwen = (server.secured(files, ENGINE_KEY) for server in (llama, qwen))
        for engine in [StockEngine(server, stack.enter_context) for server in (llama, qwen)]:
            engine.await_ready()
        bridge = f"127.0.0.1:{free_ports((0,))}"
        stack.enter_context(KvherdProcess(*llama.bridge_words(bridge)))
        own = free_ports((0, 1))
        client = stack.enter_context(
            httpx.Client(
                base_url=f"https://127.0.0.1:{own}",
                verify=ssl.create_default_context(cafile=files.authority),
                headers={"authorization": f"Bearer {BOSS}"},
                timeout=PATIENCE_S,
            )
        )
        words = ["gateway", "--config", str(folder / "herd.toml"), "--port", str(own), "--grpc-port", str(own + 1)]
        words += ["--tls-cert", str(files.certificate), "--tls-key", str(files.key), "--max-retry-s", "0.5"]
        words += ["--worker-ca", str(files.authority), "--access-log", str(folder / "access.jsonl")]
        herd = Secured(folder, llama, qwen, bridge, files, None, client)  # type: ignore[arg-type] # begun below
        herd.write()
        herd.gateway = stack.enter_context(KvherdProcess(*words))
        herd.gateway.wait_for(herd.is_ready, within_s=PATIENCE_S, what="both models are served and followed")
        yield herd


def test_both_are_known_by_their_labels_and_answer_over_tls_with_the_engines_key(secured: Secured) -> None:
    workers = secured.workers()
    assert {url: (one["kind"], one["models"], one["labels"]) for url, one in workers.items()} == {
        secured.llama.url: ("vllm-http", [LLAMA], {"zone": "a"}),
        secured.qwen.url: ("sglang-http", [QWEN], {"zone": "b"}),
    }
    for model, server in ((LLAMA, secured.llama), (QWEN, secured.qwen)):

        def is_foretold(model: str = model, server: StockServer = server) -> bool:
            answer = secured.chat(model)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-kvherd-worker"] == server.url
            cached = (answer.json()["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            predicted = int(answer.headers.get("x-kvherd-predicted-cached-tokens", "0"))
            assert predicted <= cached
            return 0 < predicted == cached

        wait_until(is_foretold, within_s=PATIENCE_S, what=f"what {model} has cached is foretold")
    listed = {one["id"]: one["root"] for one in secured.client.get("/v1/models").json()["data"]}
    assert listed == {LLAMA: LLAMA, QWEN: QWEN, "gpt-4o": LLAMA}


def test_a_key_opens_what_it_is_for_and_nothing_else(secured: Secured) -> None:
    for key in (None, "wrong", ENGINE_KEY, BOSS):
        assert secured.chat(LLAMA, key=key).status_code == 401, key
    assert secured.client.get("/workers", headers={"authorization": f"Bearer {WEB}"}).status_code == 403
    trust = ssl.create_default_context(cafile=secured.files.authority)
    for server in (secured.llama, secured.qwen):
        direct = httpx.get(f"{server.url}/v1/models", headers={"authorization": f"Bearer {WEB}"}, verify=trust)
        assert direct.status_code == 401, "the engine's key is another"
    told = examined(secured.llama.url, *OWN, "--engine-ca", str(secured.files.authority), key="wrong")
    assert "does not accept" in told.seen("API key")


def test_the_doctor_finds_nothing_in_the_way_over_tls(secured: Secured) -> None:
    for server in (secured.llama, secured.qwen):
        sockets = ("--events", server.events, "--replay", server.replay or "")
        told = examined(server.url, *OWN, *sockets, "--engine-ca", str(secured.files.authority), key=ENGINE_KEY)
        assert told.status == 0, told
        assert examined(server.url, *OWN, key=ENGINE_KEY).status == 3, "whom nobody told to trust is not"


def test_a_key_that_is_at_its_limit_waits_and_the_other_does_not(secured: Secured) -> None:
    body = {"model": LLAMA, "messages": [{"role": "user", "content": "Count."}], "max_tokens": 900, "ignore_eos": True}
    batch = {"authorization": f"Bearer {BATCH}"}
    asked = secured.client.build_request("POST", "/v1/chat/completions", json={**body, "stream": True}, headers=batch)
    answer = secured.client.send(asked, stream=True)
    try:
        assert answer.status_code == 200
        turned_away = secured.chat(QWEN, key=BATCH)
        assert turned_away.status_code == 429
        assert int(turned_away.headers["retry-after"]) > 0
        assert secured.chat(QWEN, key=WEB).status_code == 200
    finally:
        answer.close()
    wait_until(lambda: secured.chat(QWEN, key=BATCH).status_code == 200, within_s=PATIENCE_S, what="its turn comes")


def test_what_the_file_says_comes_true_while_requests_go_on(secured: Secured) -> None:
    assert secured.chat("gpt-4o").json()["model"] == LLAMA
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(secured.chat, "gpt-4o", max_tokens=600, ignore_eos=True)
        secured.write(weight=2, alias=QWEN, zone="c")
        wait_until(lambda: secured.chat("gpt-4o").json()["model"] == QWEN, within_s=PATIENCE_S, what="the alias moved")
        answered = long.result(ANSWER_S)
    assert answered.json()["usage"]["completion_tokens"] == 600, answered.text
    changed = secured.workers()[secured.llama.url]
    assert (changed["labels"], changed["weight"]) == ({"zone": "c"}, 2)
    secured.write(extra="[[workers]]\nurl = 7\n")

    def problem() -> str:
        return str(secured.client.get("/server_info").json()["config"]["problem"])

    wait_until(lambda: "herd.toml" in problem(), within_s=PATIENCE_S, what="it says what is wrong with the file")
    assert secured.chat("gpt-4o").json()["model"] == QWEN, "all stays as it was"
    secured.write()
    wait_until(lambda: not problem() and secured.is_ready(), within_s=PATIENCE_S, what="the file is mended")
    assert secured.chat("gpt-4o").json()["model"] == LLAMA


def test_one_that_the_file_takes_away_leaves_and_is_followed_again_when_it_is_back(secured: Secured) -> None:
    whole = secured.config.read_text()
    first, second, rest = whole.split("[[workers]]")
    _, aliases = rest.split("[aliases]")
    secured.config.write_text(f"{first}[[workers]]{second}[aliases]{aliases}")
    wait_until(lambda: list(secured.workers()) == [secured.llama.url], within_s=PATIENCE_S, what="it has left")
    ready = secured.client.get("/ready")
    assert (ready.status_code, QWEN in ready.text) == (503, True)
    assert secured.chat(QWEN).status_code == 503, "a model that the file wants, and nobody serves"
    secured.config.write_text(whole)
    wait_until(secured.is_ready, within_s=PATIENCE_S, what="it is back and followed")
    assert secured.chat(QWEN).status_code == 200


def test_a_flush_reaches_both_and_nothing_secret_is_in_any_log(secured: Secured) -> None:
    answer = secured.client.post("/flush_cache?timeout=30", timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    assert {one["outcome"] for one in answer.json()["workers"]} == {"done"}
    lines = secured.folder / "access.jsonl"
    secured.chat(LLAMA)
    wait_until(lambda: "web" in names_of_keys(lines), within_s=PATIENCE_S, what="requests are in the log")
    assert names_of_keys(lines) >= {"web", "batch"}
    said = lines.read_text() + secured.gateway.said
    assert [secret for secret in (ENGINE_KEY, WEB, BATCH, BOSS, "Say it again") if secret in said] == []


def names_of_keys(lines: Path) -> set[str]:
    return {str(json.loads(line)["key"]) for line in lines.read_text().splitlines()}


def test_a_gateway_that_does_not_trust_them_says_so_of_each(secured: Secured, start: Start) -> None:
    port = free_ports((0, 1))
    own = ("--port", str(port), "--grpc-port", str(port + 1), "--max-retry-s", "0.5")
    start("gateway", *own, "--worker", secured.llama.url, "--worker", secured.qwen.url)

    def reasons() -> list[str]:
        try:
            found = httpx.get(f"http://127.0.0.1:{port}/workers", headers={"authorization": f"Bearer {BOSS}"})
        except httpx.TransportError:
            return []
        return [one["reason"] for one in found.json()["workers"] if one["state"] == "connecting"]

    def are_told() -> bool:
        return sum("certificate" in reason for reason in reasons()) == 2

    wait_until(are_told, within_s=PATIENCE_S, what="both are found to have a certificate of a stranger")
