"""Text ↔ tokens as a model does it, and the archive by which another process gets the same tokenizer."""

import io
import re
import zipfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

from kvherd.adapters.chat_template import ChatTemplate
from kvherd.adapters.gguf_vocabulary import read_vocabulary
from kvherd.adapters.heap import give_back_freed_memory
from kvherd.adapters.model_files import ModelFile
from kvherd.adapters.sentencepiece import SPACE, leading_spaces_dropped
from kvherd.adapters.vocabulary import Vocabulary, byte_characters, from_hf_files, hf_files, tiny_vocabulary
from kvherd.adapters.word_encoding import word_encoding
from kvherd.core.errors import FieldInvalid, FrameInvalid, ModelMissing, PromptTooLong
from kvherd.core.text.calls import ChatCall
from kvherd.core.text.turns import RenderedTurns
from kvherd.wire.usual_chunk import TokenTexts

ARCHIVE_LIMIT_BYTES = 256 << 20
LONG_CHARACTERS = 4096
_READ = ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest a zip can say
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ModelTokenizer:
    """A `ports.completions.Tokenizer`.

    Special tokens in a text are parsed as such wherever they stand, in a user's message too, as Transformers and vLLM
    do: what the gateway counts must be what the engine computes.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Raises `ModelUnsupported` for a chat template that cannot be read."""
        self._vocabulary = vocabulary
        self._tokenizer = vocabulary.tokenizer
        source = vocabulary.chat_template
        self._template = ChatTemplate(source, vocabulary.named_tokens) if source else None
        self._dropped_spaces = leading_spaces_dropped(self._tokenizer)
        self._byte_level = "ByteLevel" in repr(self._tokenizer.decoder)
        self.model_max_tokens = vocabulary.max_tokens
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_tokens = {token.content: index for index, token in added.items() if token.special}
        self._special_ids = frozenset(self.special_tokens.values())
        self._added = {index: token.content for index, token in added.items()}
        self._words = word_encoding(self._tokenizer)
        self._spellings = {True: self._spelling(self._special_ids), False: self._spelling(frozenset())}
        self.token_texts = {skip: TokenTexts(spelt) for skip, spelt in self._spellings.items() if spelt is not None}
        """By whether special tokens are skipped; none where a text is more than its tokens' bytes."""
        spells_all = self._tokenizer.normalizer is None or self._dropped_spaces is not None  # drops no character
        self._longest_token_bytes = self._longest() if spells_all and self.model_max_tokens else 0

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """`add_special_tokens` adds what the model puts around a text, such as a first token; most add nothing."""
        known = None if add_special_tokens or self._words is None else self._words.encode(text)
        if known is not None:
            return known
        if len(text) < LONG_CHARACTERS:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        else:  # without the place of each token in the text, in a third of the time
            ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def check_length(self, text: str, *, after_chars: int = 0) -> None:
        if self._longest_token_bytes:
            least = (after_chars + len(text)) // self._longest_token_bytes
            if least > self.model_max_tokens:
                raise PromptTooLong(least, 0, self.model_max_tokens, at_least=True)

    def _longest(self) -> int:
        return max((len(self.token_bytes(token)) for token in range(self.vocab_size)), default=0)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Bytes that are no text become U+FFFD; ids outside the vocabulary are left out."""
        if self._dropped_spaces is not None:
            return self._decode_pieces(token_ids, self._dropped_spaces, skip_special_tokens=skip_special_tokens)
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _decode_pieces(self, token_ids: list[int], dropped_spaces: int, *, skip_special_tokens: bool) -> str:
        """As `tokenizers` does, except among bytes that are no text.

        There it shows every byte of a run as U+FFFD, so one bad byte takes back characters that a reader has seen.
        """
        skipped = self._special_ids if skip_special_tokens else frozenset()
        shown = b"".join(self.token_bytes(token) for token in token_ids if token not in skipped)
        text = shown.decode("utf-8", "replace")
        leading = len(text) - len(text.lstrip(" "))
        return text[min(leading, dropped_spaces) :]

    def spelt(self, *, skip_special_tokens: bool = True) -> Callable[[int], bytes] | None:
        return self._spellings[skip_special_tokens]

    def _spelling(self, skipped: frozenset[int]) -> Callable[[int], bytes] | None:
        if type(self._tokenizer.decoder).__name__ != "ByteLevel":
            return None
        known: dict[int, bytes] = {}

        def spelt(token_id: int) -> bytes:
            found = known.get(token_id)
            if found is None:
                found = known[token_id] = b"" if token_id in skipped else self.token_bytes(token_id)
            return found

        return spelt

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "backslashreplace")

    def token_bytes(self, token_id: int) -> bytes:
        """An id outside the vocabulary stands for nothing."""
        if token_id in self._added:
            return self._added[token_id].encode()
        spelled = self._tokenizer.id_to_token(token_id)
        if spelled is None:
            return b""
        if self._byte_level:
            return bytes(_BYTES[character] for character in spelled if character in _BYTES)
        byte = _BYTE_TOKEN.fullmatch(spelled)
        return bytes.fromhex(byte[1]) if byte else spelled.replace(SPACE, " ").encode()

    def render_chat(self, call: ChatCall) -> str:
        if self._template is None:
            raise FieldInvalid("messages", "this model has no chat template; use /v1/completions")
        return self._template.render(call)

    @property
    def turns_ahead(self) -> int | None:
        return None if self._template is None or self._template.turns is None else self._template.turns.ahead

    @property
    def only_shown(self) -> bool:
        return self._template is not None and self._template.turns is not None and self._template.turns.only_shown

    def render_turns(self, call: ChatCall, begin: int) -> RenderedTurns | None:
        return None if self._template is None else self._template.render_turns(call, begin)

    def artifact_zip(self) -> bytes:
        """Zip tokenizer.json, tokenizer_config.json (with the chat template) and config.json; the same bytes always."""
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as file:  # stored: zlib's versions compress differently
            for name, content in sorted(hf_files(self._vocabulary).items()):
                file.writestr(zipfile.ZipInfo(name, _EPOCH), content)
        return archive.getvalue()


_BYTES = byte_characters()


def load_tokenizer(model: ModelFile) -> ModelTokenizer:
    """The tokenizer of a model file, or the tiny one. Raises `ModelMissing` and `ModelUnsupported`."""
    return ModelTokenizer(tiny_vocabulary() if model.path is None else read_vocabulary(model.path))


def tokenizer_from_zip(data: bytes) -> ModelTokenizer:
    """The tokenizer in an archive of Hugging Face files. Raises `FrameInvalid` for anything else."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            found = {Path(entry.filename).name: entry for entry in file.infolist() if not entry.is_dir()}
            chosen = {name: found[name] for name in _READ if name in found}
            if sum(entry.file_size for entry in chosen.values()) > ARCHIVE_LIMIT_BYTES:
                raise FrameInvalid("tokenizer archive", f"it unpacks to more than {ARCHIVE_LIMIT_BYTES} bytes")
            files = {name: file.read(entry) for name, entry in chosen.items()}
        return _built(files)
    except (zipfile.BadZipFile, ValueError, EOFError, RuntimeError, NotImplementedError) as error:
        raise FrameInvalid("tokenizer archive", str(error)) from error


def tokenizer_from_directory(path: Path) -> ModelTokenizer:
    """The tokenizer in a Hugging Face model directory. Raises `ModelMissing` with the reason, `ModelUnsupported`."""
    try:
        files = {name: (path / name).read_bytes() for name in _READ if (path / name).is_file()}
        return _built(files)
    except ValueError as error:
        raise ModelMissing(str(path), str(error)) from error
    except OSError as error:
        raise ModelMissing(str(path), error.strerror or str(error)) from error


_living: Final[WeakValueDictionary[bytes, ModelTokenizer]] = WeakValueDictionary()
"""By what the files say, whatever holds them: archives of the same files may differ in their dates."""


def _built(files: dict[str, bytes]) -> ModelTokenizer:
    """The same for the same files, as long as it lives."""
    said = sha256()
    for name in sorted(files):
        said.update(b"%d %b %d " % (len(name), name.encode(), len(files[name])) + files[name])
    made = _living.get(said.digest())
    if made is None:
        made = _living[said.digest()] = ModelTokenizer(from_hf_files(files))
    files.clear()
    give_back_freed_memory()
    return made
