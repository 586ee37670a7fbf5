"""What an operator says of a worker over HTTP: the bodies of POST and PATCH `/workers`."""

from typing import Any, Final

from kvherd.core.errors import FieldInvalid
from kvherd.core.fleet.spec import WorkerChange, WorkerSpec

_TEXTS: Final = {
    "url": "grpc://HOST:PORT or http://HOST:PORT",
    "events": "grpc://HOST:PORT or tcp://HOST:PORT",
    "replay": "tcp://HOST:PORT",
    "tokenizer": "/models/NAME, a directory of the gateway's machine",
}
_CHANGEABLE: Final = ("labels", "weight", "draining", "engine_key")


def worker_spec(body: dict[str, Any]) -> WorkerSpec:
    """Raises `FieldInvalid`, naming the field that is wrong."""
    _refuse_unknown(body, (*_TEXTS, "bind", *_CHANGEABLE), "a worker has")
    for name, example in _TEXTS.items():
        if not isinstance(body.get(name), str if name == "url" else str | None):
            raise FieldInvalid(name, f"must be a text such as {example}")
    if not isinstance(body.get("bind", False), bool):
        raise FieldInvalid("bind", "must be true or false")
    change = _change(body)
    kept = {name: value for name, value in (change.labels or {}).items() if value is not None}
    weight = 1.0 if change.weight is None else change.weight
    rest = {name: value for name, value in body.items() if name not in _CHANGEABLE}
    return WorkerSpec(
        **rest, labels=kept, weight=weight, draining=change.draining or False, engine_key=change.engine_key
    )


def worker_change(body: dict[str, Any]) -> WorkerChange:
    """Raises `FieldInvalid`, naming the field that is wrong; what is absent or null stays as it is."""
    if not body:
        raise FieldInvalid("body", f"changes nothing; give one of {', '.join(_CHANGEABLE)}")
    fixed = sorted(body.keys() & {*_TEXTS, "bind"})
    if fixed:
        raise FieldInvalid(fixed[0], "cannot be changed while it is a member; DELETE it, then POST it anew")
    _refuse_unknown(body, _CHANGEABLE, "what can be changed is")
    return _change(body)


def _change(body: dict[str, Any]) -> WorkerChange:
    labels, weight, draining, engine_key = (body.get(name) for name in _CHANGEABLE)
    if not isinstance(labels, dict | None) or not all(isinstance(one, str | None) for one in (labels or {}).values()):
        raise FieldInvalid("labels", 'must be an object of texts, such as {"zone": "a"}; null takes one away')
    if isinstance(weight, bool) or not isinstance(weight, int | float | None):
        raise FieldInvalid("weight", "must be a number")
    if not isinstance(draining, bool | None):
        raise FieldInvalid("draining", "must be true or false")
    if not isinstance(engine_key, str | None):
        raise FieldInvalid("engine_key", "must be a text; an empty one takes it away")
    return WorkerChange(labels, None if weight is None else float(weight), draining, engine_key)


def _refuse_unknown(body: dict[str, Any], known: tuple[str, ...], lead: str) -> None:
    unknown = sorted(body.keys() - set(known))
    if unknown:
        raise FieldInvalid(unknown[0], f"is unknown here; {lead} {', '.join(known)}")
