"""The servicer's side of a rank's sockets, as bare as it gets: for tests of real rank processes."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import zmq
import zmq.asyncio

from kvherd.core.engine.generation import GenerationRequest, Limits, Sampling
from kvherd.core.engine.reports import OrderAnswer, RankFacts, RankLoad
from kvherd.core.ids import OrderId, RequestId
from kvherd.wire import scheduler_ipc as ipc

T = TypeVar("T")


class RankClient:
    """Collects everything ranks say. Each wait has a deadline, and raises `TimeoutError` past it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._context = zmq.asyncio.Context()
        self._orders: dict[int, zmq.asyncio.Socket] = {}
        self.heard: list[ipc.FromRank] = []
        self._news = self._context.socket(zmq.PULL)
        self._news.bind(f"ipc://{directory}/out")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.destroy(linger=0)

    async def send(self, message: ipc.ToRank, *, rank: int = 0) -> None:
        await self.send_raw(ipc.encode(message), rank=rank)

    async def send_raw(self, frame: bytes, *, rank: int = 0) -> None:
        if rank not in self._orders:
            self._orders[rank] = self._context.socket(zmq.PUSH)
            self._orders[rank].connect(f"ipc://{self._directory}/rank{rank}.in")
        await self._orders[rank].send(frame)

    async def until(self, found: Callable[[], T | None], *, deadline_s: float = 20.0) -> T:
        """Hear messages until `found` finds something in `heard`."""
        async with asyncio.timeout(deadline_s):
            while (answer := found()) is None:
                self.heard.append(ipc.decode_from_rank(await self._news.recv()))
            return answer

    async def ready(self, rank: int = 0) -> RankFacts:
        return await self.until(
            lambda: next((m.facts for m in self.heard if isinstance(m, ipc.Ready) and m.facts.rank == rank), None)
        )

    async def fatal(self) -> str:
        return await self.until(lambda: next((m.reason for m in self.heard if isinstance(m, ipc.Fatal)), None))

    async def submit(self, name: str, prompt: list[int], tokens: int, *, rank: int = 0) -> None:
        limits = Limits(tokens, ignore_eos=True)
        what = GenerationRequest(RequestId(name), prompt, limits, Sampling(temperature=0.0))
        await self.send(ipc.Submit(what), rank=rank)

    def said(self, name: str) -> list[ipc.Progress]:
        steps = [message for message in self.heard if isinstance(message, ipc.Stepped)]
        return [each for step in steps for each in step.progress if each.request == name]

    async def started(self, name: str) -> ipc.Progress:
        return await self.until(lambda: next(iter(self.said(name)), None))

    async def end(self, name: str) -> list[ipc.Progress]:
        """All that was said of the request, once it has ended."""
        return await self.until(lambda: said if (said := self.said(name)) and said[-1].finish is not None else None)

    async def answer(self, order: str) -> OrderAnswer:
        def found() -> OrderAnswer | None:
            answers = (message.answer for message in self.heard if isinstance(message, ipc.OrderAnswered))
            return next((answer for answer in answers if answer.order == order), None)

        return await self.until(found)

    async def flush(self, order: str, timeout_s: float = 0.0, *, hold: bool = False) -> None:
        await self.send(ipc.FlushOrder(OrderId(order), timeout_s, hold))

    async def load(self, order: str) -> RankLoad:
        await self.send(ipc.StateOrder(OrderId(order)))
        load = (await self.answer(order)).load
        assert load is not None
        return load
