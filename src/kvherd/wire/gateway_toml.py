"""The gateway's configuration file: what may change while it runs.

host_names = ["gateway.internal"]  # by which it may be asked where no key is wanted, beside addresses and localhost
models = ["llama"]                 # ready only when a worker serves each of these

[[workers]]
url = "http://10.0.0.7:8000"       # and events, replay, bind, tokenizer, labels, weight, draining, resolve,
                                   # engine_key_file or engine_key_env

[aliases]
"gpt-4o" = "llama"

[[keys]]
name = "team-a"
env = "TEAM_A_KEY"                 # or file = "/run/secrets/team-a"; and in_flight, requests_per_s, weight

[late_binding]
backlog_s = 0.3                    # 0 holds no request; and longest_s, ageing
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from kvherd.core.errors import OptionInvalid
from kvherd.core.fleet.host_names import checked_host_name
from kvherd.core.fleet.keyring import KeyLimits
from kvherd.core.fleet.spec import ConfigInvalid, WorkerSpec, checked_spec
from kvherd.core.routing.late import LateBounds
from kvherd.wire.type_words import type_words

_AT: Final = re.compile(r"\(at line (\d+), column \d+\)")
_PLACE: Final = re.compile(r"^\$\.(\w+)(?:\[(\d+|\.\.\.)\])?(?:\.(\w+))?")
_UNKNOWN: Final = re.compile(r"unknown field `(.+)`")
_LEAST_RATE: Final = 0.001
_LEAST_WEIGHT: Final = 0.01
_LONGEST_NAME: Final = 128
_LATE: Final = LateBounds()
_MOST_BYTES: Final = 4 * 2**20


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A data key by name, and where its secret is: a file of this machine or a variable of the environment."""

    name: str
    file: str | None = None
    env: str | None = None
    limits: KeyLimits = field(default_factory=KeyLimits)
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class GatewayFile:
    workers: tuple[WorkerSpec, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    keys: tuple[KeyEntry, ...] = ()
    late: LateBounds | None = None
    host_names: tuple[str, ...] = ()


class _Worker(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    events: str | None = None
    replay: str | None = None
    bind: bool = False
    tokenizer: str | None = None
    labels: dict[str, str] = {}
    weight: float = 1.0
    draining: bool = False
    resolve: bool = False
    engine_key_file: str | None = None
    engine_key_env: str | None = None


class _Key(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    file: str | None = None
    env: str | None = None
    in_flight: int | None = None
    requests_per_s: float | None = None
    weight: float = 1.0


class _Late(msgspec.Struct, forbid_unknown_fields=True):
    backlog_s: float = _LATE.backlog_s
    longest_s: float = _LATE.longest_s
    ageing: float = _LATE.ageing


class _File(msgspec.Struct, forbid_unknown_fields=True):
    workers: list[_Worker] = []
    aliases: dict[str, str] = {}
    models: list[str] = []
    keys: list[_Key] = []
    late_binding: _Late | None = None
    host_names: list[str] = []


_TABLES: Final = {"workers": _Worker, "keys": _Key, "late_binding": _Late}
_LISTED: Final = ("workers", "keys")


def decode_gateway_file(data: bytes, name: str) -> GatewayFile:
    """Raises `ConfigInvalid` with the line that is wrong, as far as it can be told."""
    if len(data) > _MOST_BYTES:
        raise ConfigInvalid(name, 0, f"is larger than {_MOST_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")  # some editors begin what they save with a mark of its encoding
        table = tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise ConfigInvalid(name, data.count(b"\n", 0, error.start) + 1, "is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigInvalid(name, _line_told(str(error), text), _AT.sub("", str(error)).strip()) from None
    except RecursionError:
        raise ConfigInvalid(name, 0, "is nested too deeply") from None
    reader = _Reader(name, text)
    return reader.file(table)


@dataclass(frozen=True, slots=True)
class _Reader:
    name: str
    text: str

    def file(self, table: Mapping[str, Any]) -> GatewayFile:
        try:
            read = msgspec.convert(table, _File)
        except msgspec.ValidationError as error:
            raise self._invalid(str(error)) from None
        return GatewayFile(
            self._workers(read.workers),
            self._aliases(read.aliases),
            self._models(read.models),
            self._keys(read.keys),
            self._late(read.late_binding),
            self._host_names(read.host_names),
        )

    def _workers(self, workers: list[_Worker]) -> tuple[WorkerSpec, ...]:
        specs: dict[str, WorkerSpec] = {}
        for index, one in enumerate(workers):
            spec = WorkerSpec(**{name: getattr(one, name) for name in one.__struct_fields__})
            try:
                worker = checked_spec(spec).worker
            except OptionInvalid as error:
                raise self._wrong("workers", index, error.option.partition(".")[0], str(error)) from None
            if worker in specs:
                raise self._wrong("workers", index, "url", f"url: {worker} stands here a second time")
            specs[worker] = spec
        return tuple(specs.values())

    def _aliases(self, aliases: dict[str, str]) -> dict[str, str]:
        for alias, model in aliases.items():
            if not alias or not model:
                raise self._wrong("aliases", None, alias, "aliases: an alias and its model each have a name")
            if model in aliases:
                raise self._wrong("aliases", None, alias, f"aliases: {alias!r} stands for {model!r}, itself an alias")
        return aliases

    def _models(self, models: list[str]) -> tuple[str, ...]:
        if "" in models:
            raise self._wrong(None, None, "models", "models: a model has a name")
        return tuple(dict.fromkeys(models))

    def _keys(self, keys: list[_Key]) -> tuple[KeyEntry, ...]:
        entries: dict[str, KeyEntry] = {}
        for index, key in enumerate(keys):
            if not key.name or key.name in entries:
                problem = f"stands here a second time: {key.name!r}" if key.name else "is empty"
                raise self._wrong("keys", index, "name", f"name: {problem}")
            if not key.name.isprintable() or len(key.name) > _LONGEST_NAME:
                problem = f"name: must be of 1 to {_LONGEST_NAME} printable characters; it stands in the log"
                raise self._wrong("keys", index, "name", problem)
            if (key.file is None) == (key.env is None):
                raise self._wrong("keys", index, "name", f"key {key.name!r}: give one of file and env, where it is")
            if key.in_flight is not None and key.in_flight < 1:
                raise self._wrong("keys", index, "in_flight", "in_flight: must be 1 or more")
            if key.requests_per_s is not None and not _LEAST_RATE <= key.requests_per_s < 1e9:
                problem = f"requests_per_s: must be {_LEAST_RATE:g} or more"
                raise self._wrong("keys", index, "requests_per_s", problem)
            if not _LEAST_WEIGHT <= key.weight <= 1 / _LEAST_WEIGHT:
                problem = f"weight: must be {_LEAST_WEIGHT:g} to {1 / _LEAST_WEIGHT:g}"
                raise self._wrong("keys", index, "weight", problem)
            entries[key.name] = KeyEntry(
                key.name, key.file, key.env, KeyLimits(key.in_flight, key.requests_per_s), key.weight
            )
        return tuple(entries.values())

    def _host_names(self, names: list[str]) -> tuple[str, ...]:
        try:
            return tuple(map(checked_host_name, names))
        except OptionInvalid as error:
            raise self._wrong(None, None, "host_names", f"host_names: {error.problem}") from None

    def _late(self, late: _Late | None) -> LateBounds | None:
        if late is None:
            return None
        try:
            return LateBounds(late.backlog_s, late.longest_s, late.ageing)
        except OptionInvalid as error:
            raise self._wrong("late_binding", None, error.option, str(error)) from None

    def _invalid(self, words: str) -> ConfigInvalid:
        """The library's words and path as a sentence and a line."""
        problem, _, path = words.partition(" - at `")
        unknown, place = _UNKNOWN.search(problem), _PLACE.match(path)
        table, index, key = place.groups() if place else (None, None, None)
        if unknown:
            known = _TABLES.get(table or "", _File)
            problem = f"{unknown[1]}: is unknown here; there are {', '.join(known.__struct_fields__)}"
            key = unknown[1]
        else:
            said = type_words(problem, of_objects="a table").replace("Object missing required field", "misses")
            whole = said.replace("`", "")
            problem = f"{path.rstrip('`').removeprefix('$.')}: {whole[:1].lower()}{whole[1:]}"
            if key is None and index is None and table in _LISTED:
                problem += f"; each begins with [[{table}]]"
        return self._wrong(table, int(index) if index and index.isdecimal() else None, key, problem)

    def _wrong(self, table: str | None, index: int | None, key: str | None, problem: str) -> ConfigInvalid:
        return ConfigInvalid(self.name, _line_of(self.text, table, index, key), problem)


def _line_told(words: str, text: str) -> int:
    told = _AT.search(words)
    return int(told[1]) if told else text.count("\n") + 1


def _line_of(text: str, table: str | None, index: int | None, key: str | None) -> int:
    """Where a key stands, or its table, as these are usually written; 0 if neither is found."""
    header = re.compile(rf"\s*(\[\[\s*{table}\s*\]\]|\[\s*{table}\s*\]|{table}\s*=)") if table else None
    wanted = (
        re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]|\s*\[\[?\s*[\w.]*{re.escape(key)}\s*\]") if key else None
    )
    seen, found, inside = -1, 0, table is None
    for number, line in enumerate(text.splitlines(), 1):
        if header is not None and header.match(line):
            seen += 1
            inside = index is None or seen == index
            if inside:
                found = number
        elif line.lstrip().startswith("[["):
            inside = inside and table is None
        if inside and wanted is not None and wanted.match(line):
            return number
    return found
