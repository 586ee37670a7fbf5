"""How a stream of KV events is refused or lost, sorted by what its reader must do.

    KvStreamError
    ├── StreamRefused          raised before the subscription is accepted
    │   ├── EventsUnsupported      there are none here: do without
    │   ├── ResumeOutOfRange       those cursors cannot be honoured: forget everything, subscribe from zero
    │   └── StreamForbidden        the credentials are wrong: retry slowly
    └── StreamLost             raised at any time
        ├── EpochEnded             the publisher's life is over: forget everything, subscribe from zero
        ├── SubscriberTooSlow      cut off: forget everything, subscribe from zero
        ├── StreamUntranslatable   the engine says what cannot be passed on: quarantine, retry slowly
        └── StreamBroken           the connection failed: back off, resume from the cursors

`BatchUntranslatable` is the decoder's word for the last batch of a stream that then ends as `StreamUntranslatable`.
"""

from dataclasses import dataclass

from kvherd.core.errors import KvherdError
from kvherd.core.ids import Epoch


@dataclass(eq=False)
class KvStreamError(KvherdError):
    """A stream of KV events cannot begin or go on."""


@dataclass(eq=False)
class StreamRefused(KvStreamError):
    """The subscription was not accepted."""


@dataclass(eq=False)
class EventsUnsupported(StreamRefused):
    reason: str = "this engine publishes no KV events"

    def __str__(self) -> str:
        return self.reason


@dataclass(eq=False)
class ResumeOutOfRange(StreamRefused):
    """`epoch` is the publisher's present life, if it was told."""

    reason: str
    epoch: Epoch | None = None

    def __str__(self) -> str:
        return f"cannot resume: {self.reason}; subscribe from zero"


@dataclass(eq=False)
class StreamForbidden(StreamRefused):
    reason: str

    def __str__(self) -> str:
        return f"the KV events may not be read: {self.reason}"


@dataclass(eq=False)
class StreamLost(KvStreamError):
    """The stream ended; what follows was not sent."""


@dataclass(eq=False)
class EpochEnded(StreamLost):
    reason: str

    def __str__(self) -> str:
        return f"this life of the publisher is over: {self.reason}; subscribe from zero"


@dataclass(eq=False)
class SubscriberTooSlow(StreamLost):
    reason: str

    def __str__(self) -> str:
        return f"cut off: {self.reason}; subscribe from zero"


@dataclass(eq=False)
class StreamUntranslatable(StreamLost):
    reason: str

    def __str__(self) -> str:
        return f"the engine's KV events cannot be passed on without loss: {self.reason}"


@dataclass(eq=False)
class StreamBroken(StreamLost):
    reason: str

    def __str__(self) -> str:
        return f"the stream of KV events broke: {self.reason}"


@dataclass(eq=False)
class BatchUntranslatable(KvherdError):
    """A well-formed batch that says what kvherd cannot repeat without loss."""

    reason: str

    def __str__(self) -> str:
        return f"KV events that cannot be translated: {self.reason}"
