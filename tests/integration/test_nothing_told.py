"""Prompts and keys are in no log, no metric, no list and no error, whatever is sent to whichever door.

Words that stand nowhere else are sent as prompts and as keys, rightly and wrongly; then all that every process said is
searched for them. An engine, a bridge before it and a gateway before both log all that they can. What names a role or a
kind of part is no prompt, and is repeated to who wrote it.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from kvherd.testing.herds import EngineProcess, Start, begin_bridge, begin_engine
from kvherd.testing.processes import OwnedProcess, free_ports
from kvherd.wire.proto import kvherd_gateway_v1_pb2 as pb
from kvherd.wire.proto import kvherd_gateway_v1_pb2_grpc as pb_grpc

pytestmark = pytest.mark.engine

PROMPT = "zebraprompt"
WEB, ADMIN, ENGINE, WRONG = "zebrakey-web-1", "zebrakey-admin-2", "zebrakey-engine-3", "zebrakey-wrong-4"
OWN = "zebrakey-own-5"
CANARIES = (PROMPT, "zebrakey")
DEBUG = ("--log-level", "debug")
PATIENCE_S = 30.0


@dataclass
class Site:
    """Everything that speaks; `answers` are the errors that clients got."""

    engine: EngineProcess
    bridge: OwnedProcess
    gateway: OwnedProcess
    url: str
    grpc_port: int
    access: Path
    config: Path
    answers: list[str] = field(default_factory=list)

    def send(self, method: str, path: str, *, url: str | None = None, key: str = WEB, **words: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", **words.pop("headers", {})}
        answer = httpx.request(method, (url or self.url) + path, headers=headers, timeout=PATIENCE_S, **words)
        if answer.status_code >= 400:
            self.answers.append(f"{method} {path.partition('?')[0]} {answer.headers} {answer.text}")
        return answer

    def told(self) -> dict[str, str]:
        """All that can be read, by what it is."""
        own = {name: self.send("GET", name, key=ADMIN).text for name in ("/workers", "/metrics", "/server_info")}
        return own | {
            "engine": self.engine.process.said,
            "bridge": self.bridge.said,
            "gateway": self.gateway.said,
            "access log": self.access.read_text(),
            "errors": "\n".join(self.answers),
        }


def up(site: Site) -> bool:
    with suppress(httpx.HTTPError, KeyError):
        workers = site.send("GET", "/workers", key=ADMIN).json()["workers"]
        return bool(sum(one["state"] == "up" for one in workers) == 2)
    return False


@pytest.fixture
def site(start: Start, tmp_path: Path) -> Iterator[Site]:
    engine = begin_engine(start, *DEBUG)
    bridge = begin_bridge(start, engine.grpc_url, *DEBUG)
    port, config = free_ports((0, 1)), tmp_path / "herd.toml"
    worker = f'[[workers]]\nurl = "{engine.url}"\n[[workers]]\nurl = "{bridge.url}"\n[[workers]]\nurl = "http://127.0.0.1:9"\n'
    worker += 'engine_key_env = "OWN_KEY"\n'
    config.write_text(worker + '[[keys]]\nname = "web"\nenv = "WEB_KEY"\n')
    ports = ("--port", str(port), "--grpc-port", str(port + 1))
    words = ("gateway", "--config", str(config), *ports, "--access-log", str(tmp_path / "access.jsonl"), *DEBUG)
    environment = {"WEB_KEY": WEB, "KVHERD_ADMIN_KEY": ADMIN, "KVHERD_ENGINE_API_KEY": ENGINE, "OWN_KEY": OWN}
    with ExitStack() as stack:
        command = [sys.executable, "-m", "kvherd.cli.main", *words]
        gateway = stack.enter_context(OwnedProcess(command, environment=environment))
        url = f"http://127.0.0.1:{port}"
        it = Site(engine, bridge.process, gateway, url, port + 1, tmp_path / "access.jsonl", config)
        gateway.wait_for(lambda: up(it), what="two workers are up")
        yield it


def test_no_prompt_and_no_key_is_told_anywhere(site: Site) -> None:
    for every in (rightly, wrongly, by_keys, by_operators, over_grpc):
        every(site)
    site.engine.kill_rank()  # its requests break down from here on
    rightly(site)
    site.config.write_text(site.config.read_text() + f'\n[[keys]]\nname = "two"\nenv = "{WRONG}"\n')
    site.gateway.wait_for(lambda: "stays as it was" in site.gateway.said, what="a wrong file is told of")
    with suppress(httpx.HTTPError):
        site.send("POST", "/v1/completions", json={"model": "tiny", "prompt": PROMPT})
    site.gateway.wait_for(lambda: len(site.access.read_text().splitlines()) > 20, what="the access log has its lines")
    for where, text in site.told().items():
        found = [line for line in text.splitlines() if any(word in line for word in CANARIES)]
        # A file that names a variable is quoted by that name: it is what the operator must mend.
        found = [line for line in found if f"environment's {WRONG}" not in line]
        assert found == [], f"{where} tells: {found[:3]}"


def rightly(site: Site) -> None:
    chat = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "user": PROMPT}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"stream": True}),
        ("/v1/completions", {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}),
        ("/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 4}}),
        ("/tokenize", {"model": "tiny", "prompt": PROMPT}),
        ("/v1/embeddings", {"model": "tiny", "input": PROMPT}),
        ("/v1/responses", {"model": "tiny", "input": PROMPT}),
    ):
        for headers in ({}, {"x-kvherd-explain": "1"}):
            site.send("POST", f"{path}?api_key={WEB}", json=body, headers=headers)
    with suppress(httpx.HTTPError):  # it is gone, the second time
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}
        site.send("POST", "/v1/completions", url=site.engine.url, json=body)


def wrongly(site: Site) -> None:
    bodies: list[Any] = [
        f'{{"model": "tiny", "prompt": "{PROMPT}" "{PROMPT}"',
        f'"{PROMPT}"',
        json.dumps({"model": "other", "prompt": PROMPT}),
        json.dumps({"model": "tiny", "prompt": {"a": PROMPT}}),
        json.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": PROMPT}),
        json.dumps({"model": "tiny", "prompt": PROMPT, "temperature": PROMPT}),
        json.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 10**9}),
        json.dumps({"model": "tiny", "prompt": PROMPT, "n": -1}),
        json.dumps({"model": "tiny", "prompt": PROMPT * 3000}),
        json.dumps({"model": "tiny", "messages": [{"role": "clown", "content": PROMPT}]}),
        json.dumps({"model": "tiny", "messages": [{"role": "user", "content": [{"type": "odour", "text": PROMPT}]}]}),
        json.dumps({"model": "tiny", "messages": [{"role": "user", "content": PROMPT, "tool_calls": PROMPT}]}),
        PROMPT.encode() + b"\xff\xfe",
    ]
    for door in (site.url, site.engine.url):
        for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/detokenize"):
            for body in bodies:
                site.send("POST", path, url=door, content=body, headers={"content-type": "application/json"})


def by_keys(site: Site) -> None:
    body = {"model": "tiny", "prompt": PROMPT}
    for key in (WRONG, ADMIN, f"{WEB}\t{WRONG}"):
        site.send("POST", "/v1/completions", key=key, json=body)
        site.send("GET", "/v1/models", key=key)
    for scheme in (f"Basic {WRONG}", WRONG, "Bearer"):
        site.send("POST", "/v1/completions", json=body, headers={"authorization": scheme})
        site.send("GET", "/workers", headers={"authorization": scheme})
    site.send("POST", "/v1/completions", json=body, headers={"x-api-key": WRONG, "cookie": WRONG})


def by_operators(site: Site) -> None:
    for key in (WRONG, WEB):
        site.send("POST", "/flush_cache", key=key)
    worker = {"url": f"http://user:{WRONG}@127.0.0.1:1"}
    site.send("POST", "/workers", key=ADMIN, json=worker)
    site.send("POST", "/workers", key=ADMIN, json={"url": f"http://127.0.0.1:1/?key={WRONG}"})
    for key in (OWN, f"{OWN} two"):
        site.send("POST", "/workers", key=ADMIN, json={"url": "http://127.0.0.1:10", "engine_key": key})
        site.send("PATCH", "/workers/http-127.0.0.1-10", key=ADMIN, json={"engine_key": key})
    site.send("POST", "/start_profile?worker=all", key=ADMIN, json={"output_dir": "/proc/nowhere", "num_steps": 1})
    site.send("POST", "/flush_cache", key=ADMIN)


def over_grpc(site: Site) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{site.grpc_port}") as channel:
        stub = pb_grpc.GatewayStub(channel)  # type: ignore[no-untyped-call]
        calls: list[Callable[..., Any]] = [stub.ListWorkers, stub.FlushCache]
        for key in (WRONG, ADMIN):
            for call, request in zip(calls, (pb.ListWorkersRequest(), pb.FlushCacheRequest()), strict=True):
                try:
                    call(request, metadata=(("authorization", f"Bearer {key}"),), timeout=PATIENCE_S)
                except grpc.RpcError as error:
                    site.answers.append(str(error))


@pytest.mark.parametrize(
    "words",
    [
        ("gateway", "--api-key", f"{WRONG} two"),
        ("gateway", "--admin-key", f"{WRONG}\x01"),
        ("gateway", "--engine-api-key", f"{WRONG} two"),
        ("gateway", "--worker", f"http://user:{WRONG}@127.0.0.1:1"),
        ("bridge", "--engine-api-key", f"{WRONG} two"),
        ("bridge", "--engine", f"http://user:{WRONG}@127.0.0.1:1"),
        ("doctor", f"http://user:{WRONG}@127.0.0.1:1"),
        ("flush", "--admin-key", f"{WRONG} two", "--gateway", "http://127.0.0.1:1"),
    ],
)
def test_an_option_that_is_wrong_is_not_repeated_where_it_may_be_a_key(start: Start, words: tuple[str, ...]) -> None:
    process = start(*words)
    assert process.wait(within_s=PATIENCE_S) in (1, 2, 3)
    assert not any(word in process.said for word in CANARIES), process.said
