"""A worker in one word of a command line."""

from pathlib import Path
from typing import Final

from kvherd.core.errors import OptionInvalid
from kvherd.core.fleet.spec import SIDECAR, WorkerSpec

_LABEL: Final = "label."
_KEYS: Final = ("engine_key_file", "engine_key_env")
_TEXTS: Final = ("events", "replay", "tokenizer", SIDECAR, *_KEYS)
_FLAGS: Final = ("bind", "resolve")
_KNOWN: Final = (*_TEXTS, *_FLAGS, "weight")
_OPTION: Final = "--worker"


def worker_spec(word: str) -> WorkerSpec:
    """Read `URL[,NAME=VALUE]…`. Raises `OptionInvalid`."""
    url, *extras = word.split(",")
    named = dict(extra.partition("=")[::2] for extra in extras)
    labels = {name.removeprefix(_LABEL): named.pop(name) for name in list(named) if name.startswith(_LABEL)}
    if len(named) + len(labels) != len(extras) or not all((*named.values(), *named, *labels, *labels.values())):
        raise OptionInvalid(_OPTION, f"{word!r} is not of the form URL[,NAME=VALUE]...")
    unknown = sorted(named.keys() - set(_KNOWN))
    if unknown:
        known = ", ".join((*_KNOWN, f"{_LABEL}NAME"))
        raise OptionInvalid(_OPTION, f"{word!r}: {unknown[0]!r} is unknown; a worker has {known}")
    tokenizer = named.get("tokenizer")
    if tokenizer and not Path(tokenizer).is_dir():
        raise OptionInvalid(_OPTION, f"{word!r}: there is no directory {tokenizer}")
    if SIDECAR in named:
        labels[SIDECAR] = named[SIDECAR]
    return WorkerSpec(
        url,
        named.get("events"),
        named.get("replay"),
        _flag(word, "bind", named),
        tokenizer,
        labels=labels,
        weight=_weight(word, named.get("weight", "1")),
        resolve=_flag(word, "resolve", named),
        engine_key_file=named.get("engine_key_file"),
        engine_key_env=named.get("engine_key_env"),
    )


def _flag(word: str, name: str, named: dict[str, str]) -> bool:
    text = named.get(name, "0")
    if text not in ("0", "1"):
        raise OptionInvalid(_OPTION, f"{word!r}: {name} is 1 or 0")
    return text == "1"


def _weight(word: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise OptionInvalid(_OPTION, f"{word!r}: weight is a number, not {text!r}") from None
