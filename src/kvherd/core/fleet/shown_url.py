"""URLs as they may be repeated to people: what was given in place of an address may hold a password or a key."""

import re
from typing import Final

_WHO: Final = re.compile(r"//.*@")
_WHAT: Final = re.compile(r"[?#].*", re.DOTALL)


def shown_url(url: str) -> str:
    """Quoted, without what may be secret in it."""
    return repr(_WHO.sub("//…@", _WHAT.sub(lambda found: found[0][0] + "…", url)))
