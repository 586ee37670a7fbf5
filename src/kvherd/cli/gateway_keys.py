"""The gateway's own keys: from the environment or a file, and with a warning from the command line."""

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from kvherd.cli import panels
from kvherd.cli.gateway_client import ADMIN_KEY
from kvherd.core.errors import OptionInvalid
from kvherd.services.gateway.fleet.small_files import read_small

log = logging.getLogger(__name__)

DATA_KEY = "KVHERD_API_KEY"
_MOST_KEY_BYTES = 8192
_LEAST_KEY = 8

DataKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar=DATA_KEY,
        show_envvar=True,
        metavar="KEY",
        rich_help_panel=panels.DOORS,
        help="The key that clients bring as Authorization: Bearer KEY; better given by the environment. Several, with "
        "names and limits, are in the configuration file.",
    ),
]
AdminKeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--admin-key-file",
        metavar="FILE",
        rich_help_panel=panels.DOORS,
        help="A file with the admin key, in place of --admin-key.",
    ),
]


def secret_given(option: str, value: str | None, variable: str) -> str | None:
    """The secret as it can stand in a header; None for none. Raises `OptionInvalid`, which does not repeat it.

    A variable of the environment that is empty is none; an empty word of the command line was meant to be one.
    """
    secret = (value or "").strip()
    if not secret and (value is None or os.environ.get(variable) == value):
        return None
    if not secret:
        raise OptionInvalid(option, "is empty; leave it out for none")
    if not secret.isascii() or not secret.isprintable() or " " in secret:
        raise OptionInvalid(option, "a key is of printable ASCII characters, without spaces")
    _require_long(option, secret)
    if os.environ.get(variable) != value:
        log.warning("%s on the command line can be read by every user of this machine; use %s", option, variable)
    return secret


def admin_key_given(value: str | None, file: Path | None) -> str | None:
    """Raises `OptionInvalid`."""
    if file is None:
        return secret_given("--admin-key", value, ADMIN_KEY)
    try:
        secret = read_small(file, most_bytes=_MOST_KEY_BYTES).decode("ascii").strip()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not ASCII"
        raise OptionInvalid("--admin-key-file", f"cannot read {file}: {reason}") from None
    if not secret or not secret.isprintable() or " " in secret:
        raise OptionInvalid("--admin-key-file", f"{file} must hold a key of printable characters without spaces")
    _require_long("--admin-key-file", secret)
    return secret


def require_apart(admin_key: str | None, data_key: str | None) -> None:
    """Raise `OptionInvalid` where every client would be an operator."""
    if admin_key is not None and admin_key == data_key:
        raise OptionInvalid("--admin-key", "is the key of clients (--api-key), too; operators have another")


def _require_long(option: str, secret: str) -> None:
    if len(secret) < _LEAST_KEY:
        raise OptionInvalid(option, f"a key has {_LEAST_KEY} characters or more")
