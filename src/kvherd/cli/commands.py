"""What the words of the command line may be.

Only the module of the command that is called is imported, so that `kvherd workers` does not wait for the libraries
of an engine.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Annotated

import typer

from kvherd import compiled

COMMANDS = ("up", "engine", "gateway", "bridge", "workers", "flush", "drain", "profile", "audit", "doctor")


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """The commands that `arguments` may call; all of them unless one is named first."""
    app = typer.Typer(
        add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown"
    )
    app.callback()(_kvherd)
    named = next((word for word in arguments if not word.startswith("-")), None)
    for name in (named,) if named in COMMANDS else COMMANDS:
        module = import_module(f"kvherd.cli.{name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(module.command)
    return app


def _kvherd(
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=lambda asked: _print_version(asked=asked))
    ] = False,
) -> None:
    """The KV-cache control plane for fleets of LLM engines.

    A request that lands where its prefix is cached skips that part of the work. kvherd routes each request to the
    worker where it will answer soonest, knowing from the engines' own events what every worker holds, and orders the
    fleet about with one call and an honest answer per worker.

    Try it on this machine: `kvherd up` starts two engines with a small real model and a gateway before them.

    Exit codes: 0 all obeyed; 1 some failed; 2 the command or an option is wrong; 3 the gateway cannot be reached.
    """


def _print_version(*, asked: bool) -> None:
    if asked:
        rooms = compiled.count()
        why = f" ({unused})" if (unused := compiled.unused()) else ""
        print(f"kvherd {version('kvherd')}, {f'{rooms} rooms' if rooms else 'nothing'} compiled{why}")
        raise typer.Exit
