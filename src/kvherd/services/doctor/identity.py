"""What the server is, whether it is well, and whether it can be flushed."""

from typing import Final

from kvherd.core.errors import WorkerError
from kvherd.core.kv.pages import folded_block
from kvherd.ports.worker import WorkerKind
from kvherd.services.doctor.findings import Finding, ok, problem, unknown, warning
from kvherd.services.doctor.instruments import Chart, Instruments
from kvherd.wire.told_events import events_told

_ABSENT: Final = frozenset({404, 501})
_SILENT_KINDS: Final = (WorkerKind.OPENAI_HTTP, WorkerKind.TRTLLM_GRPC, WorkerKind.MLX_GRPC)
_DAY_S: Final = 86_400.0
_WARNS_DAYS: Final = 14
LARGEST_BLOCK: Final = 512


def kind(chart: Chart) -> Finding:
    facts = chart.facts
    what = " ".join(filter(None, (facts.kind.value, facts.version)))
    seen = f"it is {what} and serves {', '.join(facts.models) or 'no model that it names'}"
    if facts.kind in _SILENT_KINDS:
        return problem("kind", seen, "it is none of vLLM, SGLang and kvherd: use the policy prefix_tree for it")
    if not facts.models:
        return problem("kind", seen, "let it name its model: no request can be routed to it otherwise")
    return ok("kind", seen)


def certificate(expires_at_s: float | None, now_s: float) -> list[Finding]:
    """Nothing of a server in the clear, or of one that was not seen to show a certificate."""
    if expires_at_s is None:
        return []
    left_days = (expires_at_s - now_s) / _DAY_S
    seen = f"its certificate expires in {left_days:.1f} days"
    if left_days < _WARNS_DAYS:
        return [warning("certificate", seen, "renew it: nobody will speak to it after that")]
    return [ok("certificate", seen)]


async def health(instruments: Instruments) -> Finding:
    try:
        await instruments.worker.probe()
    except WorkerError as error:
        return problem("health", str(error), "look at the server's own log")
    return ok("health", "it says that it is well")


def block_size(chart: Chart) -> Finding:
    size, told = chart.facts.block_size, chart.told.block_size
    if told and size and told != size:
        advice = "the gateway goes by the second: it is a mistake of the server, or of an option of it"
        return problem("block size", f"its events have blocks of {told} tokens, its cache of {size}", advice)
    if not size:
        return unknown("block size", "it does not tell its block size", "its events will, once one comes")
    if size > LARGEST_BLOCK:
        return warning("block size", f"{size} tokens", "shorter prompts than that are never cached: use 16 to 128")
    folded = folded_block(size)
    note = f", which the gateway folds into {folded}" if folded != size else ""
    return ok("block size", f"{size} tokens{note}")


def ranks(chart: Chart) -> Finding:
    count, directly = chart.facts.ranks, (chart.complaint.events or chart.told.endpoint or "").startswith("ipc://")
    if count > 1 and directly:
        return problem(
            "ranks", f"{count} ranks, and ipc:// has room for one", "give it a tcp:// endpoint for its events"
        )
    if count > 1:
        advice = f"give a bridge --ranks {count}"
        if not chart.facts.addressable:
            advice += "; it cannot be told which rank to use, so a request is credited with what all ranks hold"
        return warning("ranks", f"{count} data-parallel ranks", advice)
    return ok("ranks", "one rank")


async def server_info(chart: Chart, instruments: Instruments) -> None:
    """Take from the server's own description what it says of its events. vLLM has one in its development mode only."""
    if instruments.door is None or not (chart.vllm or chart.sglang):
        return
    path = "/server_info?config_format=json" if chart.vllm else "/server_info"
    try:
        answer = await instruments.door.ask("GET", path)
    except WorkerError:
        return
    chart.told = events_told(answer.document_if_ok(), chart.complaint.host)


async def flush(chart: Chart, instruments: Instruments) -> Finding:
    """By asking which routes or calls there are; nothing is flushed."""
    if instruments.methods is not None:
        if "FlushCache" in await instruments.methods():
            return ok("flush", "it has FlushCache; it was not called")
        return warning("flush", "it has no FlushCache", "a fleet-wide flush will leave this worker out")
    if instruments.door is None or not (chart.vllm or chart.sglang or chart.facts.kind is WorkerKind.KVHERD_HTTP):
        return unknown("flush", "it is not known how such a server is flushed")
    path = "/reset_prefix_cache" if chart.vllm else "/flush_cache"
    # No method that means anything: a route that is there refuses it, and nothing is flushed.
    status = (await instruments.door.ask("OPTIONS", path)).status
    if status in _ABSENT:
        how = "start it with VLLM_SERVER_DEV_MODE=1" if chart.vllm else "update it"
        return warning("flush", f"it has no {path}", f"{how}; until then `kvherd flush` cannot clear it")
    return ok("flush", f"it has {path}; it was not called")
