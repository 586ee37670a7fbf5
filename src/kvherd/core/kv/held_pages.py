"""The pages that one cache holds, folded into blocks: each has credit while every page of it is on the device.

A page that is gone is remembered as long as pages behind it in its block are held: its return fills the hole at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvherd.core.ids import EngineHash, PrefixHash
from kvherd.core.kv.bigrams import next_token
from kvherd.core.kv.credits import Credits
from kvherd.core.kv.events import BlocksRemoved, BlocksStored, ExtraKey, Tier
from kvherd.core.kv.hashing import TOKEN_BYTES, Namer, token_bytes
from kvherd.core.kv.held_blocks import ONE_ON_DEVICE, Copies
from kvherd.core.kv.orphans import Orphan, Orphans
from kvherd.core.kv.page_runs import PageRun
from kvherd.core.kv.pages import FOLDED_BLOCK


@dataclass(frozen=True, slots=True)
class _Piece:
    """Pages that follow one another, the first after `parent`."""

    parent: EngineHash | None
    pages: tuple[EngineHash, ...]
    tokens: bytes
    extra_keys: tuple[tuple[ExtraKey, ...], ...]


@dataclass(slots=True)
class HeldPages:
    """Pages of one size that divides `FOLDED_BLOCK`. O(1) a page; a hole, and its return, O(the blocks it is in)."""

    namer: Namer
    credits: Credits
    page_bytes: int
    capped: bool = False
    _runs: dict[EngineHash, PageRun] = field(default_factory=dict)
    """Of every page that is held with a known place, and of those that are gone and remembered."""
    _orphans: Orphans = field(default_factory=Orphans)
    _copies: dict[EngineHash, Copies] = field(default_factory=dict)
    """Only of pages that are held otherwise than once, on the device."""

    def store(self, event: BlocksStored) -> None:
        pages, width = event.block_hashes, self.page_bytes
        tokens = token_bytes(event.token_ids)
        root = self.namer.root(event.lora, event.salt)
        capped = self.capped or event.may_repeat
        number, parent = 0, event.parent_hash
        while number < len(pages):
            fresh = self._fresh(pages, number, parent)
            end = number + max(1, fresh)
            piece = _Piece(
                parent, pages[number:end], tokens[number * width : end * width], event.extra_keys[number:end]
            )
            if not fresh:
                self._store_one(piece, event.tier, root, capped=capped)
            elif event.tier is Tier.DEVICE:
                self._append(piece, root, on_device=True)
            else:
                self._copies.update((page, {event.tier: 1}) for page in piece.pages)
                self._append(piece, root, on_device=False)
            number, parent = end, pages[end - 1]

    def remove(self, event: BlocksRemoved) -> None:
        """Pages that are not held are ignored: they were stored before anyone listened."""
        tier, runs = event.tier, self._runs
        for page in event.block_hashes:
            run = runs.get(page)
            if run is None:
                if page in self._orphans.by_hash:
                    self._remove_copy(page, None, tier)
            elif tier is Tier.DEVICE and page not in self._copies:
                offset = run.pages.index(page)
                self._leave_device(run, offset)
                if not run.on_device >> offset:
                    self._trim(run)
            else:
                self._remove_copy(page, run, tier)

    def cap(self) -> None:
        self.capped = True
        for page, copies in list(self._copies.items()):
            self._set_copies(page, self._runs.get(page), dict.fromkeys(copies, 1))

    def release(self) -> None:
        """Take back the credit of every folded block."""
        for run in set(self._runs.values()):
            self._discredit(run)

    def beyond_device(self) -> bool:
        """Whether anything is held in another tier too, or only there."""
        return any(tier is not Tier.DEVICE for copies in self._copies.values() for tier in copies)

    def contents(self) -> dict[EngineHash, Copies]:
        """Every page held, its place known or not, and its copies."""
        held = {page: self._copies_of(page, self._runs.get(page)) for page in (*self._runs, *self._orphans.by_hash)}
        return {page: copies for page, copies in held.items() if copies}

    # --- places -------------------------------------------------------------------------------------------

    def _fresh(self, pages: Sequence[EngineHash], number: int, parent: EngineHash | None) -> int:
        """How many pages from `number` on are new, go into one run, and have nothing waiting for them."""
        place = 0
        if parent is not None:
            run = self._runs.get(parent)
            if run is None:
                return 0
            place = run.place_after(parent) % self._in_block
        fresh = pages[number : number + self._in_block - place]
        for known in (self._runs, self._orphans.by_hash, self._orphans.by_parent):
            if known and not known.keys().isdisjoint(fresh):
                fresh = fresh[: next(place for place, page in enumerate(fresh) if page in known)]
        return len(fresh) if len(set(fresh)) == len(fresh) else 1

    def _append(self, piece: _Piece, root: PrefixHash, *, on_device: bool) -> None:
        """Give new pages their place, which is within one block."""
        run = self._run_after(piece.parent, root)
        number, first = run.end, len(run.pages)
        run.pages += piece.pages
        run.tokens += piece.tokens
        for page in piece.pages:
            self._runs[page] = run
        if on_device:
            run.on_device |= ((1 << len(piece.pages)) - 1) << first
        if any(piece.extra_keys):
            run.extra_keys = run.extra_keys or {}
            run.extra_keys.update((number + more, keys) for more, keys in enumerate(piece.extra_keys) if keys)
        if run.end == self._in_block:
            tokens = run.way_tokens(self.page_bytes)
            (run.name,) = self.namer.hasher.extend(run.before, tokens, len(tokens), self._folded_keys(run, tokens))
            self._credit(run)

    def _run_after(self, parent: EngineHash | None, root: PrefixHash) -> PageRun:
        """The run that a new child of `parent` goes into."""
        if parent is None:
            return PageRun(root)
        run = self._runs[parent]
        place = run.place_after(parent)
        if place < run.end:
            return run.branch(place)
        return run if run.name is None else PageRun(run.name)

    def _folded_keys(self, run: PageRun, tokens: bytes) -> list[tuple[ExtraKey, ...]]:
        """What entered the hashes of the block's pages, less the next tokens that the pages behind them have anyway."""
        folded: list[ExtraKey] = []
        for number, keys in run.way_extra_keys():
            start = (number + 1) * self.page_bytes
            following = int.from_bytes(tokens[start : start + TOKEN_BYTES], "little") if start < len(tokens) else None
            folded += [key for key in keys if following is None or next_token((key,)) != following]
        return [tuple(folded)] if folded else []

    def _trim(self, run: PageRun) -> None:
        """Forget the pages at the end that are gone, as far as nothing hangs from them."""
        keep = run.on_device.bit_length()
        if run.branches:
            keep = max(keep, max(run.branches) - run.at)
        if self._copies:
            keep = max([keep, *(offset + 1 for offset, page in enumerate(run.pages) if page in self._copies)])
        if keep == len(run.pages):
            return
        for page in run.pages[keep:]:
            del self._runs[page]
        del run.pages[keep:]
        run.tokens = run.tokens[: keep * self.page_bytes]
        run.name = None
        if run.extra_keys:
            run.extra_keys = {number: keys for number, keys in run.extra_keys.items() if number < run.end}
        if not keep and run.up is not None:
            run.cut()
            self._trim(run.up)

    # --- copies -------------------------------------------------------------------------------------------

    def _store_one(self, piece: _Piece, tier: Tier, root: PrefixHash, *, capped: bool) -> None:
        """Store one page that is known, or waited for, or whose parent is not known."""
        (page,) = piece.pages
        run = self._runs.get(page)
        copies = self._copies_of(page, run)
        had = copies.get(tier, 0)
        copies[tier] = max(had, 1) if capped else had + 1
        if run is not None or (page in self._orphans.by_hash and piece.parent not in self._runs):
            self._set_copies(page, run, copies)
        elif piece.parent is None or piece.parent in self._runs:
            if page in self._orphans.by_hash:
                self._orphans.pop(page)
            self._set_copies(page, None, copies)
            self._append(piece, root, on_device=Tier.DEVICE in copies)
            self._adopt(page, root)
        else:
            keys = piece.extra_keys[0] if piece.extra_keys else ()
            self._orphans.add(page, Orphan(piece.parent, piece.tokens, keys))
            self._set_copies(page, None, copies)

    def _adopt(self, page: EngineHash, root: PrefixHash) -> None:
        """Give the orphans behind a page that has just got its place theirs."""
        placed = [page]
        while placed:
            parent = placed.pop()
            for child in self._orphans.children(parent):
                orphan = self._orphans.pop(child)
                on_device = Tier.DEVICE in self._copies.get(child, ONE_ON_DEVICE)
                self._append(_Piece(parent, (child,), orphan.tokens, (orphan.extra_keys,)), root, on_device=on_device)
                placed.append(child)

    def _copies_of(self, page: EngineHash, run: PageRun | None) -> Copies:
        held = self._copies.get(page)
        if held is not None:
            return dict(held)
        there = page in self._orphans.by_hash if run is None else run.on_device >> run.pages.index(page) & 1
        return dict(ONE_ON_DEVICE) if there else {}

    def _remove_copy(self, page: EngineHash, run: PageRun | None, tier: Tier) -> None:
        copies = self._copies_of(page, run)
        had = copies.pop(tier, 0)
        if had > 1:
            copies[tier] = had - 1
        if had:
            self._set_copies(page, run, copies)
        if not copies and run is not None:
            self._trim(run)
        elif not copies:
            self._orphans.pop(page)

    def _set_copies(self, page: EngineHash, run: PageRun | None, copies: Copies) -> None:
        if copies and copies != ONE_ON_DEVICE:
            self._copies[page] = copies
        else:
            self._copies.pop(page, None)
        if run is None:
            return
        offset = run.pages.index(page)
        if Tier.DEVICE not in copies:
            self._leave_device(run, offset)
        elif not run.on_device >> offset & 1:
            run.on_device |= 1 << offset
            for one in run.behind(run.at + offset):
                self._credit(one)

    def _leave_device(self, run: PageRun, offset: int) -> None:
        if run.on_device >> offset & 1:
            run.on_device ^= 1 << offset
            for one in run.behind(run.at + offset) if run.branches else (run,):
                self._discredit(one)

    def _credit(self, run: PageRun) -> None:
        if run.name is not None and not run.credited and run.whole:
            run.credited = True
            self.credits.give(run.name)

    def _discredit(self, run: PageRun) -> None:
        if run.credited:
            assert run.name is not None
            run.credited = False
            self.credits.take(run.name)

    @property
    def _in_block(self) -> int:
        return FOLDED_BLOCK * TOKEN_BYTES // self.page_bytes
