"""kvherd: the KV-cache control plane for fleets of LLM engines."""

__version__ = "0.1.0"
