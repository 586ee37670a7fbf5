"""A worker in one word of a command line."""

from pathlib import Path
from typing import Final

from kvherd.core.errors import OptionInvalid
from kvherd.core.fleet.shown_url import shown_url
from kvherd.core.fleet.spec import SIDECAR, WorkerSpec, checked_spec

_LABEL: Final = "label."
_KEYS: Final = ("engine_key_file", "engine_key_env")
_TEXTS: Final = ("events", "replay", "tokenizer", SIDECAR, *_KEYS)
_FLAGS: Final = ("bind", "resolve")
_KNOWN: Final = (*_TEXTS, *_FLAGS, "weight")
_OPTION: Final = "--worker"


def worker_spec(word: str) -> WorkerSpec:
    """Read `URL[,NAME=VALUE]…`. Raises `OptionInvalid`."""
    url, *extras = word.split(",")
    shown = shown_url(url)
    named = dict(extra.partition("=")[::2] for extra in extras)
    labels = {name.removeprefix(_LABEL): named.pop(name) for name in list(named) if name.startswith(_LABEL)}
    if len(named) + len(labels) != len(extras) or not all((*named.values(), *named, *labels, *labels.values())):
        raise OptionInvalid(_OPTION, f"{shown_url(word)} is not of the form URL[,NAME=VALUE]...")
    unknown = sorted(named.keys() - set(_KNOWN))
    if unknown:
        known = ", ".join((*_KNOWN, f"{_LABEL}NAME"))
        raise OptionInvalid(_OPTION, f"{shown}: {unknown[0]!r} is unknown; a worker has {known}")
    tokenizer = named.get("tokenizer")
    if tokenizer and not Path(tokenizer).is_dir():
        raise OptionInvalid(_OPTION, f"{shown}: there is no directory {tokenizer}")
    if SIDECAR in named:
        labels[SIDECAR] = named[SIDECAR]
    spec = WorkerSpec(
        url,
        named.get("events"),
        named.get("replay"),
        _flag(shown, "bind", named),
        tokenizer,
        labels=labels,
        weight=_weight(shown, named.get("weight", "1")),
        resolve=_flag(shown, "resolve", named),
        engine_key_file=named.get("engine_key_file"),
        engine_key_env=named.get("engine_key_env"),
    )
    try:
        return checked_spec(spec)
    except OptionInvalid as error:
        raise OptionInvalid(_OPTION, str(error) if error.option == "url" else f"{shown}: {error}") from None


def _flag(shown: str, name: str, named: dict[str, str]) -> bool:
    text = named.get(name, "0")
    if text not in ("0", "1"):
        raise OptionInvalid(_OPTION, f"{shown}: {name} is 1 or 0")
    return text == "1"


def _weight(shown: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise OptionInvalid(_OPTION, f"{shown}: weight is a number, not {text!r}") from None
