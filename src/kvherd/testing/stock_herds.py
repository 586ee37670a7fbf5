"""One stock engine, its bridge, and two gateways over it: one follows the bridge, one the engine's own sockets."""

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import httpx

from kvherd.testing.herds import GatewayProcess, begin_gateway
from kvherd.testing.processes import KvherdProcess, OwnedProcess, free_ports, wait_until
from kvherd.testing.stock_engines import MODEL, StockEngine, StockServer

LIVE_S = 20.0
ANSWER_S = 120.0
EXACT_S = 30.0
WORDS = (
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "fable",
    "grove",
    "haven",
    "inlet",
    "jumbo",
    "koala",
    "lemon",
    "maple",
)


@dataclass(frozen=True, slots=True)
class Answered:
    """One chat: what was predicted to be cached of its prompt, if that could be, and what the engine said."""

    prompt_tokens: int
    predicted: int | None
    reported: int
    rank: str | None = None
    block: int = 1
    """What credit goes by, where an engine of small pages reports more finely."""

    @property
    def exact(self) -> bool:
        return self.predicted == self.reported // self.block * self.block


@dataclass(slots=True)
class Talks:
    """Several conversations in turn; each goes on from its own past, and begins anew when it is long."""

    seed: int
    at_once: int = 6
    block: int = 1
    answers: list[Answered] = field(default_factory=list)
    _dice: random.Random = field(init=False)
    _messages: dict[int, list[dict[str, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)

    def turn(self, gateway: GatewayProcess) -> Answered:
        number = self._dice.randrange(self.at_once)
        messages = self._messages.get(number)
        if not messages or len(messages) > 11:
            messages = self._messages[number] = [{"role": "system", "content": self.words(60)}]
        messages.append({"role": "user", "content": self.words(16)})
        answered, text = chat(gateway, messages)
        answered = replace(answered, block=self.block)
        messages.append({"role": "assistant", "content": text})
        self.answers.append(answered)
        return answered

    def words(self, count: int) -> str:
        return " ".join(self._dice.choice(WORDS) for _ in range(count))

    def figures(self) -> str:
        exact, hits = sum(one.exact for one in self.answers), sum(one.reported > 0 for one in self.answers)
        wrong = [(at, one.predicted, one.reported) for at, one in enumerate(self.answers) if not one.exact]
        told = f"{len(self.answers)} chats, {hits} with a hit, {exact} predicted exactly"
        return f"{told}; (which, predicted, reported) {wrong}" if wrong else told


def chat(gateway: GatewayProcess, messages: list[dict[str, str]], *, model: str = MODEL) -> tuple[Answered, str]:
    body = {"model": model, "messages": messages, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=ANSWER_S)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    reported = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    predicted = answer.headers.get("x-kvherd-predicted-cached-tokens")
    text: str = answer.json()["choices"][0]["message"]["content"] or ""
    rank = answer.headers.get("x-kvherd-rank")
    return Answered(usage["prompt_tokens"], None if predicted is None else int(predicted), reported, rank), text


def chat_until_exact(gateway: GatewayProcess, messages: list[dict[str, str]], *, model: str = MODEL) -> Answered:
    """Chat until what is cached is predicted exactly, and is something: blocks are heard of a moment after they are
    stored, on a busy machine a long one. Never may more be predicted than there is.
    """
    found: list[Answered] = []

    def is_exact() -> bool:
        answered, _ = chat(gateway, messages, model=model)
        assert (answered.predicted or 0) <= answered.reported, answered
        found.append(answered)
        return answered.exact and answered.reported > 0

    try:
        wait_until(is_exact, within_s=EXACT_S, what="what is cached is predicted")
    except AssertionError as error:
        raise AssertionError(f"{error}, not as in {found[:3]} … {found[-3:]}") from None
    return found[-1]


def settle(*gateways: GatewayProcess) -> None:
    """Until they have heard the same and nothing new for a moment, and what the engine told them last is that it runs
    nothing, or three seconds are over: a person reads an answer before the next question.
    """
    until_s = time.monotonic() + 3
    before, same = [-1], 0
    while same < 3 and time.monotonic() < until_s:
        workers = [worker for gateway in gateways for worker in gateway.workers()]
        blocks: list[Any] = [cast("dict[str, Any]", worker["kv"])["blocks"] for worker in workers]
        idle = not any(worker["running"] or worker["waiting"] for worker in workers)
        same = same + 1 if idle and blocks == before and len(set(blocks)) == 1 else 0
        before = blocks
        time.sleep(0.02)


@dataclass(slots=True)
class StockHerd:
    """`start` begins a `kvherd` command and sees to its end."""

    engine: StockEngine
    start: Callable[..., KvherdProcess]
    bridge_port: int
    bridge: KvherdProcess = field(init=False)
    bridged: GatewayProcess = field(init=False)
    direct: GatewayProcess = field(init=False)

    def __post_init__(self) -> None:
        self.begin_bridge()
        self.engine.await_ready()
        self.bridged = begin_gateway(self.start, self.bridged_worker, up=1)
        self.direct = begin_gateway(self.start, self.engine.server.direct_worker, up=1)
        self.await_live()

    @property
    def bridged_worker(self) -> str:
        return f"{self.engine.server.url},events=grpc://127.0.0.1:{self.bridge_port}"

    @property
    def gateways(self) -> tuple[GatewayProcess, GatewayProcess]:
        return self.bridged, self.direct

    def begin_bridge(self) -> None:
        self.bridge = self.start(*self.engine.server.bridge_words(f"127.0.0.1:{self.bridge_port}"))

    def await_live(self) -> None:
        for gateway in self.gateways:
            gateway.process.wait_for(lambda g=gateway: can_predict(g), within_s=LIVE_S, what="it follows the engine")  # type: ignore[misc]

    def epochs(self) -> list[str]:
        return [str(kv_of(gateway)["epoch"]) for gateway in self.gateways]

    def restart_engine(self) -> None:
        """SIGKILL, then a new process at the same addresses, until both gateways follow that one."""
        before = self.epochs()
        self.engine.kill()
        self.engine.begin()
        self.await_return(before)

    def await_return(self, epochs: list[str]) -> None:
        self.engine.await_ready()
        self.await_live()
        wait_until(
            lambda: not set(self.epochs()) & set(epochs), within_s=LIVE_S, what="both gateways follow another life"
        )

    def restart(self, gateway: GatewayProcess) -> GatewayProcess:
        """SIGKILL to a gateway, and another at its port."""
        gateway.process.signal(signal.SIGKILL)
        gateway.process.wait(within_s=5)
        worker = self.bridged_worker if gateway is self.bridged else self.engine.server.direct_worker
        again = begin_gateway(self.start, worker, port=gateway.port, up=1)
        if gateway is self.bridged:
            self.bridged = again
        else:
            self.direct = again
        self.await_live()
        return again

    def flush(self, gateway: GatewayProcess, timeout_s: float) -> dict[str, Any]:
        """The one worker's result."""
        url = f"{gateway.url}/flush_cache?timeout={timeout_s:g}"
        (result,) = httpx.post(url, timeout=timeout_s + 30).json()["workers"]
        return dict(result)

    def flush_while_busy(self, gateway: GatewayProcess, timeout_s: float) -> dict[str, Any]:
        """The result of a flush during all of which a chat was running, however long asking takes here."""
        for _ in range(5):
            wait_until(lambda: self.engine.running() == 0, within_s=LIVE_S, what="the engine runs nothing else")
            with self.generating(gateway, 900):
                result = self.flush(gateway, timeout_s)
                if self.engine.running() == 1:
                    return result
        raise AssertionError("no chat outlasted a flush")

    @contextmanager
    def generating(self, gateway: GatewayProcess, tokens: int) -> Iterator[httpx.Response]:
        """A chat that streams that many tokens and is running; leaving it leaves the answer."""
        messages = [{"role": "user", "content": "Count."}]
        body = {"model": MODEL, "messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=ANSWER_S) as answer:
            assert answer.status_code == 200
            wait_until(lambda: self.engine.running() == 1, within_s=10, what="the engine runs it")
            yield answer


def kv_of(gateway: GatewayProcess) -> dict[str, Any]:
    (worker,) = gateway.workers()
    kv = worker["kv"]
    assert isinstance(kv, dict)
    return kv


def truth_of(gateway: GatewayProcess) -> dict[str, Any]:
    (worker,) = gateway.workers()
    truth = worker["truth"]
    assert isinstance(truth, dict)
    return truth


def is_live(gateway: GatewayProcess) -> bool:
    """The worker is up and followed."""
    return gateway.has_up(1) and kv_of(gateway)["state"] == "live"


def can_predict(gateway: GatewayProcess) -> bool:
    """It follows the engine and has the tokenizer; asking leaves a prompt of a few tokens in the cache."""
    return is_live(gateway) and chat(gateway, [{"role": "system", "content": "."}])[0].predicted is not None


@contextmanager
def stock_herd(server: StockServer) -> Iterator[StockHerd]:
    with ExitStack() as stack:

        def keep(process: OwnedProcess) -> OwnedProcess:
            return stack.enter_context(process)

        def start(*words: str) -> KvherdProcess:
            return stack.enter_context(KvherdProcess(*words))

        yield StockHerd(StockEngine(server, keep), start, free_ports((0,)))
