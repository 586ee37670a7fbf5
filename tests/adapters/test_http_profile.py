"""What an order for a profile becomes on its way to an engine on HTTP."""

import json
from typing import Any, cast

import pytest

from kvherd.adapters.http_exchange import HttpAnswer, HttpAsker
from kvherd.adapters.http_profile import start_profile
from kvherd.core.errors import FieldInvalid, WorkerRefused
from kvherd.core.ids import Rank, WorkerId
from kvherd.ports.worker import ProfileAnswer, RankOutcome, WorkerKind

ENGINE = WorkerId("http://engine:8000")


class Asked:
    """Takes every order, keeps its fields, and gives one answer."""

    def __init__(self, status: int = 200, answer: bytes = b"") -> None:
        self.fields: list[dict[str, Any]] = []
        self.answer = HttpAnswer(status, answer)

    async def ask(self, method: str, path: str, *, body: bytes = b"") -> HttpAnswer:
        assert (method, path) == ("POST", "/start_profile")
        self.fields.append(json.loads(body) if body else {})
        return self.answer


async def answered(status: int, **told: object) -> ProfileAnswer:
    asked = Asked(status, json.dumps(told).encode())
    return await start_profile(ENGINE, cast(HttpAsker, asked), WorkerKind.KVHERD_HTTP, {})


RANKS = [{"rank": 0, "done": True, "message": "on"}, {"rank": 1, "done": False, "message": "disk full"}]
TOLD = (RankOutcome(Rank(0), done=True, message="on"), RankOutcome(Rank(1), done=False, message="disk full"))


async def test_what_each_rank_did_is_told_whether_or_not_all_did_it() -> None:
    done = await answered(200, message="on", ranks=RANKS[:1])
    assert (done.done, done.ranks) == (True, TOLD[:1])
    refused = await answered(400, error={"message": "rank 1: disk full"}, ranks=RANKS)
    assert (refused.done, refused.ranks) == (False, TOLD)
    assert refused.message == f"{ENGINE} refused: HTTP 400: rank 1: disk full"
    with pytest.raises(WorkerRefused, match="one is on"):
        await answered(409, error={"message": "one is on"})


async def sent(kind: WorkerKind, version: str, **fields: object) -> dict[str, Any]:
    asked = Asked()
    await start_profile(ENGINE, cast(HttpAsker, asked), kind, fields, version=version)
    return asked.fields[0]


async def test_sglang_has_its_fields_as_they_are() -> None:
    assert await sent(WorkerKind.SGLANG_HTTP, "0.5.23", num_steps="5", output_dir="/t") == {
        "num_steps": "5",
        "output_dir": "/t",
    }


@pytest.mark.parametrize("steps", [5, "5"])
async def test_vllm_has_the_two_that_it_takes_by_its_own_names(steps: object) -> None:
    fields = await sent(WorkerKind.VLLM_HTTP, "0.32.0+cpu", num_steps=steps, profile_prefix="night")
    assert fields == {"max_iterations": 5, "profile_prefix": "night"}
    assert await sent(WorkerKind.VLLM_HTTP, "1.0.0", num_steps=steps) == {"max_iterations": 5}
    assert await sent(WorkerKind.VLLM_HTTP, "0.16.0") == {}


@pytest.mark.parametrize(("version", "name"), [("0.31.2", "num_steps"), ("", "num_steps"), ("0.32.0", "output_dir")])
async def test_what_vllm_would_ignore_is_refused_by_name(version: str, name: str) -> None:
    with pytest.raises(FieldInvalid, match=f"{name}.*means nothing to this vLLM"):
        await sent(WorkerKind.VLLM_HTTP, version, **{name: "5"})
