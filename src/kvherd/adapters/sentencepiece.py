"""SentencePiece's BPE vocabularies ("llama" in a GGUF), as a tokenizer of the package `tokenizers`.

SentencePiece writes a space as "▁", puts one before the text, and then joins, again and again, the two neighbours whose
union is the piece with the highest score; a character that is no piece becomes its bytes, pieces of their own. A file
has pieces and scores only. The list of merges that `tokenizers` wants follows: every way to cut a piece into two
others, by the score of the piece. The result is the same where every character of a piece is a piece, as training
makes it.
"""

import json
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers

SPACE = "▁"
_UNKNOWN, _NORMAL, _USER_DEFINED, _UNUSED = 2, 1, 4, 5  # of tokenizer.ggml.token_type


def build_tokenizer(
    pieces: Sequence[str], scores: Sequence[float], kinds: Sequence[int], *, prefix_space: bool
) -> Tokenizer:
    """Without its special tokens. Raises `ValueError` for lists that do not belong together."""
    if not len(pieces) == len(scores) == len(kinds):
        raise ValueError(f"{len(pieces)} pieces have {len(scores)} scores and {len(kinds)} types")
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    plain = {
        piece: score
        for piece, score, kind in zip(pieces, scores, kinds, strict=True)
        if kind in (_NORMAL, _USER_DEFINED, _UNUSED)
    }
    unknown = next((piece for piece, kind in zip(pieces, kinds, strict=True) if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=_merges(plain, vocabulary), byte_fallback=True, fuse_unk=True, unk_token=unknown
        )
    )
    spell = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spell]) if prefix_space else spell
    undo = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix_space else undo)
    return tokenizer


def _merges(scores: Mapping[str, float], order: Mapping[str, int]) -> list[tuple[str, str]]:
    cuts = [
        (-score, order[piece[:at]], order[piece[at:]], piece[:at], piece[at:])
        for piece, score in scores.items()
        for at in range(1, len(piece))
        if piece[:at] in scores and piece[at:] in scores
    ]
    return [(first, second) for *_, first, second in sorted(cuts)]


def leading_spaces_dropped(tokenizer: Tokenizer) -> int | None:
    """How many spaces decoding takes from a text's beginning; None if it does not decode as SentencePiece does."""
    decoder = tokenizer.decoder
    steps = json.loads(decoder.__getstate__()).get("decoders", []) if decoder is not None else []
    kinds = [step["type"] for step in steps]
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return None
    if steps[0].get("content") != " " or steps[0].get("pattern") != {"String": SPACE}:
        return None
    if not kinds[3:]:
        return 0
    strip = steps[3]
    return int(strip["start"]) if strip["content"] == " " and not strip["stop"] else None
