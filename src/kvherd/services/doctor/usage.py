"""Whether answers say how many of their prompt's tokens were cached: without it no prediction can be checked."""

from typing import Final

from kvherd.core.errors import WorkerError
from kvherd.services.doctor.findings import Finding, ok, problem, unknown, warning
from kvherd.services.doctor.instruments import Chart
from kvherd.services.doctor.requests import OVERLOADED, Sender

_NOT_SENT: Final = "no request was sent, as --no-requests says"


async def usage(chart: Chart, sender: Sender | None) -> list[Finding]:
    """Repeat a prompt that was sent before, whole and as a stream."""
    if sender is None:
        return [unknown("cached tokens", _NOT_SENT), unknown("usage in streams", _NOT_SENT)]
    return [await _cached(chart, sender), await _streamed(sender)]


async def _cached(chart: Chart, sender: Sender) -> Finding:
    check = "cached tokens"
    try:
        if not sender.answered:
            await sender.send()
        told = await sender.send()
    except WorkerError as error:
        return unknown(check, str(error), OVERLOADED if sender.too_slow else "")
    if told is None:
        return warning(check, "an answer does not say what it cost", "predictions cannot be checked without usage")
    if told.cached_tokens is None:
        flag = "--enable-cache-report" if chart.sglang else "--enable-prompt-tokens-details"
        advice = f"start it with {flag}: without it no prediction can be checked"
        return warning(check, "of a prompt that was sent twice, the answer does not say what was cached", advice)
    seen = f"of a prompt of {told.prompt_tokens} tokens that was sent twice, {told.cached_tokens} were cached"
    if not told.cached_tokens and chart.facts.ranks > 1 and not sender.ranks:
        return unknown(check, f"{seen}; perhaps it went to another rank the second time")
    if not told.cached_tokens:
        return problem(check, seen, _caching_on(chart))
    return ok(check, seen)


async def _streamed(sender: Sender) -> Finding:
    check = "usage in streams"
    try:
        told = await sender.send(stream=True)
    except WorkerError as error:
        return unknown(check, str(error), OVERLOADED if sender.too_slow else "")
    if told is None:
        return warning(check, "a stream with include_usage has none", "predictions for streams cannot be checked")
    return ok(check, "a stream with include_usage ends with it")


def _caching_on(chart: Chart) -> str:
    flag = "without --disable-radix-cache" if chart.sglang else "with --enable-prefix-caching"
    return f"start it {flag}: its prefix cache seems to be off, and nothing can be gained by routing"
