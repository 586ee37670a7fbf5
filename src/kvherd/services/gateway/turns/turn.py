"""One request of the data path on its way, and what became of it."""

from collections.abc import Mapping, Sequence
from typing import Final

from kvherd.core.errors import KvherdError, WorkerError
from kvherd.core.fleet.roster import Member
from kvherd.core.fleet.under_way import UnderWay
from kvherd.core.ids import Rank, RequestId, WorkerId
from kvherd.ports.completions import Usage
from kvherd.services.gateway.reading.conversations import Recalled
from kvherd.services.gateway.reading.prompts import Prompt
from kvherd.services.gateway.relay.edge import DataRequest
from kvherd.services.gateway.turns.audit import Trial
from kvherd.services.gateway.turns.credit import NO_MATCH, Match
from kvherd.services.gateway.turns.witness import Witness
from kvherd.wire.openai.routing import Peek

_NOT_TRIED: Final[dict[WorkerId, WorkerError]] = {}


class Turn:
    """`match` and what follows it are of the last try.

    Not a dataclass: one is made for every request, and the `__init__` that a dataclass is given cannot be compiled.
    """

    __slots__ = (
        "ahead_tokens",
        "asked",
        "began_s",
        "ends",
        "explain",
        "explanation",
        "first_token_at_s",
        "gave_up",
        "headers",
        "held_s",
        "incoming",
        "keeper",
        "last_error",
        "match",
        "member",
        "model",
        "outcome",
        "prompt",
        "rank",
        "recalled",
        "request",
        "sampled",
        "sent_at_s",
        "streams",
        "there",
        "trial",
        "tried",
        "tries",
        "uncached",
        "usage",
        "wanted_rank",
        "witness",
    )

    def __init__(  # noqa: PLR0917 - what is known of every request
        self,
        incoming: DataRequest,
        request: RequestId,
        asked: Peek,
        model: str,
        prompt: Prompt,
        witness: Witness,
        began_s: float,
    ) -> None:
        self.incoming = incoming
        self.request = request
        self.asked = asked
        self.streams = asked.stream is True
        self.model = model
        self.prompt = prompt
        self.witness = witness
        self.began_s = began_s
        self.recalled: Recalled | None = None  # what was found of its prompt, until that is read
        self.explain = False
        self.wanted_rank: Rank | None = None
        """That the client named."""
        self.ends: tuple[float, float] | None = None
        """When the client's own deadline comes, and how many seconds it gave."""
        self.keeper: WorkerId | None = None
        """The one worker that can answer."""
        self.tried: Mapping[WorkerId, WorkerError] = _NOT_TRIED
        self.tries = 0
        """How often it was sent to a worker."""
        self.last_error: WorkerError | None = None
        self.gave_up: KvherdError | None = None
        """Why the gateway itself ended the try."""
        self.member: Member | None = None
        self.rank: Rank | None = None
        """That is to serve it, if its worker's ranks can be addressed."""
        self.match: Match = NO_MATCH
        self.trial: Trial | None = None
        self.sampled = False
        """The gateway asks for the usage, and the client does not."""
        self.held_s = self.sent_at_s = 0.0
        """How long it waited for a worker to have room, and when it was sent."""
        self.uncached, self.ahead_tokens = 0, 0.0
        self.there: UnderWay | None = None
        """The try that was begun last, as its worker's member has it."""
        self.headers: Sequence[tuple[bytes, bytes]] = ()
        """What is added to those of the answer."""
        self.explanation = b""
        self.first_token_at_s: float | None = None
        self.usage: Usage | None = None
        self.outcome = "unserved"

    @property
    def served_by(self) -> Member:
        """The worker of a try that has begun."""
        if self.member is None:
            raise LookupError("no worker was chosen")
        return self.member

    @property
    def predicted(self) -> int | None:
        """Prompt tokens expected to be cached; None if the prompt was not tokenized."""
        return self.match.tokens if self.member is not None and self.prompt.token_ids is not None else None
