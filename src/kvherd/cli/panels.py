"""Under which headings the many options of the gateway stand in its help."""

from typing import Final

WORKERS: Final = "Workers"
ROUTING: Final = "Routing"
DOORS: Final = "Where it listens, and to whom"
TLS: Final = "TLS"
BOUNDS: Final = "Bounds and patience"
LOGS: Final = "Logs"

SECONDS: Final = "SECONDS"
NUMBER: Final = "N"
