"""Keys from where they are kept: files of this machine, and the environment."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from kvherd.core.errors import OptionInvalid
from kvherd.core.fleet.spec import WorkerSpec, checked_key_place, is_bearer
from kvherd.services.gateway.fleet.small_files import read_small

_MOST_KEY_BYTES = 8192


def read_key(whose: str, file: str | None, variable: str | None, environment: Mapping[str, str], *, least: int) -> str:
    """A key of at least so many characters. Raises `OptionInvalid`, which does not repeat it."""
    if variable is not None:
        secret, where = environment.get(variable, "").strip(), f"the environment's {variable}"
    else:
        where = str(file)
        try:
            secret = read_small(Path(where), most_bytes=_MOST_KEY_BYTES).decode("ascii").strip()
        except (OSError, UnicodeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not ASCII"
            raise OptionInvalid(whose, f"cannot read {where}: {reason}") from None
    if len(secret) < least or not is_bearer(secret):
        many = f"{least} or more printable characters" if least > 1 else "a key of printable characters"
        raise OptionInvalid(whose, f"{where} must hold {many} without spaces")
    return secret


def with_engine_keys(workers: Iterable[WorkerSpec], environment: Mapping[str, str]) -> tuple[WorkerSpec, ...]:
    """The same workers with their engines' keys, where they have their own. Raises `OptionInvalid`."""
    return tuple(_with_key(spec, environment) for spec in workers)


def _with_key(spec: WorkerSpec, environment: Mapping[str, str]) -> WorkerSpec:
    checked_key_place(spec)
    if spec.engine_key_file is None and spec.engine_key_env is None:
        return spec
    whose = f"worker {spec.worker}: its engine's key"
    key = read_key(whose, spec.engine_key_file, spec.engine_key_env, environment, least=1)
    return replace(spec, engine_key=key)
