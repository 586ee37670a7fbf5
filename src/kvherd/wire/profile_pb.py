"""What asks for a profile over gRPC: the fields of `profile_fields` that this protocol has."""

from typing import Any

from smg_grpc_proto.generated import common_pb2

from kvherd.core.engine.profile import ProfileWish
from kvherd.wire.openai.fields import Fields
from kvherd.wire.profile_fields import wish_of


def read_start_profile(message: common_pb2.StartProfileRequest) -> ProfileWish:
    """Raises `FieldInvalid`."""
    given: dict[str, Any] = {name.name: value for name, value in message.ListFields()}
    given["activities"] = list(message.activities)
    return wish_of(Fields(given))
