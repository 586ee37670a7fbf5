"""Long bodies are read in a thread, one at a time, while the loop serves others.

Threads take turns with the loop between two steps of the interpreter, and compiled rooms have none: what takes long is
done here in pieces. This module stays with the interpreter.
"""

import asyncio
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from kvherd.core.kv.bigrams import bigram_keys
from kvherd.core.kv.hashing import TOKEN_BYTES, PrefixHasher, token_bytes
from kvherd.ports.completions import Tokenizer
from kvherd.services.gateway.reading.encodings import EncodingCache
from kvherd.services.gateway.reading.prompts import MOST_TEXT_BLOCKS, TEXT_BLOCK_BYTES, Prompt, read_long_prompt
from kvherd.services.gateway.turns.credit import Naming
from kvherd.wire.long_lists import Cut, peek_long
from kvherd.wire.openai.edits import with_model
from kvherd.wire.openai.routing import Peek

_T = TypeVar("_T")
_PIECE_BLOCKS: Final = 4096
_ANY_LENGTH: Final = 2**62


class LongBodies:
    """Remembers encodings of its own, for the loop's are the loop's."""

    def __init__(self, *, piece_blocks: int = _PIECE_BLOCKS) -> None:
        self._encodings = EncodingCache(long_chars=_ANY_LENGTH)
        self._piece_blocks = piece_blocks
        self._turn = asyncio.Semaphore(1)

    async def peek(self, body: bytes) -> tuple[Peek, Cut | None]:
        """As `peek_long`."""
        return await self._run(partial(peek_long, body))

    async def with_model(self, body: bytes, model: str, cut: Cut | None) -> bytes:
        """As the edit of that name."""
        if cut is None:
            return await self._run(partial(with_model, body, model))
        return await self._run(lambda: cut.whole(with_model(cut.rest, model)))

    async def prompt(
        self, path: str, body: bytes, peeked: Peek, cut: Cut | None, tokenizer: Tokenizer | None
    ) -> Prompt:
        """As `read_prompt`."""
        return await self._run(partial(read_long_prompt, path, body, peeked, tokenizer, self._encodings, cut=cut))

    async def name(self, prompt: Prompt, hasher: PrefixHasher, namings: Sequence[Naming]) -> None:
        """Name the prompt's blocks, so that nobody has to when it is matched."""
        await self._run(partial(self._name, prompt, hasher, namings))

    def _name(self, prompt: Prompt, hasher: PrefixHasher, namings: Sequence[Naming]) -> None:
        for naming in namings:
            size, keys = naming.block_size, []
            if size == 0:
                data, width = prompt.text[: MOST_TEXT_BLOCKS * TEXT_BLOCK_BYTES], TEXT_BLOCK_BYTES
            elif prompt.token_ids is None:
                continue
            else:
                try:
                    data, width = token_bytes(prompt.token_ids), size * TOKEN_BYTES
                except struct.error:  # no vocabulary has them
                    continue
                if naming.bigrams:
                    keys = bigram_keys(prompt.token_ids, size)
                    data = data[: len(keys) * width]
            parent = hasher.root(model=naming.model, block_size=size, lora=naming.lora, salt=prompt.salt)
            names = []
            step = self._piece_blocks
            for at in range(0, len(data) // width, step):
                piece = data[at * width : (at + step) * width]
                more = hasher.extend(parent, piece, width, keys[at : at + step])
                names += more
                parent = more[-1]
            prompt.know(naming.model, size, names, lora=naming.lora, bigrams=naming.bigrams)

    async def _run(self, work: Callable[[], _T]) -> _T:
        """In a thread. Of whose client left it goes on for a while: until then it is nobody else's turn."""
        await self._turn.acquire()
        thread = asyncio.get_running_loop().run_in_executor(None, work)
        thread.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(thread)
