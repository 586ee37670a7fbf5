"""`kvherd`: the command line. Errors leave as one sentence, exit codes tell scripts whose turn it is.

Only the module of the command that is called is imported, so that `kvherd workers` does not wait for the libraries
of an engine.
"""

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Annotated

import typer

from kvherd.core.errors import GatewayUnreachable, KvherdError, OptionInvalid
from kvherd.core.fleet.spec import ConfigInvalid

COMMANDS = ("up", "engine", "gateway", "bridge", "workers", "flush", "drain", "profile", "audit", "doctor")

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130

logger = logging.getLogger(__name__)


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
        print(f"kvherd {version('kvherd')}")
        raise typer.Exit


def exit_code(error: BaseException) -> int:
    if isinstance(error, OptionInvalid | ConfigInvalid):
        return EXIT_USAGE
    return EXIT_UNREACHABLE if isinstance(error, GatewayUnreachable) else EXIT_FAILED


def our_error(error: BaseException) -> KvherdError | None:
    """The error to tell a person: `error`, or the first of ours in a group of errors."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := our_error(inner))), None)
    return error if isinstance(error, KvherdError) else None


def main(arguments: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    try:
        build_app(words)(args=list(words), prog_name="kvherd")
    except KeyboardInterrupt:  # while a command's modules are imported: there is nothing to clean up yet
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:  # the edge of the process: a person reads what leaves here
        known = our_error(error)
        if known is None:
            logger.critical("an unforeseen error ended the process", exc_info=error)
        print(f"kvherd: {known or f'an unforeseen error: {error!r}; please report it'}", file=sys.stderr)
        sys.exit(exit_code(known or error))


if __name__ == "__main__":
    main()
