"""Engines as a conformance suite meets them: started here, or anywhere, with what each of them is known to break."""

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from kvherd.testing import known_breaks
from kvherd.testing.engine_client import Address
from kvherd.testing.herds import begin_bridge, begin_engine
from kvherd.testing.processes import KvherdProcess, OwnedProcess, can_bind, command_line, free_ports, wait_until
from kvherd.testing.stock_engines import StockEngine, sglang

GIVEN_VARIABLE = "KVHERD_CONFORM"
OFFSETS = (0, 1, 2, 10, 11, 30, 31)
ENDLESS = ("--max-context-tokens", "60000", "--kv-tokens", "131072")
"""An answer that is long enough to outlast any test, however loaded the machine, on a model that takes a moment."""


@dataclass(slots=True)
class EngineUnderTest:
    """One that answers when this is made. `process` is None where it is not ours to kill.

    `begin` starts it again at its addresses. `breaks` has for tests that it is known to fail what it does instead.
    `doubted`: it left somebody without an answer, and what it does next may be that one's fault.
    """

    address: Address
    process: OwnedProcess | None = None
    begin: Callable[[], OwnedProcess] | None = None
    rank_words: tuple[str, ...] = ()
    breaks: Mapping[str, str] = field(default_factory=dict)
    doubted: bool = False

    def revive(self) -> None:
        """Start it again if it was killed, or died of what was asked of it, or is doubted."""
        if self.process is None or self.begin is None or not (self.doubted or self._is_down()):
            return
        self.doubted = False
        self._signal(signal.SIGKILL)
        ports = (self.address.port, self.address.sidecar_port or self.address.port)
        wait_until(lambda: all(map(can_bind, ports)), within_s=20, what="its ports are free")
        self.process = self.begin()

    def go_on(self) -> None:
        """SIGCONT to all of it."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.process.family() if self.process is not None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _is_down(self) -> bool:
        assert self.process is not None
        if self.process.has_ended():
            return True
        found = [command_line(pid) for pid in self.process.family()]
        return not all(any(word in line for line in found) for word in self.rank_words)

    def rank_pid(self, rank: int) -> int:
        assert self.process is not None
        return self.process.member(self.rank_words[rank])


Target = Callable[[ExitStack], EngineUnderTest]


def _kvherd(stack: ExitStack, ranks: int) -> EngineUnderTest:
    port = free_ports(OFFSETS)

    def begin() -> OwnedProcess:
        def start(*words: str) -> KvherdProcess:
            return stack.enter_context(KvherdProcess(*words))

        return begin_engine(start, *ENDLESS, "--dp-size", str(ranks), port=port).process

    words = tuple(f"runtime.process rank={rank}" for rank in range(ranks))
    return EngineUnderTest(Address("127.0.0.1", port, port + 1, ranks=ranks), begin(), begin, words)


def engine(stack: ExitStack) -> EngineUnderTest:
    return _kvherd(stack, 1)


def engine_of_two_ranks(stack: ExitStack) -> EngineUnderTest:
    return _kvherd(stack, 2)


def bridged_engine(stack: ExitStack) -> EngineUnderTest:
    """`kvherd bridge`, which tells the events itself, before the gRPC of an engine."""

    def start(*words: str) -> KvherdProcess:
        return stack.enter_context(KvherdProcess(*words))

    behind = begin_engine(start, *ENDLESS)
    bridge = begin_bridge(start, behind.grpc_url, *behind.events)
    return EngineUnderTest(Address("127.0.0.1", bridge.port, None))


def stock_sglang(stack: ExitStack) -> EngineUnderTest:
    """SGLang in its gRPC mode, on a CPU."""
    port = free_ports((0, 1, 2, 3))
    events, replay = (f"tcp://127.0.0.1:{port + offset}" for offset in (2, 3))
    server = sglang(port, events=events, replay=replay, grpc=True)

    def begin() -> OwnedProcess:
        started = StockEngine(server, stack.enter_context)
        started.await_ready()
        return started.process

    address = Address("127.0.0.1", port, port + 1, long_tokens=800, patience_s=15.0)
    return EngineUnderTest(address, begin(), begin, ("sglang::scheduler",), known_breaks.SGLANG)


def given_engine(stack: ExitStack) -> EngineUnderTest:
    """Whatever answers at `HOST:PORT[,sidecar=PORT][,ranks=N][,tokens=N]` of the environment."""
    where, *options = os.environ[GIVEN_VARIABLE].split(",")
    host, _, port = where.rpartition(":")
    numbers = {name: int(value) for name, _, value in (option.partition("=") for option in options)}
    address = Address(
        host,
        int(port),
        numbers.get("sidecar"),
        ranks=numbers.get("ranks", 1),
        long_tokens=numbers.get("tokens", 800),
        patience_s=40.0,
    )
    return EngineUnderTest(address)
