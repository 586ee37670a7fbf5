"""Small pages folded into blocks: against what that must mean, written down the slow way, and against a real cache."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvherd.core.ids import EngineHash, PrefixHash, Rank, WorkerId
from kvherd.core.kv.bigrams import bigram_key, bigram_keys
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, Tier
from kvherd.core.kv.hashing import TOKEN_BYTES, PrefixHasher, token_bytes
from kvherd.core.kv.held_pages import HeldPages
from kvherd.core.kv.history import RankHistory
from kvherd.core.kv.index import Holder, PrefixIndex
from kvherd.core.kv.pages import folded_block
from kvherd.testing.recordings import read_recording
from kvherd.wire.vllm_kv import KvDecoder

ANN, BOB = Holder(WorkerId("ann"), Rank(0)), Holder(WorkerId("bob"), Rank(0))
HASHER = PrefixHasher(b"a key for tests")
FIXTURES = Path(__file__).parents[2] / "fixtures" / "sglang-0.5.23-radix"


@dataclass(frozen=True)
class Prompt:
    """A prompt of an engine: its tokens and the namespace it is in."""

    tokens: tuple[int, ...]
    salt: str | None = None
    lora: str | None = None


@dataclass(frozen=True)
class Engine:
    """How an engine cuts prompts into pages, and what it says of them."""

    size: int
    bigrams: bool = False

    def pages(self, prompt: Prompt) -> int:
        return (len(prompt.tokens) - self.bigrams) // self.size

    def hash_of(self, prompt: Prompt, page: int) -> EngineHash:
        before = prompt.tokens[: (page + 1) * self.size + self.bigrams]
        return EngineHash(hash((self.size, before, prompt.salt, prompt.lora)) % 2**64)

    def stored(self, prompt: Prompt, start: int, end: int, tier: Tier = Tier.DEVICE) -> BlocksStored:
        nexts = ((bigram_key(prompt.tokens[(page + 1) * self.size]),) for page in range(start, end) if self.bigrams)
        return BlocksStored(
            tuple(self.hash_of(prompt, page) for page in range(start, end)),
            self.hash_of(prompt, start - 1) if start else None,
            prompt.tokens[start * self.size : end * self.size],
            self.size,
            tier,
            prompt.lora,
            prompt.salt,
            tuple(nexts),
        )

    def removed(self, prompt: Prompt, *pages: int, tier: Tier = Tier.DEVICE) -> BlocksRemoved:
        return BlocksRemoved(tuple(self.hash_of(prompt, page) for page in pages), tier)

    def chain(self, prompt: Prompt) -> list[PrefixHash]:
        block = folded_block(self.size)
        root = HASHER.root(model="m", block_size=block, lora=prompt.lora, salt=prompt.salt)
        tokens, keys = token_bytes(prompt.tokens), bigram_keys(prompt.tokens, block)
        if self.bigrams:
            return HASHER.extend(root, tokens[: len(keys) * block * TOKEN_BYTES], block * TOKEN_BYTES, keys)
        return HASHER.extend(root, tokens, block * TOKEN_BYTES)


PAGED, PAIRED = Engine(1), Engine(1, bigrams=True)
LONG = Prompt(tuple(range(100, 150)))
FORKED = Prompt((*range(100, 120), *range(500, 530)))


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex(HASHER)
    index.enrol(ANN.worker, model="m")
    index.enrol(BOB.worker, model="m")
    return index


def blocks(index: PrefixIndex, prompt: Prompt, engine: Engine = PAGED) -> int:
    return index.match(engine.chain(prompt)).get(ANN, 0)


def test_sixteen_pages_are_a_block_and_fewer_are_none(index: PrefixIndex) -> None:
    index.apply_events(ANN, [PAGED.stored(LONG, 0, 15)])
    assert blocks(index, LONG) == 0
    index.apply_events(ANN, [PAGED.stored(LONG, 15, 16)])
    assert blocks(index, LONG) == 1
    index.apply_events(ANN, [PAGED.stored(LONG, 16, 40)])
    assert (blocks(index, LONG), index.blocks(ANN)) == (2, 2)


def test_pages_and_blocks_of_the_same_prompt_have_the_same_names(index: PrefixIndex) -> None:
    index.apply_events(ANN, [PAGED.stored(LONG, 0, 50)])
    index.apply_events(BOB, [Engine(16).stored(LONG, 0, 3)])
    assert index.match(PAGED.chain(LONG)) == {ANN: 3, BOB: 3}
    assert len(index) == 3


def test_a_page_in_the_middle_hides_the_rest_until_it_returns(index: PrefixIndex) -> None:
    index.apply_events(ANN, [PAGED.stored(LONG, 0, 50), PAGED.removed(LONG, 20)])
    assert blocks(index, LONG) == 1
    index.apply_events(ANN, [PAGED.stored(LONG, 20, 21)])
    assert blocks(index, LONG) == 3


def test_pages_without_a_known_parent_wait_without_credit(index: PrefixIndex) -> None:
    index.apply_events(ANN, [PAGED.stored(LONG, 5, 50), PAGED.removed(LONG, 30)])
    assert (blocks(index, LONG), index.blocks(ANN)) == (0, 0)
    index.apply_events(ANN, [PAGED.stored(LONG, 0, 5)])
    assert blocks(index, LONG) == 1
    index.apply_events(ANN, [PAGED.stored(LONG, 30, 31)])
    assert blocks(index, LONG) == 3


def test_chains_part_within_a_block(index: PrefixIndex) -> None:
    index.apply_events(ANN, [PAGED.stored(LONG, 0, 50), PAGED.stored(FORKED, 20, 50)])
    assert (blocks(index, LONG), blocks(index, FORKED), index.blocks(ANN)) == (3, 3, 5)
    index.apply_events(ANN, [PAGED.removed(LONG, *range(20, 50))])
    assert (blocks(index, LONG), blocks(index, FORKED)) == (1, 3)
    index.apply_events(ANN, [PAGED.removed(LONG, 17)])
    assert blocks(index, FORKED) == 1
    index.apply_events(ANN, [PAGED.stored(LONG, 17, 18)])
    assert blocks(index, FORKED) == 3


def test_pairs_count_as_far_as_the_next_tokens_agree(index: PrefixIndex) -> None:
    index.apply_events(ANN, [PAIRED.stored(LONG, 0, 49)])
    assert index.bigrams(ANN.worker)
    assert not index.bigrams(BOB.worker)
    assert blocks(index, LONG, PAIRED) == 3
    other = Prompt((*LONG.tokens[:32], 7, *LONG.tokens[33:]))
    assert blocks(index, other, PAIRED) == 1, "its 32nd token is followed by another one"
    assert blocks(index, LONG, PAGED) == 0, "a chain without pairs has other names"
    index.apply_events(ANN, [CacheCleared(), PAGED.stored(LONG, 0, 50)])
    assert not index.bigrams(ANN.worker), "it may be another engine by now"
    assert blocks(index, LONG, PAGED) == 3


def test_pairs_that_contradict_the_pages_behind_them_earn_nothing(index: PrefixIndex) -> None:
    store = PAIRED.stored(LONG, 0, 16)
    wrong = (*store.extra_keys[:3], (bigram_key(9),), *store.extra_keys[4:])
    index.apply_events(ANN, [BlocksStored(store.block_hashes, None, store.token_ids, 1, extra_keys=wrong)])
    assert blocks(index, LONG, PAIRED) == 0


def test_pages_of_another_size_in_one_life_do_not_join_chains(index: PrefixIndex) -> None:
    four, plain = Engine(4), PAGED.stored(LONG, 0, 16)
    joined = BlocksStored((EngineHash(5),), plain.block_hashes[-1], LONG.tokens[16:32], 16)
    index.apply_events(ANN, [plain, joined])
    assert blocks(index, LONG) == 1
    index.apply_events(ANN, [four.stored(LONG, 0, 12), PAGED.removed(LONG, 0)])
    assert blocks(index, LONG) == 3
    assert len(index.contents(ANN)) == 16 - 1 + 1 + 12


def test_a_page_told_twice_in_one_store_is_a_copy_of_itself(index: PrefixIndex) -> None:
    page = EngineHash(7)
    index.apply_events(ANN, [BlocksStored((page, page), EngineHash(6), (1, 2), 1)])
    assert index.contents(ANN) == {page: {Tier.DEVICE: 2}}
    index.apply_events(ANN, [BlocksRemoved((page, page))])
    assert index.contents(ANN) == {}


# --- any history ----------------------------------------------------------------------------------------


@dataclass
class SlowPages:
    """What the index must mean: copies of each page, looked at one by one."""

    engine: Engine
    copies: Counter[tuple[EngineHash, Tier]] = field(default_factory=Counter)
    capped: bool = False

    def blocks(self, prompt: Prompt) -> int:
        held = 0
        while held < self.engine.pages(prompt) and self.copies[self.engine.hash_of(prompt, held), Tier.DEVICE]:
            held += 1
        return held * self.engine.size // folded_block(self.engine.size)

    def contents(self) -> dict[EngineHash, dict[Tier, int]]:
        found: dict[EngineHash, dict[Tier, int]] = {}
        for (page, tier), count in self.copies.items():
            if count:
                found.setdefault(page, {})[tier] = count
        return found

    def apply(self, event: KvEvent) -> None:
        match event:
            case BlocksStored():
                for page in event.block_hashes:
                    had = self.copies[page, event.tier]
                    # A store from the root may tell of copies again that were told.
                    self.copies[page, event.tier] = max(1, had) if self.capped or event.parent_hash is None else had + 1
            case BlocksRemoved():
                for page in event.block_hashes:
                    self.copies[page, event.tier] = max(0, self.copies[page, event.tier] - 1)
            case CacheCleared():
                self.copies.clear()
                self.capped = False

    def cap(self) -> None:
        self.capped = True
        self.copies = Counter({one: 1 for one, count in self.copies.items() if count})


LENGTH = 36
ENGINES = [Engine(1), Engine(1), Engine(2), Engine(4), Engine(8), Engine(1, True), Engine(4, True), Engine(16, True)]


def make_prompts(dice: Random) -> list[Prompt]:
    """A few prompts that part from one another at any token, mostly of one namespace."""
    made = [Prompt(tuple(range(LENGTH)))]
    for number in range(dice.randint(1, 4)):
        before, place = dice.choice(made), dice.randrange(LENGTH)
        fresh = range(1000 * (number + 1) + place, 1000 * (number + 1) + LENGTH)
        salt, lora = dice.choice([(before.salt, before.lora)] * 6 + [("s", None), (None, "l"), ("s", "l")])
        made.append(Prompt((*before.tokens[:place], *fresh), salt, lora))
    return made


def make_event(dice: Random, engine: Engine, known: Sequence[Prompt]) -> KvEvent:
    """Runs begin and end anywhere, but mostly where prompts part: that is where it is easy to be wrong."""
    prompt, other = dice.choice(known), dice.choice(known)
    pages = engine.pages(prompt)
    parting = next((n for n in range(pages) if engine.hash_of(prompt, n) != engine.hash_of(other, n)), pages)
    places = [0, pages, parting, min(parting + 1, pages), max(parting - 1, 0), dice.randint(0, pages)]
    start, end = sorted((dice.choice(places), dice.choice(places)))
    one, tier = min(start, pages - 1), dice.choice([Tier.DEVICE] * 7 + [Tier.HOST])
    match dice.choice(["store", "store all", "remove", "remove backwards", "one", "one back"] * 5 + ["clear"]):
        case "store":
            return engine.stored(prompt, start, end, tier)
        case "store all":
            return engine.stored(prompt, 0, pages, tier)
        case "remove":
            return engine.removed(prompt, *range(start, end), tier=tier)
        case "remove backwards":
            return engine.removed(prompt, *reversed(range(start, end)), tier=tier)
        case "one":
            return engine.removed(prompt, one, tier=tier)
        case "one back":
            return engine.stored(prompt, one, one + 1, tier)
        case _:
            return CacheCleared()


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_history_gives_what_the_slow_index_gives(dice: Random) -> None:
    live(dice)


@pytest.mark.parametrize("seed", range(10))
def test_so_do_many_long_ones(seed: int) -> None:
    dice = Random(seed)
    for _ in range(60):
        live(dice)


def live(dice: Random) -> None:
    known = make_prompts(dice)
    engines = {ANN: dice.choice(ENGINES), BOB: dice.choice([*ENGINES, Engine(16), Engine(3)])}
    index, slow = PrefixIndex(HASHER), {holder: SlowPages(engine) for holder, engine in engines.items()}
    for holder in slow:
        index.enrol(holder.worker, model="m")
    chains = {(holder, prompt): engine.chain(prompt) for holder, engine in engines.items() for prompt in known}
    past = {holder: RankHistory(holder.rank, 2**32) for holder in engines}
    capped = False
    for _ in range(dice.randint(1, 40)):
        holder = dice.choice([ANN, ANN, BOB])
        if dice.random() < 0.02:
            index.cap_copies(holder)
            slow[holder].cap()
            capped = True
        event = make_event(dice, engines[holder], known)
        index.apply_events(holder, [event])
        slow[holder].apply(event)
        past[holder].append(0.0, [event])
        for (looked, prompt), chain in chains.items():
            assert index.match(chain).get(looked, 0) == slow[looked].blocks(prompt)
    for holder, truth in slow.items():
        assert index.contents(holder) == truth.contents()
        if not capped:
            late = told_late(holder, past[holder])
            assert late.contents(holder) == truth.contents()
            for prompt in known:
                assert late.match(chains[holder, prompt]) == ({holder: n} if (n := truth.blocks(prompt)) else {})
        empty(index, holder)
        assert (index.contents(holder), index.blocks(holder), list(remembered(index, holder))) == ({}, 0, [])
    assert len(index) == 0


def told_late(holder: Holder, past: RankHistory) -> PrefixIndex:
    """An index that was told by a snapshot."""
    index = PrefixIndex(HASHER)
    index.enrol(holder.worker, model="m")
    for chunk in past.snapshot():
        index.apply(holder, chunk.batch)
    return index


def empty(index: PrefixIndex, holder: Holder) -> None:
    """Remove every copy of every page, one by one."""
    for block, copies in index.contents(holder).items():
        index.apply_events(
            holder, [BlocksRemoved((block,), tier) for tier, count in copies.items() for _ in range(count)]
        )


def remembered(index: PrefixIndex, holder: Holder) -> Iterator[object]:
    """What is kept of a cache that holds nothing."""
    for holding in index._holdings[holder.worker].values():
        yield from holding.credits.twins
        for held in holding._sizes.values():
            yield from (*held._orphans.by_hash, *held._orphans.by_parent, *held._copies)
            yield from held._runs if isinstance(held, HeldPages) else held._names


@pytest.mark.parametrize("name", ["pages", "pages4", "bigrams", "bigrams4"])
def test_a_radix_cache_s_own_matches_are_predicted_exactly(name: str) -> None:
    index, decoder = PrefixIndex(HASHER), KvDecoder()
    index.enrol(ANN.worker, model="m")
    engine = Engine(4 if "4" in name else 1, bigrams=name.startswith("bigrams"))
    messages = list(read_recording(FIXTURES / f"{name}.bin"))
    hits = 0
    for line in (FIXTURES / f"{name}_truth.jsonl").read_text().splitlines():
        asked = json.loads(line)
        while messages and messages[0].sequence < asked["batches"]:
            index.apply_events(ANN, decoder.decode(messages.pop(0).payload).events)
        prompt = Prompt(tuple(asked["prompt"]), asked["salt"])
        assert blocks(index, prompt, engine) == asked["held"] // 16
        hits += asked["held"] >= 16
    assert hits >= 16
