"""One tokenizer for a model, whoever tells it, and read once however many workers name its source."""

import asyncio

from kvherd.core.errors import ModelMissing
from kvherd.core.fleet.roster import Member
from kvherd.core.ids import WorkerId
from kvherd.ports.completions import Tokenizer
from kvherd.services.gateway.fleet.tokenizers import Tokenizers
from kvherd.testing.tokenizer import ByteTokenizer


class Source:
    """A factory that takes a second, and what it was asked for."""

    def __init__(self, *, broken: str = "", hanging: str = "") -> None:
        self.asked: list[str] = []
        self._broken, self._hanging = broken, hanging

    async def __call__(self, source: str) -> Tokenizer:
        self.asked.append(source)
        await asyncio.sleep(3600 if source == self._hanging else 1)
        if source == self._broken:
            raise ModelMissing(source, "there is no tokenizer.json")
        return ByteTokenizer()


def member(name: str, source: str | None, *models: str) -> Member:
    return Member(WorkerId(f"http://{name}"), tokenizer_from=source, models=models)


async def learn(tokenizers: Tokenizers, *members: Member) -> None:
    async with asyncio.TaskGroup() as group:
        for one in members:
            group.create_task(tokenizers.learn(one))


async def test_two_workers_of_one_model_that_join_together_have_its_directory_read_once() -> None:
    source = Source()
    tokenizers = Tokenizers(source, deadline_s=30)
    await learn(tokenizers, member("a", "/models/m", "m"), member("b", "/models/m", "m"))
    assert source.asked == ["/models/m"]
    assert tokenizers.of("m") is not None


async def test_a_source_that_hangs_holds_back_no_worker_with_another_one() -> None:
    tokenizers = Tokenizers(Source(hanging="grpc://a:1"), deadline_s=30)
    slow, quick = member("a", "grpc://a:1", "m"), member("b", "grpc://b:1", "m")
    async with asyncio.TaskGroup() as group:
        group.create_task(tokenizers.learn(slow))
        group.create_task(tokenizers.learn(quick))
        await asyncio.sleep(2)
        assert tokenizers.of("m") is not None
    assert slow.tokenizer_problem == "nothing within 30 s"
    assert quick.tokenizer_problem == ""


async def test_what_is_wrong_with_a_source_is_told_of_every_worker_that_names_it_and_it_is_read_again() -> None:
    source = Source(broken="/models/m")
    tokenizers = Tokenizers(source, deadline_s=30)
    both = member("a", "/models/m", "m"), member("b", "/models/m", "m")
    await learn(tokenizers, *both)
    assert all("no tokenizer.json" in one.tokenizer_problem for one in both)
    assert tokenizers.of("m") is None
    assert len(source.asked) == 2


async def test_a_worker_that_names_no_source_asks_nobody() -> None:
    source = Source()
    await learn(Tokenizers(source, deadline_s=30), member("a", None, "m"))
    assert source.asked == []
