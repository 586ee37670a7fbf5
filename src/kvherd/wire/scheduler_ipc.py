"""What the servicer and a scheduler process say to each other: msgpack with a schema, one message a frame.

    servicer → rank   Submit · Abort · Withdraw · Stop                          (PUSH → PULL)
                      orders: FlushOrder · StateOrder · StartProfile · StopProfile
    rank → servicer   Ready · Stepped · OrderAnswered · Fatal                   (PUSH → PULL)

Both sides are of one version: unknown fields are ignored, missing ones are an error. A frame that does not decode
raises `FrameInvalid` and nothing else.
"""

import msgspec

from kvherd.core.engine.generation import Finish, GenerationRequest, TokenLogprob
from kvherd.core.engine.profile import ProfileRequest
from kvherd.core.engine.reports import OrderAnswer, RankFacts, RankLoad
from kvherd.core.errors import FrameInvalid
from kvherd.core.ids import OrderId, Rank, RequestId


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Continue this sequence. Answered by `Stepped` progress until one has `finish`."""

    request: GenerationRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End it within one step. Answered by a progress with `finish` ABORT; an unknown id is ignored."""

    request: RequestId
    reason: str = ""


class FlushOrder(msgspec.Struct, frozen=True, tag="flush"):
    """Clear every cached block, now or (`timeout_s` > 0) when fully idle; `hold` queues new requests behind it.

    `timeout_s` counts from the caller's call: `asked_s` is its moment on the machine's monotonic clock, which both
    sides read; None is the moment at which the rank reads this.
    """

    order: OrderId
    timeout_s: float = 0.0
    hold: bool = False
    asked_s: float | None = None


class StateOrder(msgspec.Struct, frozen=True, tag="state"):
    """Tell your state of this moment."""

    order: OrderId


class StartProfile(msgspec.Struct, frozen=True, tag="start_profile"):
    """Record a profile. Answered as soon as its files are open; a conflict if one is on."""

    order: OrderId
    profile: ProfileRequest


class StopProfile(msgspec.Struct, frozen=True, tag="stop_profile"):
    """End the profile, if it is this one ("" is any). Answered when its files are whole; a conflict if none is on."""

    order: OrderId
    profile_id: str = ""


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """Whoever gave this order waits no longer: forget it if it still waits. Not answered."""

    order: OrderId


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Abort everything, close everything, exit 0."""

    reason: str = ""


Order = FlushOrder | StateOrder | StartProfile | StopProfile
ToRank = Submit | Abort | Order | Withdraw | Stop


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """First message of a rank: the model is loaded, the sockets are bound, requests may come."""

    facts: RankFacts


class Progress(msgspec.Struct, frozen=True):
    """News of one request in one step. Same promises as `TokenDelta`."""

    request: RequestId
    token_ids: tuple[int, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    host_tokens: int = 0
    storage_tokens: int = 0


class Stepped(msgspec.Struct, frozen=True, tag="stepped"):
    """One scheduler step (or an idle heartbeat, without progress)."""

    rank: Rank
    progress: tuple[Progress, ...]
    load: RankLoad


class OrderAnswered(msgspec.Struct, frozen=True, tag="answered"):
    answer: OrderAnswer


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """Last message of a rank that cannot go on."""

    rank: Rank
    reason: str


FromRank = Ready | Stepped | OrderAnswered | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


def encode(message: ToRank | FromRank) -> bytes:
    return _encoder.encode(message)


def decode_to_rank(frame: bytes) -> ToRank:
    try:
        return _to_rank.decode(frame)
    except msgspec.MsgspecError as error:
        raise FrameInvalid("servicer-to-rank", str(error)) from error


def decode_from_rank(frame: bytes) -> FromRank:
    try:
        return _from_rank.decode(frame)
    except msgspec.MsgspecError as error:
        raise FrameInvalid("rank-to-servicer", str(error)) from error
