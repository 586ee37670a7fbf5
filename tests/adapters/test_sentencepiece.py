"""SentencePiece vocabularies out of a GGUF: the tokens its own rule makes, every text back, and no space lost."""

import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from kvherd.adapters.completions import OpenAiCompletions
from kvherd.adapters.gguf_vocabulary import read_vocabulary
from kvherd.adapters.sentencepiece import build_tokenizer
from kvherd.adapters.tokenizer import ModelTokenizer, tokenizer_from_zip
from kvherd.core.engine.generation import Finish, FinishReason, GenerationRequest, TokenDelta
from kvherd.core.errors import FieldInvalid, ModelUnsupported
from kvherd.core.ids import RequestId
from kvherd.core.text.calls import CallOptions, ChatCall, CompletionCall
from kvherd.core.text.detokenizer import IncrementalDetokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
CORPUS = "the herd eats the other herbs there and then a bee sees the tree ababab aaaa aaaaa  two  spaces été"
CHAT = ChatCall(CallOptions("m"), ({"role": "user", "content": "hi"},))


def learn(corpus: str, count: int) -> list[str]:
    """Pieces as BPE training orders them: joins as they are made, then every single character."""
    words = [list("▁" + word) for word in corpus.split(" ")]
    joins: list[str] = []
    for _ in range(count):
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        if not pairs:
            break
        first, second = max(pairs, key=lambda pair: (pairs[pair], pair))
        joins.append(first + second)
        words = [join(word, first + second) for word in words]
    return list(dict.fromkeys([*joins, *sorted(set("▁" + corpus.replace(" ", "▁")))]))


def join(word: list[str], made: str) -> list[str]:
    out: list[str] = []
    for piece in word:
        if out and out[-1] + piece == made:
            out[-1] = made
        else:
            out.append(piece)
    return out


SPECIAL = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
BYTES = [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
LEARNT = learn(CORPUS, 60)
TYPED = [*SPECIAL, *BYTES, *((piece, NORMAL) for piece in ["▁▁", *LEARNT])]
PIECES, KINDS = [piece for piece, _ in TYPED], [kind for _, kind in TYPED]
SCORES = [0.0] * 259 + [-float(rank) for rank in range(len(LEARNT) + 1)]


def write(path: Path, **entries: object) -> Path:
    wanted: dict[str, object] = {
        "model": "llama",
        "tokens": PIECES,
        "scores": SCORES,
        "token_type": KINDS,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **entries,
    }
    writer = GGUFWriter(path, "llama")
    for name, value in wanted.items():
        key = name if name.startswith("llama.") else f"tokenizer.ggml.{name}"
        if name == "chat_template":
            writer.add_string("tokenizer.chat_template", str(value))
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def tokenizer(path: Path, **entries: object) -> ModelTokenizer:
    return ModelTokenizer(read_vocabulary(write(path / "model.gguf", **entries)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return tokenizer(tmp_path_factory.mktemp("llama"))


def plainly(text: str) -> list[str]:
    """SentencePiece's rule, word for word: join the neighbours with the best score, the leftmost of equals."""
    best = {piece: score for piece, score, kind in zip(PIECES, SCORES, KINDS, strict=True) if kind == NORMAL}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [
            (-best[first + second], at)
            for at, (first, second) in enumerate(itertools.pairwise(symbols))
            if first + second in best
        ]
        if not joins:
            break
        _, at = min(joins)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        piece
        for symbol in symbols
        for piece in ([symbol] if symbol in best else [f"<0x{b:02X}>" for b in symbol.encode()])
    ]


likely_text = st.text(alphabet="abtherds  ▁été🦙\n") | st.lists(st.sampled_from(CORPUS.split())).map(" ".join)


@given(text=likely_text | st.text())
def test_the_tokens_are_those_of_sentencepieces_own_rule(llama: ModelTokenizer, text: str) -> None:
    assert [PIECES[token] for token in llama.encode(text)] == plainly(text)


@given(text=likely_text | st.text())
def test_any_text_survives(llama: ModelTokenizer, text: str) -> None:
    """But "▁" itself, which is how a space is spelled."""
    ids = llama.encode(text)
    assert llama.decode(ids) == text.replace("▁", " ")
    assert b"".join(map(llama.token_bytes, ids)).decode() == (" " + llama.decode(ids) if text else "")


def test_a_tokenizers_archive_makes_the_same_tokens_and_text(llama: ModelTokenizer) -> None:
    again = tokenizer_from_zip(llama.artifact_zip())
    for text in (CORPUS, " leading", "naïve 東京 🦙\n\n", ""):
        ids = llama.encode(text, add_special_tokens=True)
        assert again.encode(text, add_special_tokens=True) == ids
        assert again.decode(ids) == llama.decode(ids) == text


def test_text_gets_one_space_before_it_unless_the_file_says_no(tmp_path: Path, llama: ModelTokenizer) -> None:
    assert llama.token_text(llama.encode("the")[0]) == " the"
    assert llama.decode(llama.encode("  the")) == "  the"
    bare = tokenizer(tmp_path, add_space_prefix=False)
    assert bare.token_text(bare.encode("herd")[0])[0] == "h"
    assert bare.decode(bare.encode(" the  herd")) == " the  herd"


def test_what_is_no_piece_is_spelled_in_bytes(llama: ModelTokenizer) -> None:
    ids = llama.encode("\n🦙")
    assert [PIECES[token] for token in ids] == ["▁", "<0x0A>", "<0xF0>", "<0x9F>", "<0xA6>", "<0x99>"]
    assert llama.token_bytes(PIECES.index("<0x0A>")) == b"\n"
    assert llama.token_text(PIECES.index("<0xF0>")) == "\\xf0"
    assert llama.decode(llama.encode("<0x0A>")) == "<0x0A>"


def test_a_first_token_is_added_to_a_text_and_not_twice_to_a_chat(tmp_path: Path, llama: ModelTokenizer) -> None:
    assert llama.encode("the", add_special_tokens=True) == [1, *llama.encode("the")]
    assert tokenizer(tmp_path, add_bos_token=False).encode("the", add_special_tokens=True) == llama.encode("the")
    chatty = tokenizer(tmp_path, chat_template="{{ bos_token }}[{{ messages[0].content }}]")
    ids = chatty.encode(chatty.render_chat(CHAT))
    assert ids.count(1) == 1
    assert ids[0] == 1
    assert chatty.decode(ids) == "[hi]"


def test_a_file_without_a_chat_template_takes_completions_only(llama: ModelTokenizer) -> None:
    with pytest.raises(FieldInvalid, match="this model has no chat template; use /v1/completions"):
        llama.render_chat(CHAT)


def test_special_tokens_and_added_words_are_matched_whole(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, tokens=[*PIECES, "<added>"], scores=[*SCORES, 0.0], token_type=[*KINDS, USER_DEFINED])
    assert made.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2}
    ids = made.encode("the</s><added>")
    assert ids[-2:] == [2, len(PIECES)]
    assert made.decode(ids) == "the<added>"
    assert made.decode(ids, skip_special_tokens=False) == "the</s><added>"


any_tokens = st.lists(st.integers(0, len(PIECES) - 1) | st.integers(3, 258), max_size=40)


@given(token_ids=any_tokens, context=any_tokens | st.just([]))
def test_a_continuation_comes_in_pieces_exactly(
    llama: ModelTokenizer, token_ids: list[int], context: list[int]
) -> None:
    """Any tokens, bytes that are no text among them, and nothing that was shown is taken back."""
    detokenizer = IncrementalDetokenizer(llama.decode, context)
    pieces = [detokenizer.feed([token]) for token in token_ids]
    assert "".join([*pieces, detokenizer.finish()]) == continuation(llama, context, token_ids)


def continuation(tokenizer: ModelTokenizer, context: Sequence[int], token_ids: Sequence[int]) -> str:
    before = tokenizer.decode(list(context[-16:]))
    return tokenizer.decode([*context[-16:], *token_ids])[len(before) :]


def test_the_space_between_a_prompt_and_its_continuation_is_shown(llama: ModelTokenizer) -> None:
    prompt, more = llama.encode("the"), llama.encode("herd")
    assert IncrementalDetokenizer(llama.decode, prompt).feed(more) == " herd"
    assert IncrementalDetokenizer(llama.decode).feed(more) == "herd"


async def test_a_completion_goes_on_where_its_prompt_ends(llama: ModelTokenizer) -> None:
    asked: list[GenerationRequest] = []

    async def generate(request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        asked.append(request)
        yield TokenDelta(tuple(llama.encode("herd eats")), 2, 9, 0, finish=Finish(FinishReason.LENGTH))

    call = CompletionCall(CallOptions("m"), ("the",), echo=True)
    answer = await OpenAiCompletions(llama, "m", 99).whole(call, request=RequestId("r"), generate=generate)
    assert asked[0].prompt_token_ids == llama.encode("the", add_special_tokens=True)
    assert json.loads(answer)["choices"][0]["text"] == "the herd eats"


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"scores": None}, r"it has no list tokenizer\.ggml\.scores"),
        ({"token_type": None}, r"it has no list tokenizer\.ggml\.token_type"),
        ({"scores": [0.0]}, "pieces have 1 scores"),
    ],
)
def test_a_vocabulary_that_is_not_whole_is_refused(tmp_path: Path, entries: dict[str, object], said: str) -> None:
    with pytest.raises(ModelUnsupported, match=said):
        tokenizer(tmp_path, **entries)


def test_only_pieces_of_text_are_joined() -> None:
    made = build_tokenizer(["a", "b", "ab"], [0.0, 0.0, 0.0], [NORMAL, NORMAL, CONTROL], prefix_space=False)
    assert made.encode("ab").tokens == ["a", "b"]
