"""Why a gateway serves no request now, or not any longer: itself, whatever its workers could do, or for all of them."""

from dataclasses import dataclass

from kvherd.core.errors import CallerError, FleetError, WorkerRefused


@dataclass(eq=False)
class DeadlinePassed(CallerError):
    """The client said how long it would wait."""

    after_s: float

    def __str__(self) -> str:
        return f"the request was not answered within the {self.after_s:g} s that its x-request-timeout allows"


@dataclass(eq=False)
class GatewayBusy(FleetError):
    """As many requests wait here already as may."""

    limit: int
    retry_after_s: int = 1

    def __str__(self) -> str:
        return f"{self.limit} requests are waiting here already, the limit; try again in {self.retry_after_s} s"


@dataclass(eq=False)
class BodiesFull(FleetError):
    """All bodies together, those that are being read and those of requests under way, take as much memory as may be."""

    limit_bytes: int
    retry_after_s: int = 5

    def __str__(self) -> str:
        return f"the bodies that are held here take {self.limit_bytes >> 20} MiB already, the limit; try again later"


@dataclass(eq=False)
class WaitedInVain(FleetError):
    after_s: float
    retry_after_s: int = 1

    def __str__(self) -> str:
        return f"the request waited here for {self.after_s:g} s and its turn did not come; try again later"


@dataclass(eq=False)
class DescriptorsExhausted(FleetError):
    retry_after_s: int = 1

    def __str__(self) -> str:
        return "the gateway has no file descriptor left for a connection to a worker; raise `ulimit -n`, or try later"


@dataclass(eq=False)
class WorkerBusy(WorkerRefused):
    """It serves nothing now, by its own word, and no other could be asked; `retry_after_s` is its word too, if any."""

    retry_after_s: int = 1


@dataclass(eq=False)
class NameUnknown(CallerError):
    """Of a stored response or a conversation."""

    name: str

    def __str__(self) -> str:
        return f"no worker here keeps {self.name!r}; it may have been deleted, or its worker was restarted or removed"


@dataclass(eq=False)
class KeeperSilent(FleetError):
    """Nobody who answered keeps it, and some gave no answer."""

    name: str
    silent: tuple[str, ...]
    retry_after_s: int = 5

    def __str__(self) -> str:
        return f"whether {self.name!r} is kept here is unknown: {', '.join(self.silent)} gave no answer"
