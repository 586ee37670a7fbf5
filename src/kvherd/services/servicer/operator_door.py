"""What operators and their tools ask of an engine over HTTP: orders, metrics, health. The sidecar is this alone.

The engine's own HTTP door has these routes beside those for generations.
"""

from collections.abc import Awaitable, Iterable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvherd.core.engine.reports import OrderReport
from kvherd.core.errors import FieldInvalid, OrderRefused, OrderTimedOut
from kvherd.core.fleet.host_names import HostNames
from kvherd.core.ids import OrderId
from kvherd.ports.scheduler import Scheduler
from kvherd.services.servicer.config import ServicerConfig
from kvherd.services.servicer.facts import EngineFacts
from kvherd.services.servicer.http_edge import (
    Endpoint,
    body_within,
    json_answer,
    not_served,
    route,
    unless_client_leaves,
)
from kvherd.services.servicer.metrics import CONTENT_TYPE, EngineMetrics
from kvherd.services.servicer.order_edge import checked_timeout, message_of
from kvherd.services.servicer.profiles import ProfileDone, Profiles
from kvherd.wire.openai.errors import error_object
from kvherd.wire.profile_fields import decode_start_profile, decode_stop_profile
from kvherd.wire.status import status_of


class OperatorDoor:
    """`app` is the sidecar; `routes` are for a larger application."""

    def __init__(
        self,
        config: ServicerConfig,
        scheduler: Scheduler,
        facts: EngineFacts,
        profiles: Profiles,
        metrics: EngineMetrics,
    ) -> None:
        self._config = config
        self._names = HostNames(config.host, config.host_names)
        self._scheduler = scheduler
        self._facts = facts
        self._profiles = profiles
        self._metrics = metrics

    def app(self) -> Starlette:
        return Starlette(exception_handlers={HTTPException: not_served}, routes=self.routes())

    def routes(self) -> list[Route]:
        return [
            route("/flush_cache", self.guarded(self.flush), "GET", "POST"),
            route("/start_profile", self.guarded(self.start_profile), "POST"),
            route("/stop_profile", self.guarded(self.stop_profile), "POST"),
            route("/health", self.health, "GET"),
            route("/server_info", self.guarded(self.server_info), "GET"),
            route("/get_server_info", self.guarded(self.server_info), "GET"),
            route("/metrics", self.guarded(self.metrics), "GET"),
        ]

    def guarded(self, handler: Endpoint) -> Endpoint:
        """The same, but not for web pages: no key stands between these and whoever is there."""

        async def unless_from_a_page(request: Request) -> Response:
            headers = request.headers
            host = headers.get("host", "")
            if self._names.closed:
                self._names.check(host)
            self._names.check_page(host=host, origin=headers.get("origin"), site=headers.get("sec-fetch-site"))
            return await handler(request)

        return unless_from_a_page

    # --- orders ------------------------------------------------------------------

    async def flush(self, request: Request) -> Response:
        """200 when every rank cleared its cache; 400 when one refused or was still busy at the time's end."""
        timeout_s = _timeout(request, self._config.order_timeout_limit_s)
        hold = request.query_params.get("hold", "false").lower() in ("1", "true")
        await self._body(request)  # means nothing, but what follows it is how a client's leaving is seen
        flush = self._scheduler.flush(timeout_s=timeout_s, hold=hold)
        report = await unless_client_leaves(request.receive, flush)
        answer = {
            "success": report.done,
            "timed_out": bool(report.silent) or any(each.timed_out for each in report.answers),
            "message": message_of(report),
            "ranks": [
                {"rank": each.rank, "done": each.done, "message": each.message, "cleared_blocks": each.cleared_blocks}
                for each in report.answers
            ]
            + [{"rank": rank, "done": False, "message": "no answer", "cleared_blocks": 0} for rank in report.silent],
        }
        if report.silent:
            return json_answer(answer, 504)
        return json_answer(answer, 200 if report.done else 400)

    async def start_profile(self, request: Request) -> Response:
        wish = decode_start_profile(await self._body(request))
        return await _profiled(request, self._profiles.start(wish))

    async def stop_profile(self, request: Request) -> Response:
        decode_stop_profile(await self._body(request))
        return await _profiled(request, self._profiles.stop())

    # --- what it is and how it does ------------------------------------------------

    async def health(self, request: Request) -> Response:
        failure = self._facts.failure
        if failure is None:
            return json_answer({"status": "ok"})
        return json_answer({"status": "failed", "reason": str(failure)}, 503)

    async def server_info(self, request: Request) -> Response:
        return json_answer(self._facts.server_info(await self.state()))

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE)

    async def state(self) -> OrderReport:
        """Raises `OrderTimedOut` unless every rank answered."""
        report = await self._scheduler.state()
        if report.silent:
            raise OrderTimedOut(OrderId("state"), tuple(report.silent), 5.0)
        return report

    async def _body(self, request: Request) -> bytes:
        return await body_within(request, self._config.order_body_limit_bytes, within_s=self._config.body_within_s)


async def _profiled(request: Request, order: Awaitable[ProfileDone]) -> Response:
    try:
        done = await unless_client_leaves(request.receive, order)
    except OrderRefused as error:
        return json_answer({"error": error_object(error), "ranks": _ranks(error.ranks)}, status_of(error).http)
    except OrderTimedOut as error:
        silent = [(rank, False, "no answer") for rank in error.silent_ranks]
        return json_answer({"error": error_object(error), "ranks": _ranks(silent)}, status_of(error).http)
    fields = {"success": True, "profile_id": done.profile_id, "message": done.message, "files": done.files}
    return json_answer(fields | {"notes": done.notes, "ranks": _ranks(done.ranks)})


def _ranks(told: Iterable[tuple[int, bool, str]]) -> list[dict[str, object]]:
    return [{"rank": rank, "done": done, "message": message} for rank, done, message in told]


def _timeout(request: Request, limit_s: float) -> float:
    text = request.query_params.get("timeout", "0")
    try:
        timeout_s = float(text)
    except ValueError:
        raise FieldInvalid("timeout", f"{text!r} is not a number of seconds") from None
    return checked_timeout(timeout_s, limit_s)
