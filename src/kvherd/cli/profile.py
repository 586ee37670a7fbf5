"""`kvherd profile`: record what engines do, step by step, and open the recording."""

import http.server
import json
import socketserver
import threading
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from kvherd.cli.gateway_client import DEFAULT_GATEWAY, AdminKeyOption, GatewayOption, JsonOption, ask_json
from kvherd.cli.tables import print_table
from kvherd.core.errors import OptionInvalid

TIMEOUT_S = 620.0
"""Beyond the 605 s that the gateway gives each worker."""

PERFETTO = "https://ui.perfetto.dev"
FETCH_S = 120.0
HEADINGS = ("WORKER", "KIND", "OUTCOME", "MESSAGE")

app = typer.Typer(no_args_is_help=True, help="Profile engines: start, stop, and open what was recorded.")

WorkerOption = Annotated[
    str | None,
    typer.Option(metavar="URL|all", help="The worker to profile, or `all`; may be left out where there is only one."),
]


@app.command()
def start(
    *,
    worker: WorkerOption = None,
    output_dir: Annotated[
        str | None, typer.Option(help="Where the engine writes; its own choice if not given.")
    ] = None,
    num_steps: Annotated[int | None, typer.Option(min=1, help="Steps to record; until `stop` if not given.")] = None,
    with_stack: Annotated[bool, typer.Option("--with-stack", help="Sample the Python stack, too.")] = False,
    by_stage: Annotated[bool, typer.Option("--by-stage", help="One file for prefill, one for decode.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the files of an engine's ranks into one.")] = False,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    admin_key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Begin a profile.

    Exit code 0 if every worker obeyed, 1 if some did not, 3 if no gateway answers.
    """
    fields = {
        "output_dir": output_dir,
        "num_steps": num_steps,
        "with_stack": with_stack or None,
        "profile_by_stage": by_stage or None,
        "merge_profiles": merge or None,
    }
    body = {name: value for name, value in fields.items() if value is not None}
    _order("start", worker, gateway=gateway, admin_key=admin_key, as_json=as_json, body=body)


@app.command()
def stop(
    *,
    worker: WorkerOption = None,
    gateway: GatewayOption = DEFAULT_GATEWAY,
    admin_key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a profile, and say where the traces are.

    Exit code 0 if every worker obeyed, 1 if some did not, 3 if no gateway answers.
    """
    _order("stop", worker, gateway=gateway, admin_key=admin_key, as_json=as_json, body={})


@app.command(name="open")
def open_trace(
    trace: Annotated[Path, typer.Argument(help="A trace file, as `stop` named it.")],
    *,
    browser: Annotated[bool, typer.Option(help="Open the browser; without it only the address is printed.")] = True,
) -> None:
    """Show a trace in Perfetto, a viewer that runs in the browser: the trace does not leave this machine.

    Serves the file on this machine until the viewer has fetched it, two minutes at most.
    """
    if not trace.is_file():
        raise OptionInvalid("TRACE", f"there is no file {trace}")
    fetched = threading.Event()
    with socketserver.TCPServer(("127.0.0.1", 9001), _handler(trace, fetched), bind_and_activate=False) as server:
        server.allow_reuse_address = True
        try:
            server.server_bind()
        except OSError as error:
            raise OptionInvalid("TRACE", f"port 9001, where the viewer looks: {error.strerror}") from None
        server.server_activate()
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        url = f"{PERFETTO}/#!/?url=http://127.0.0.1:9001/{quote(trace.name)}"
        print(url)
        if browser:
            webbrowser.open(url)
        done = fetched.wait(FETCH_S)
        server.shutdown()
    if not done:
        print(f"nobody fetched it within {FETCH_S:g} s")
        raise typer.Exit(1)


def _order(
    verb: str, worker: str | None, *, gateway: str, admin_key: str | None, as_json: bool, body: Mapping[str, object]
) -> None:
    query = f"?{urlencode({'worker': worker})}" if worker else ""
    _, answer = ask_json(
        "POST",
        gateway,
        f"/{verb}_profile{query}",
        timeout_s=TIMEOUT_S,
        admin_key=admin_key,
        body=json.dumps(body).encode() if body else b"",
    )
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        if answer.get("workers"):
            print_table(HEADINGS, map(_row, answer["workers"]), numeric=frozenset())
        print(answer.get("message"))
        for file in answer.get("files") or ():
            print(file)
    if answer.get("success") is not True:
        raise typer.Exit(1)


def _row(worker: dict[str, Any]) -> list[object]:
    return [worker.get(name) for name in ("url", "kind", "outcome", "message")]


def _handler(trace: Path, fetched: threading.Event) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != f"/{quote(trace.name)}":
                self.send_error(404)
                return
            data = trace.read_bytes()
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", PERFETTO)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            fetched.set()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Not a word: the address was printed."""

    return Handler
