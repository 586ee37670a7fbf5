"""The tokenizers of the models in the fleet: one for each model, from the first worker that tells it."""

import asyncio
import logging
from collections import defaultdict

from kvherd.core.errors import KvherdError
from kvherd.core.fleet.roster import Member
from kvherd.ports.completions import Tokenizer
from kvherd.services.gateway.fleet.fleet_edges import TokenizerFactory

log = logging.getLogger(__name__)


class Tokenizers:
    """Keeps what `factory` makes. A source is read by one at a time, and what one read there serves the others."""

    def __init__(self, factory: TokenizerFactory, *, deadline_s: float) -> None:
        self._factory = factory
        self._deadline_s = deadline_s
        self._of: dict[str, Tokenizer] = {}
        # Workers of one model join together; each with a tokenizer of its own, half a gateway's memory was freed again.
        self._reading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    def of(self, model: str) -> Tokenizer | None:
        """The tokenizer of a model, if any worker that serves it has told it."""
        return self._of.get(model)

    async def learn(self, member: Member) -> None:
        """Have those of this worker's models; what hindered is a problem of the member's, and it may be asked again."""
        source = member.tokenizer_from
        if source is None or not self._lacking(member):
            return
        try:
            async with asyncio.timeout(self._deadline_s), self._reading[source]:
                wanted = self._lacking(member)
                if wanted:
                    self._of.update(dict.fromkeys(wanted, await self._factory(source)))
        except (KvherdError, TimeoutError) as error:
            problem = str(error) or f"nothing within {self._deadline_s:g} s"
            if problem != member.tokenizer_problem:  # it is asked for again at every probe
                log.warning("no tokenizer for %s from %s: %s", ", ".join(self._lacking(member)), source, problem)
            member.tokenizer_problem = problem
            return
        member.tokenizer_problem = ""

    def _lacking(self, member: Member) -> list[str]:
        return [model for model in member.models if model not in self._of]
