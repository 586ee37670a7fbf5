"""What engines tell of an answer's cost, as they write it."""

import msgspec

from kvherd.ports.completions import Usage


class _Tiers(msgspec.Struct):
    """As SGLang tells them; `storage` only where there is a store."""

    host: int = 0
    storage: int | None = None

    @property
    def told(self) -> tuple[int, int]:
        return self.host, self.storage or 0


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None
    image_tokens: int | None = None
    audio_tokens: int | None = None
    video_tokens: int | None = None
    cached_tokens_details: _Tiers | None = None

    @property
    def told(self) -> int | None:
        """SGLang that was not told to report has a 0 beside its counts of media."""
        media = self.image_tokens or self.audio_tokens or self.video_tokens
        return self.cached_tokens or (None if media else self.cached_tokens)


class _UsageObject(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _MetaInfo(msgspec.Struct):
    """SGLang tells the cached tokens here whether or not it was told to report them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cached_tokens_details: _Tiers | None = None

    def usage(self) -> Usage | None:
        if self.prompt_tokens is None:
            return None
        tiers = self.cached_tokens_details.told if self.cached_tokens_details else ()
        return Usage(self.prompt_tokens, self.cached_tokens, self.completion_tokens or 0, *tiers)


class ToldAnswer(msgspec.Struct):
    usage: _UsageObject | None = None
    meta_info: _MetaInfo | None = None
    index: int | None = None
    """Of several answers in one stream, each tells of itself alone."""


read_told = msgspec.json.Decoder(ToldAnswer).decode
"""Raises what msgspec raises for what is not as engines tell it."""
