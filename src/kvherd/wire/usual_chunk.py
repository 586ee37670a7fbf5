"""The usual message of a generation, known by its bytes: one token, and how many that makes.

It is `GenerateResponse{request_id, chunk{token_ids: [one], prompt_tokens, …}}` with its fields in order, as every
serializer writes them. Nothing is made of it but the bytes that spell its token: these are enough to know the text.
"""

from collections.abc import Callable, Iterable

from kvherd.wire.openai.answers import quoted

_REQUEST, _CHUNK, _TOKENS, _PROMPT_TOKENS = 0x0A, 0x12, 0x0A, 0x10
_LONGEST = 127  # a size that is one byte
_SHORTEST = 5


class UsualChunks:
    """Those of one request. `ending_token_ids` end its generation, so their messages are not the usual ones."""

    __slots__ = ("_ending", "_head", "_size_at")

    def __init__(self, request: str, ending_token_ids: Iterable[int]) -> None:
        name = request.encode()
        self._head = bytes((_REQUEST,)) + varint(len(name)) + name + bytes((_CHUNK,))
        self._size_at = len(self._head)
        self._ending = frozenset(spelling(token_id) for token_id in ending_token_ids)

    def token(self, data: bytes) -> bytes:
        """The `spelling` of a usual message's token. For any other message what no token's is, mostly b""."""
        at = self._size_at
        size = len(data) - at - 1
        if not _SHORTEST <= size <= _LONGEST or data[at] != size or not data.startswith(self._head):
            return b""
        end = at + 3 + data[at + 2]
        if end >= len(data) or data[end] != _PROMPT_TOKENS:
            return b""
        token = data[at + 1 : end]
        return b"" if token in self._ending else token


class TokenTexts:
    """What tokens show that are whole characters, as JSON has it between quotes, by their `spelling`.

    `spelt` gives a token's bytes; none for one that is not shown. `known` is what was asked for: no more than the
    vocabulary.
    """

    __slots__ = ("_spelt", "known")

    def __init__(self, spelt: Callable[[int], bytes]) -> None:
        self._spelt = spelt
        self.known: dict[bytes, bytes] = {}

    def learn(self, token: bytes) -> bytes:
        """What is not known yet; b"" for what is no one token's spelling, shows nothing or a part of a character."""
        if not token:
            return b""
        token_id = _number(token[2:])
        if token != spelling(token_id):
            return b""
        try:
            text = quoted(self._spelt(token_id).decode())
        except UnicodeDecodeError:
            return b""
        if text:
            self.known[token] = text
        return text


def spelling(token_id: int) -> bytes:
    """A token as its message has it when it is alone there: the field, its size, the number."""
    data = varint(token_id)
    return bytes((_TOKENS,)) + varint(len(data)) + data


def varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _number(data: bytes) -> int:
    number = 0
    for place, byte in enumerate(data[:5]):
        number |= (byte & 0x7F) << 7 * place
    return number
