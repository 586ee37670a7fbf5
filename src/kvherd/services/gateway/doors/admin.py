"""The gateway's HTTP beside the data path: the fleet, orders to it, and what programs ask of any engine."""

from collections.abc import Mapping
from typing import Protocol
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvherd import __version__
from kvherd.core.errors import FieldInvalid, KvherdError, ModelUnknown
from kvherd.core.fleet.fanout import FanoutReport
from kvherd.core.fleet.roster import Member
from kvherd.services.gateway.doors.caller import caller
from kvherd.services.gateway.doors.console import Console
from kvherd.services.gateway.fleet.config_file import ConfigFile
from kvherd.services.gateway.relay.edge import DATA_PATHS, STORED, DataRequest, Judge
from kvherd.wire.fleet_json import flush_report, profile_report
from kvherd.wire.openai.body import parse_object
from kvherd.wire.openai.errors import error_body
from kvherd.wire.profile_fields import decode_start_profile, decode_stop_profile
from kvherd.wire.worker_fields import worker_change, worker_spec

RETRY_AFTER_S = "5"


def build_app(console: Console, *, policy: str) -> Starlette:
    """The Starlette application of one gateway. Routes for operators answer callers that the console admits."""
    routes = _Routes(console, policy)
    operators = [
        Route("/workers", routes.list_workers, methods=["GET"]),
        Route("/workers", routes.add_worker, methods=["POST"]),
        Route("/workers/{name:path}", routes.show_worker, methods=["GET"]),
        Route("/workers/{name:path}", routes.change_worker, methods=["PATCH"]),
        Route("/workers/{name:path}", routes.remove_worker, methods=["DELETE"]),
        Route("/flush_cache", routes.flush, methods=["POST"]),
        Route("/start_profile", routes.start_profile, methods=["POST"]),
        Route("/stop_profile", routes.stop_profile, methods=["POST"]),
        Route("/engine_metrics", routes.engine_metrics, methods=["GET"]),
        Route("/audit", routes.audit, methods=["GET"]),
    ]
    clients = [
        Route("/v1/models", routes.models, methods=["GET"]),
        Route("/v1/models/{model:path}", routes.one_model, methods=["GET"]),
        Route("/get_loads", routes.loads, methods=["GET"]),
        Route("/server_info", routes.server, methods=["GET"]),
        Route("/get_server_info", routes.server, methods=["GET"]),
        Route("/get_model_info", routes.model, methods=["GET"]),
    ]
    anybody = [
        Route("/health", routes.health, methods=["GET"]),
        Route("/ready", routes.ready, methods=["GET"]),
        Route("/metrics", routes.metrics, methods=["GET"]),
    ]
    for route in operators:
        route.app = _Guarded(route.app, console.admit)
    for route in clients:
        route.app = _Guarded(route.app, console.admit_client)
    for route in anybody[1:]:
        route.app = _Guarded(route.app, console.admit_anybody)
    elsewhere = [_elsewhere(path, "POST") for path in sorted(DATA_PATHS)]
    elsewhere += [_elsewhere(root + "/{name:path}", "GET", "POST", "DELETE") for root in STORED]
    app = Starlette(
        routes=operators + clients + anybody + elsewhere,
        exception_handlers={HTTPException: _http_error, KvherdError: _own_error, Exception: _own_error},
    )
    app.router.redirect_slashes = False  # a path with a slash at its end is another, and no client follows a POST there
    return app


def _elsewhere(path: str, *methods: str) -> Route:
    """A path of which these methods go past this application: here for what it says to others."""

    async def past(_: Request) -> Response:
        raise HTTPException(404)

    return Route(path, past, methods=methods)


class Admit(Protocol):
    def __call__(self, *, host: str, authorization: str, asked_as: str) -> None:
        """Raises a `KvherdError` for a caller who may not pass."""
        ...


def admit_by(admit: Admit, peer: str, headers: Mapping[str, str]) -> None:
    """By where a request comes from and what its headers say. Raises what `admit` does."""
    authorization, asked_as = headers.get("authorization", ""), headers.get("host", "")
    admit(host=caller(peer, headers), authorization=authorization, asked_as=asked_as)


def judge_of(app: Starlette, console: Console) -> Judge:
    """Who may send this application a body. For a path that nobody guards none is wanted, except a client's."""

    def judge(request: DataRequest) -> None:
        path = unquote(request.path)
        found = (one.app for one in app.router.routes if isinstance(one, Route) and one.path_regex.match(path))
        guard = next((one for one in found if isinstance(one, _Guarded)), None)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers}
        peer = request.peer.rpartition(":")[0].strip("[]")
        admit_by(console.admit_client if guard is None else guard.admit, peer, headers)

    return judge


class _Guarded:
    """Lets a request through to `app` if `admit` lets its caller pass."""

    def __init__(self, app: ASGIApp, admit: Admit) -> None:
        self._app = app
        self.admit = admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        try:
            admit_by(self.admit, request.client.host if request.client else "", request.headers)
        except KvherdError as error:
            await (await _own_error(request, error))(scope, receive, send)
            return
        await self._app(scope, receive, send)


class _Routes:
    def __init__(self, console: Console, policy: str) -> None:
        self._console = console
        self._policy = policy

    async def list_workers(self, _: Request) -> Response:
        return JSONResponse({"workers": self._console.workers()})

    async def show_worker(self, request: Request) -> Response:
        return JSONResponse(self._console.worker(_name(request)))

    async def add_worker(self, request: Request) -> Response:
        body = parse_object(await request.body())
        spec = worker_spec(body)
        await self._console.fleet.prepare(spec.url, spec.events)
        entry, new = self._console.add(spec)
        return JSONResponse(entry, status_code=201 if new else 200)

    async def change_worker(self, request: Request) -> Response:
        change = worker_change(parse_object(await request.body()))
        return JSONResponse(self._console.change(_name(request), change))

    async def remove_worker(self, request: Request) -> Response:
        drain_s = _seconds(request, default=None)
        return JSONResponse(await self._console.remove(_name(request), drain_s=drain_s))

    async def flush(self, request: Request) -> Response:
        report = await self._console.flush(_seconds(request, default=0.0) or 0.0, hold=_flag(request, "hold"))
        headers = {"retry-after": RETRY_AFTER_S} if report.http_status == 503 else None
        return JSONResponse(flush_report(report), status_code=report.http_status, headers=headers)

    async def audit(self, _: Request) -> Response:
        return JSONResponse(self._console.audit())

    async def start_profile(self, request: Request) -> Response:
        body = await request.body()
        decode_start_profile(body)  # a field that nobody knows is refused here, for every worker
        fields = {name: value for name, value in parse_object(body or b"{}").items() if value is not None}
        report = await self._console.start_profile(request.query_params.get("worker"), fields)
        return _profiled(report, "started")

    async def stop_profile(self, request: Request) -> Response:
        decode_stop_profile(await request.body())
        return _profiled(await self._console.stop_profile(request.query_params.get("worker")), "stopped")

    async def engine_metrics(self, _: Request) -> Response:
        return Response(await self._console.engine_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, _: Request) -> Response:
        models = [self._listed(name) for name in self._console.fleet.roster.names()]
        return JSONResponse({"object": "list", "data": models})

    async def one_model(self, request: Request) -> Response:
        name, names = request.path_params["model"], self._console.fleet.roster.names()
        if name not in names:
            raise ModelUnknown(name, names)
        return JSONResponse(self._listed(name))

    def _listed(self, name: str) -> dict[str, str | int | None]:
        roster = self._console.fleet.roster
        model = roster.meant(name)
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "kvherd",
            "root": model,
            "max_model_len": _context_tokens([one for one in roster if model in one.models]),
        }

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Ready while every model that is known here has a worker that takes requests."""
        problems = self._console.unready()
        if problems:
            body = {"ready": False, "problems": problems}
            return JSONResponse(body, status_code=503, headers={"retry-after": RETRY_AFTER_S})
        return JSONResponse({"ready": True, "problems": []})

    async def metrics(self, _: Request) -> Response:
        return Response(
            await self._console.metrics.text_in_turns(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def loads(self, _: Request) -> Response:
        kept = (
            "id",
            "url",
            "state",
            "running",
            "waiting",
            "outstanding",
            "backlog_s",
            "slot_wait_s",
            "used_tokens",
            "capacity_tokens",
        )
        return JSONResponse({"loads": [{name: one[name] for name in kept} for one in self._console.workers()]})

    async def server(self, _: Request) -> Response:
        roster = self._console.fleet.roster
        models = list(roster.models())
        return JSONResponse(
            {
                "server": "kvherd-gateway",
                "version": __version__,
                "router_manager": True,  # bench clients of this field ask a router no engine's figures
                **({"tokenizer_path": models[0]} if len(models) == 1 else {}),  # and load a tokenizer by its name
                "policy": self._policy,
                "models": models,
                "aliases": dict(roster.aliases),
                "config": _config(self._console.config),
                "workers": [one.worker for one in roster],
            }
        )

    async def model(self, _: Request) -> Response:
        models = self._console.fleet.roster.models()
        return JSONResponse({"model_path": models[0] if models else "", "models": list(models), "is_generation": True})


def _config(file: ConfigFile | None) -> dict[str, str | int] | None:
    return None if file is None else {"file": str(file.path), "reads": file.reads, "problem": file.problem}


def _profiled(report: FanoutReport, done: str) -> Response:
    headers = {"retry-after": RETRY_AFTER_S} if report.http_status == 503 else None
    return JSONResponse(profile_report(report, done), status_code=report.http_status, headers=headers)


def _name(request: Request) -> str:
    """A worker's id or URL; the URL may be given encoded or as it is."""
    return unquote(request.path_params["name"])


def _seconds(request: Request, default: float | None) -> float | None:
    text = request.query_params.get("timeout")
    if text is None:
        return default
    try:
        return float(text.replace("_", "no digit"))  # 1_000 is Python's own way to write a number, and nobody else's
    except ValueError:
        raise FieldInvalid("timeout", f"must be a number of seconds, not {text[:40]!r}") from None


def _flag(request: Request, name: str) -> bool:
    text = request.query_params.get(name, "0").lower()
    if text not in ("0", "1", "false", "true"):
        raise FieldInvalid(name, f"must be 1 or 0, not {text[:40]!r}")
    return text in ("1", "true")


def _context_tokens(members: list[Member]) -> int | None:
    """What every worker of a model can hold; None if none tells."""
    return min((one.max_context_tokens for one in members if one.max_context_tokens), default=None)


async def _own_error(_: Request, error: Exception) -> Response:
    status, body = error_body(error)
    told = {401: {"www-authenticate": "Bearer"}, 503: {"retry-after": RETRY_AFTER_S}}
    headers = told.get(status)
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def _methods(request: Request) -> set[str]:
    """Those that the path takes, by all routes that it has."""
    routes = [one for one in request.app.routes if isinstance(one, Route) and one.path_regex.match(request.url.path)]
    return {method for one in routes for method in one.methods or ()}


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: a path that is not here, or a method that it does not take."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    sentence, code = f"{request.method} {request.url.path} is not served here", "not_found"
    if "Allow" in headers:
        headers["Allow"] = allowed = ", ".join(sorted(_methods(request)))
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=headers)
        sentence, code = f"{sentence}; this path takes {allowed}", "method_not_allowed"
    body = {"error": {"message": sentence, "type": "invalid_request_error", "param": None, "code": code}}
    return JSONResponse(body, status_code=status, headers=headers)
