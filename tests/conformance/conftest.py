"""Which engines the suite meets, and what became of each promise where it is not ours.

`make test` runs it against `kvherd engine`, with one rank and two, and against `kvherd bridge` before it.
`-m peers` runs it against a stock SGLang, and against the engine that `KVHERD_CONFORM=HOST:PORT` names.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import httpx
import pytest

from kvherd.testing.engine_client import EngineClient
from kvherd.testing.engines_under_test import (
    GIVEN_VARIABLE,
    EngineUnderTest,
    Target,
    bridged_engine,
    engine_of_two_ranks,
    given_engine,
    stock_sglang,
)
from kvherd.testing.engines_under_test import engine as one_engine

OURS, PEERS = pytest.mark.engine, [pytest.mark.peers, pytest.mark.timeout(600)]
ENGINE = pytest.param(one_engine, id="engine", marks=OURS)
TWO_RANKS = pytest.param(engine_of_two_ranks, id="two ranks", marks=OURS)
BRIDGE = pytest.param(bridged_engine, id="bridge", marks=OURS)
SGLANG = pytest.param(stock_sglang, id="sglang", marks=PEERS)
GIVEN = [pytest.param(given_engine, id="given", marks=PEERS)] if GIVEN_VARIABLE in os.environ else []

MEETS = {
    "pair": [TWO_RANKS],
    "traced": [ENGINE, TWO_RANKS],
    "mortal": [ENGINE, TWO_RANKS, SGLANG],
    "sidecar": [ENGINE, TWO_RANKS, SGLANG, *GIVEN],
    "engine": [ENGINE, TWO_RANKS, BRIDGE, SGLANG, *GIVEN],
}
"""By the fixture that a test asks for: what it needs decides who can be met."""

VERDICTS = pytest.StashKey[list[tuple[str, str, str]]]()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" in metafunc.fixturenames:
        whom = next(targets for need, targets in MEETS.items() if need in metafunc.fixturenames)
        metafunc.parametrize("target", whom, indirect=True, scope="session")


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest) -> Iterator[EngineUnderTest]:
    begin: Target = request.param
    with ExitStack() as stack:
        yield begin(stack)


@pytest.fixture
def engine(target: EngineUnderTest, request: pytest.FixtureRequest) -> Iterator[EngineClient]:
    """It is alive and idle."""
    reason = target.breaks.get(request.node.originalname)
    if reason is not None:
        request.applymarker(pytest.mark.xfail(reason=reason, strict=False))
    target.revive()
    with EngineClient(target.address) as client:
        client.until_idle()
        yield client


@pytest.fixture
def sidecar(engine: EngineClient) -> EngineClient:
    return engine


@pytest.fixture
def pair(engine: EngineClient) -> EngineClient:
    """It has two ranks."""
    return engine


@pytest.fixture
def traced(engine: EngineClient) -> EngineClient:
    """Its traces are kvherd's."""
    return engine


@pytest.fixture
def mortal(engine: EngineClient, target: EngineUnderTest) -> Iterator[EngineUnderTest]:
    """It may be killed, or stand still: whoever comes next starts it again, or finds it going on."""
    yield target
    target.go_on()


# --- the table of who keeps what --------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment] # as pytest has it
    target: EngineUnderTest | None = getattr(item, "funcargs", {}).get("target")
    unanswered = call.excinfo is not None and call.excinfo.errisinstance((httpx.TransportError, grpc.RpcError))
    if target is not None and unanswered:
        target.doubted = True
    if item.get_closest_marker("peers") and (report.when == "call" or report.outcome != "passed"):
        name, _, which = item.name.removeprefix("test_").replace("_", " ").partition("[")
        verdict = "broken" if report.outcome != "passed" else "kept"
        rows = item.config.stash.setdefault(VERDICTS, [])
        rows.append((verdict, f"{name} [{which}" if which else name, getattr(report, "wasxfail", "")))
    return report  # type: ignore[return-value] # as pytest has it


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(VERDICTS, [])
    if rows:
        terminalreporter.section("promises of engines that are not ours")
        for verdict, name, instead in sorted(rows):
            terminalreporter.line(f"{verdict:7} {name}{': ' + instead if instead else ''}")
