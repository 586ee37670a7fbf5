"""A chat rendered turn by turn, so that a conversation that grows need not be rendered from its beginning."""

from typing import Any, Final, NamedTuple, NoReturn


class TurnUnreadError(Exception):
    """A template looked at a turn that was not given to it: only the whole chat tells what it makes of this one."""


class RenderedTurns(NamedTuple):
    """The text of a chat is `opening`, all turns, `ending`. `turns` are those of the last messages, one of each."""

    opening: str
    turns: list[str]
    ending: str


class _Unread(dict[str, Any]):
    """Stands for a message that was rendered before. Whoever looks into it is told so by a `TurnUnreadError`."""

    def _refuse(self, *_: object) -> NoReturn:
        raise TurnUnreadError

    __getitem__ = __contains__ = __iter__ = __len__ = __eq__ = __ne__ = __bool__ = __str__ = __repr__ = _refuse
    __or__ = __ror__ = __reversed__ = __lt__ = __gt__ = _refuse
    get = items = keys = values = copy = _refuse
    __hash__ = None


UNREAD: Final[dict[str, Any]] = _Unread()
