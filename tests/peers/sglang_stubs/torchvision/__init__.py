"""Stands in for torchvision, which SGLang imports also where it never sees an image."""

__version__ = "0.28.0"
