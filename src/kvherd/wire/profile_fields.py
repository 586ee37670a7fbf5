"""What asks for a profile, over HTTP as over gRPC: SGLang's fields, read strictly.

`null` is as good as absent, and a whole number may come as its text, as SGLang's own client sends it. Anything else
of the wrong type, and a field nobody here knows, is refused by name: it must never reach a scheduler.
"""

import re

from kvherd.core.engine.profile import BOTH_STAGES, ProfileWish, Stage
from kvherd.core.errors import FieldInvalid
from kvherd.wire.openai.body import json_name, parse_object
from kvherd.wire.openai.fields import Fields, text_item

MOST_STEPS = 2**31 - 1
_FIELDS = (
    "output_dir",
    "start_step",
    "num_steps",
    "activities",
    "with_stack",
    "record_shapes",
    "profile_by_stage",
    "merge_profiles",
    "profile_prefix",
    "profile_stages",
    "profile_id",
)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_NUMBER = re.compile(r"[0-9]{1,10}")


def decode_start_profile(body: bytes) -> ProfileWish:
    """Raises `BodyNotJson` or `FieldInvalid`. No body at all asks for a profile as it is by default."""
    return wish_of(_known(body, _FIELDS))


def decode_stop_profile(body: bytes) -> None:
    """Nothing may be said there. Raises `BodyNotJson` or `FieldInvalid`."""
    _known(body, ())


def wish_of(fields: Fields) -> ProfileWish:
    """Raises `FieldInvalid`."""
    return ProfileWish(
        output_dir=_directory(fields.text("output_dir", None)),
        start_step=_whole(fields, "start_step", low=0),
        num_steps=_whole(fields, "num_steps", low=1),
        activities=fields.sequence("activities", text_item, most=16),
        with_stack=fields.flag("with_stack"),
        record_shapes=fields.flag("record_shapes"),
        by_stage=fields.flag("profile_by_stage"),
        stages=fields.sequence("profile_stages", _stage, most=16) or BOTH_STAGES,
        merge=fields.flag("merge_profiles"),
        prefix=_name(fields, "profile_prefix") or "",
        profile_id=_name(fields, "profile_id"),
    )


def _known(body: bytes, names: tuple[str, ...]) -> Fields:
    values = parse_object(body) if body.strip() else {}
    strange = next((name for name in values if name not in names), None)
    if strange is not None:
        known = f"known are {', '.join(names)}" if names else "no field is known here"
        raise FieldInvalid(strange[:100], f"is not known here; {known}")
    return Fields(values)


def _whole(fields: Fields, name: str, *, low: int) -> int | None:
    value = fields.get(name)
    if isinstance(value, str):
        if not _NUMBER.fullmatch(value.strip()):
            raise fields.invalid(name, f"must be a whole number, not {json_name(value)} that is none")
        value = int(value)
    return Fields({name: value}).integer(name, None, low=low, high=MOST_STEPS)


def _directory(value: str | None) -> str | None:
    if value is not None and (not value.strip() or "\0" in value):
        raise FieldInvalid("output_dir", "must be the path of a directory, or absent")
    return value


def _name(fields: Fields, name: str) -> str | None:
    value = fields.text(name, None)
    if value in (None, ""):
        return None
    if not _NAME.fullmatch(value):
        raise fields.invalid(name, "is a part of file names: letters, digits, '.', '_' and '-', 100 at most")
    return value


def _stage(path: str, value: object) -> Stage:
    try:
        return Stage(str(value).lower())
    except ValueError:
        raise FieldInvalid(path, f"must be {' or '.join(BOTH_STAGES)}, not {value!r:.60}") from None
