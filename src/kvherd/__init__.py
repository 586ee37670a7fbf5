"""kvherd: the KV-cache control plane for fleets of LLM engines."""

from kvherd import compiled

__version__ = "0.1.0"

compiled.install()
