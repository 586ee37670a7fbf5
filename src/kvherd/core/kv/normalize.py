"""What engines' dialects have in common, once: tiers, cache groups, and where a salt hides.

vLLM publishes what entered a block's hash beside its tokens as untagged `extra_keys`: the LoRA name on every block, the
cache salt on the first block of a prompt only, multimodal items, digests. SGLang publishes LoRA and salt by name. Here
both become the same: `lora` and `salt` by name, `extra_keys` with the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvherd.core.kv.events import ExtraKey, Tier

_TIERS: dict[str | None, Tier] = {
    None: Tier.DEVICE,
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "DISK": Tier.DISK,
    "STORAGE": Tier.DISK,
    "EXTERNAL": Tier.EXTERNAL,
}
_MEDIA = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "STORAGE", Tier.EXTERNAL: "EXTERNAL"}

FULL_ATTENTION_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of cache group whose blocks speak for a prefix; a sliding window's or a state's do not."""


def tier_of(medium: str | None) -> Tier:
    """The tier an engine means. One that we do not know is external, the tier that is given no credit."""
    return _TIERS.get(medium) or _TIERS.get((medium or "").upper(), Tier.EXTERNAL)


def medium_of(tier: Tier) -> str:
    """vLLM's word for a tier."""
    return _MEDIA[tier]


@dataclass(frozen=True, slots=True)
class Namespace:
    """The adapter and salt that a run of blocks was computed under, and what else entered each block's hash."""

    lora: str | None
    salt: str | None
    extra_keys: tuple[tuple[ExtraKey, ...], ...]


def namespace(
    extra_keys: Sequence[Sequence[ExtraKey]],
    *,
    lora: str | None,
    salt: str | None,
    at_root: bool,
) -> Namespace:
    """Take the LoRA name and the salt out of `extra_keys`.

    Texts that cannot be told apart stay where they are: such blocks have a name that no request asks for, so they get
    no credit rather than a wrong one.
    """
    rest = [_without(keys, lora) for keys in extra_keys]
    if rest and at_root:
        texts = [key for key in rest[0] if isinstance(key, str)]
        if salt is None and len(texts) == 1:
            salt = texts[0]
        rest[0] = _without(rest[0], salt)
    return Namespace(lora, salt, tuple(rest) if any(rest) else ())


def _without(keys: Sequence[ExtraKey], text: str | None) -> tuple[ExtraKey, ...]:
    """`keys` less the first that equals `text`: an adapter and a salt may have the same name."""
    kept = list(keys)
    if text is not None and text in kept:
        kept.remove(text)
    return tuple(kept)


@dataclass(slots=True)
class CacheGroups:
    """Which cache groups of a hybrid model speak for prefixes, learned from what they store.

    A removal names its group but not its kind. It is left out only if the group is known not to count: removing too
    much costs credit, removing too little would give wrong credit. Where several groups of full attention keep the
    same tokens, each under the same hash, a prefix is reused only if all do: the first to store speaks for all, and
    what any of them removes is gone.
    """

    _left_out: set[int] = field(default_factory=set)
    _speaker: int | None = None

    def stored(self, group: int | None, kind: str | None) -> bool | None:
        """Whether a store counts; None if that cannot be told."""
        if group in self._left_out:
            return False
        if kind is None and group:
            return None
        if kind is None or kind in FULL_ATTENTION_KINDS:
            self._speaker = group if self._speaker is None else self._speaker
            return group is None or group == self._speaker
        if group is not None:
            self._left_out.add(group)
        return False

    def removed(self, group: int | None) -> bool:
        return group not in self._left_out
