"""A worker as an operator names it, and which addresses may name one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import urlsplit

from kvherd.core.errors import OperatorError, OptionInvalid
from kvherd.core.fleet.link_local import is_link_local
from kvherd.core.fleet.shown_url import shown_url
from kvherd.core.ids import WorkerId

GRPC: Final = ("grpc://", "grpcs://")
"""How the addresses of engines on gRPC begin, without and with TLS."""

DIRECT: Final = ("tcp://", "ipc://")
"""How the addresses of an engine's own sockets begin."""

SIDECAR: Final = "sidecar"
"""The label that says where the HTTP sidecar of a worker on gRPC is, if not one port above it."""

HOST: Final = "{host}"
"""Stands for a worker's own address where one entry names several workers."""

_ANY_ADDRESS: Final = "192.0.2.1"

SCHEMES: Final = ("grpc", "grpcs", "http", "https")

MOST_LABELS: Final = 32
_MOST_CHARACTERS: Final = 256
_MOST_WEIGHT: Final = 1000.0


@dataclass(eq=False)
class ConfigInvalid(OperatorError):
    """`line` 0 is the file as a whole."""

    file: str
    line: int
    problem: str

    def __str__(self) -> str:
        where = f", line {self.line}" if self.line else ""
        return f"{self.file}{where}: {self.problem}"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One entry: a worker, or with `resolve` as many as its host name has addresses.

    `events`, `replay` and `bind` are where its KV events are, as in `EventSource`, if that is not its own to say;
    `tokenizer` is a directory of this machine with the model's tokenizer, if the worker hands out none. A worker of
    `weight` 2 counts as twice as fast as it is. One that is `draining` takes no new request. `engine_key` is what the
    engine wants as its API key, if not what the others do; the file or the variable says where it is.
    """

    url: str
    events: str | None = None
    replay: str | None = None
    bind: bool = False
    tokenizer: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1.0
    draining: bool = False
    resolve: bool = False
    engine_key: str | None = field(default=None, repr=False)
    engine_key_file: str | None = None
    engine_key_env: str | None = None

    @property
    def worker(self) -> WorkerId:
        """Raises `OptionInvalid`."""
        return WorkerId(normal_url(self.url, "url"))

    def at(self, host: str) -> "WorkerSpec":
        """The one worker of this entry at that address. Raises `OptionInvalid`."""
        parts = urlsplit(normal_url(self.url, "url"))
        named = f"[{host}]" if ":" in host else host
        port = f":{parts.port}" if parts.port else ""

        def placed(text: str | None) -> str | None:
            return text and text.replace(HOST, named)

        labels = {name: value.replace(HOST, named) for name, value in self.labels.items()}
        return replace(
            self,
            url=f"{parts.scheme}://{named}{port}{parts.path}",
            events=placed(self.events),
            replay=placed(self.replay),
            labels=labels,
            resolve=False,
        )

    def connects_as(self, other: "WorkerSpec") -> bool:
        """They differ in nothing that only a new connection could take over."""
        changed = replace(
            other,
            labels=self.labels,
            weight=self.weight,
            draining=self.draining,
            engine_key=self.engine_key,
            engine_key_file=self.engine_key_file,
            engine_key_env=self.engine_key_env,
        )
        return self == changed


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """What an operator may change of a worker that is a member; None leaves it. A label of None is taken away, and an
    empty `engine_key` too: then the worker is given the key that is for all.
    """

    labels: Mapping[str, str | None] | None = None
    weight: float | None = None
    draining: bool | None = None
    engine_key: str | None = field(default=None, repr=False)


def checked_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Raises `OptionInvalid` for labels that cannot be."""
    if len(labels) > MOST_LABELS:
        raise OptionInvalid("labels", f"there may be {MOST_LABELS} of them, not {len(labels)}")
    for name, value in labels.items():
        if not name or not value or len(name) > _MOST_CHARACTERS or len(value) > _MOST_CHARACTERS:
            problem = f"a name and a value have 1 to {_MOST_CHARACTERS} characters each"
            raise OptionInvalid(f"labels.{name[:40]}", problem)
    if SIDECAR in labels:
        normal_url(labels[SIDECAR], f"labels.{SIDECAR}", schemes=("http", "https"))
    return dict(labels)


def checked_weight(weight: float) -> float:
    """Raises `OptionInvalid` unless it is above 0 and at most 1000."""
    if not math.isfinite(weight) or not 0 < weight <= _MOST_WEIGHT:
        raise OptionInvalid("weight", f"must be above 0 and at most {_MOST_WEIGHT:g}; to send nothing there, drain it")
    return float(weight)


def checked_engine_key(worker: WorkerId, key: str | None) -> str | None:
    """None for none. Raises `OptionInvalid`, which does not repeat it."""
    if not key:
        return None
    if worker.startswith(GRPC):
        raise OptionInvalid("engine_key", f"is for engines on HTTP; {worker} is on gRPC, where engines ask for none")
    if not is_bearer(key):
        raise OptionInvalid("engine_key", "must be of printable ASCII characters, without spaces")
    return key


def checked_key_place(spec: WorkerSpec) -> None:
    """Raises `OptionInvalid` for a key that is said to be in two places, or is for nobody."""
    if spec.engine_key_file is not None and spec.engine_key_env is not None:
        raise OptionInvalid("engine_key_env", "stands beside engine_key_file; the key is in one place")
    if spec.engine_key_file is not None or spec.engine_key_env is not None:
        checked_engine_key(spec.worker, "-")


def checked_spec(spec: WorkerSpec) -> WorkerSpec:
    """As it is. Raises `OptionInvalid` for what can be told to be wrong of an entry by itself; where each address of a
    name will be a worker, of one that stands for all of them.
    """
    one = spec.at(_ANY_ADDRESS) if spec.resolve else spec
    checked_weight(spec.weight)
    checked_key_place(spec)
    checked_labels(one.labels)
    events_address(one)
    for name, text in (("url", one.worker), ("events", one.events), ("replay", one.replay)):
        if text and ("{" in text or "}" in text):
            problem = f"{text!r}: only {HOST} may stand there, where each address of a name is a worker (resolve)"
            raise OptionInvalid(name, problem)
    return spec


def is_bearer(key: str) -> bool:
    """It can stand in a header as it is."""
    return key.isascii() and key.isprintable() and " " not in key


def events_address(spec: WorkerSpec) -> str | None:
    """Where the worker's KV events are. Raises `OptionInvalid`."""
    if spec.events is None:
        if spec.replay or spec.bind:
            raise OptionInvalid("replay" if spec.replay else "bind", "says nothing without events")
        return None
    if spec.events.startswith(DIRECT):
        for name, endpoint in (("events", spec.events), ("replay", spec.replay)):
            _refuse_link_local(name, (endpoint or "").removeprefix("tcp://").rpartition(";")[2].rpartition(":")[0])
        return spec.events
    if spec.replay or spec.bind:
        raise OptionInvalid("replay" if spec.replay else "bind", "is for events at an engine's own sockets only")
    if not spec.events.startswith(GRPC):
        problem = f"{spec.events!r} is not of the form grpc://HOST:PORT, tcp://HOST:PORT or ipc://PATH"
        raise OptionInvalid("events", problem)
    return normal_url(spec.events, "events", schemes=("grpc", "grpcs"))


def normal_url(url: str, field: str, *, schemes: tuple[str, ...] = SCHEMES) -> str:
    """`SCHEME://HOST:PORT`, in lower case, with nothing after it. Raises `OptionInvalid` saying what would be right."""
    problem = f"{shown_url(url)} is not of the form {'|'.join(schemes)}://HOST:PORT"
    try:
        parts = urlsplit(url.strip())
        host, port = parts.hostname, parts.port
    except ValueError:
        raise OptionInvalid(field, problem) from None
    if parts.scheme not in schemes or not host or parts.username or parts.query or parts.fragment:
        raise OptionInvalid(field, problem)
    if parts.scheme in ("grpc", "grpcs") and port is None:
        raise OptionInvalid(field, f"{shown_url(url)} names no port")
    _refuse_link_local(field, host)
    named = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{named}{f':{port}' if port else ''}{parts.path.rstrip('/')}"


def _refuse_link_local(field: str, host: str) -> None:
    if is_link_local(host):
        raise OptionInvalid(field, f"{host} is a link-local address, which no worker may have")
