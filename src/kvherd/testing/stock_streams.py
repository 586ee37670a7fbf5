"""Streams of stock engines, asked for alike and compared byte for byte but for what is each answer's own."""

import re
from typing import Any

import httpx

from kvherd.testing.stock_engines import MODEL
from kvherd.testing.stock_herds import ANSWER_S

_OWN = re.compile(r'"id":"[^"]+"|"created":\d+')


def stream_of(url: str, path: str, **asked: Any) -> str:  # noqa: ANN401 - fields of a request
    """A greedy answer of a few tokens, without its name and time."""
    body = {"model": MODEL, "max_tokens": 6, "temperature": 0, "stream": True, **asked}
    return _OWN.sub("", httpx.post(f"{url}{path}", json=body, timeout=ANSWER_S).text)
