"""`kvherd`: the command line. Errors leave as one sentence, exit codes tell scripts whose turn it is.

What reads the words is not imported where they were read before: in a process that started over to serve.
"""

import logging
import sys
from collections.abc import Sequence
from importlib import import_module

from kvherd.cli.handover import handed_over, serve
from kvherd.core.errors import GatewayUnreachable, KvherdError, OptionInvalid
from kvherd.core.fleet.spec import ConfigInvalid

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_INTERRUPTED = 130

logger = logging.getLogger(__name__)


def exit_code(error: BaseException) -> int:
    if isinstance(error, OptionInvalid | ConfigInvalid):
        return EXIT_USAGE
    return EXIT_UNREACHABLE if isinstance(error, GatewayUnreachable) else EXIT_FAILED


def our_error(error: BaseException) -> KvherdError | None:
    """The error to tell a person: `error`, or the first of ours in a group of errors."""
    if isinstance(error, BaseExceptionGroup):
        return next((found for inner in error.exceptions if (found := our_error(inner))), None)
    return error if isinstance(error, KvherdError) else None


def _obey(words: Sequence[str]) -> None:
    options = handed_over()
    if options is not None:
        serve(options)
    else:
        import_module("kvherd.cli.commands").build_app(words)(args=list(words), prog_name="kvherd")


def main(arguments: Sequence[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    try:
        _obey(words)
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
