"""A tokenizer that a test can follow: a byte is a token, and the special tokens come after."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from kvherd.core.text.calls import ChatCall
from kvherd.core.text.turns import RenderedTurns


@dataclass
class ByteTokenizer:
    """Implements `ports.completions.Tokenizer`. `encoded` has every text that was given to `encode`."""

    special_tokens: dict[str, int] = field(default_factory=lambda: {"<|im_start|>": 256, "<|im_end|>": 257})
    model_max_tokens: int = 4096
    encoded: list[str] = field(default_factory=list)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        self.encoded.append(text)
        token_ids: list[int] = []
        for piece in re.split("|".join(f"({re.escape(token)})" for token in self.special_tokens), text):
            if piece in self.special_tokens:
                token_ids.append(self.special_tokens[piece])
            elif piece:
                token_ids += piece.encode()
        return token_ids

    def check_length(self, text: str, *, after_chars: int = 0) -> None:
        """Every text passes."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        kept = [token for token in token_ids if token < 256 or not skip_special_tokens]
        return b"".join(map(self.token_bytes, kept)).decode()

    def spelt(self, *, skip_special_tokens: bool = True) -> Callable[[int], bytes] | None:
        return lambda token: b"" if skip_special_tokens and token >= 256 else self.token_bytes(token)

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        names = {number: name for name, number in self.special_tokens.items()}
        return names[token_id].encode() if token_id in names else bytes([token_id])

    def render_chat(self, call: ChatCall) -> str:
        turns = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in call.messages)
        return turns + "<|im_start|>assistant\n" * call.add_generation_prompt

    turns_ahead = 0
    only_shown = True

    def render_turns(self, call: ChatCall, begin: int) -> RenderedTurns | None:
        turns = [f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in call.messages[begin:]]
        return RenderedTurns("", turns, "<|im_start|>assistant\n" * call.add_generation_prompt)
