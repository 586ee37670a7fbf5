"""Consecutive pages of one folded block, as a tree: chains part at any page.

A run that does not begin its block hangs from the page that it follows. So a folded block is a run that reaches the
block's end together with the runs above it, and it is whole while every page on that way is on the device.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvherd.core.ids import EngineHash, PrefixHash
from kvherd.core.kv.events import ExtraKey


@dataclass(slots=True, eq=False)
class PageRun:
    """`before` is the name of the block before, or of the root. The first page is the block's page number `at`."""

    before: PrefixHash
    up: "PageRun | None" = None
    """Where the pages before `at` are, if there are any."""
    at: int = 0
    pages: list[EngineHash] = field(default_factory=list)
    tokens: bytes = b""
    on_device: int = 0
    """A bit a page."""
    name: PrefixHash | None = None
    """Of the folded block, if the run reaches its end."""
    credited: bool = False
    extra_keys: dict[int, tuple[ExtraKey, ...]] | None = None
    """By the page's number in the block; only of pages that have any."""
    branches: dict[int, dict["PageRun", None]] | None = None
    """The runs that hang from pages of this one, by their `at`."""

    @property
    def end(self) -> int:
        return self.at + len(self.pages)

    @property
    def whole(self) -> bool:
        """Every page from the block's first to this run's last is on the device."""
        run, end = self, self.end
        while not ~run.on_device & ((1 << end - run.at) - 1):
            if run.up is None:
                return True
            run, end = run.up, run.at
        return False

    def place_after(self, page: EngineHash) -> int:
        """The number in the block of what follows `page`."""
        return self.end if self.pages[-1] == page else self.at + self.pages.index(page) + 1

    def branch(self, at: int) -> "PageRun":
        """A new run that hangs from the page before number `at`."""
        made = PageRun(self.before, self, at)
        if self.branches is None:
            self.branches = {}
        self.branches.setdefault(at, {})[made] = None
        return made

    def cut(self) -> None:
        """Leave the run that this one hangs from."""
        if self.up is not None and self.up.branches is not None:
            others = self.up.branches[self.at]
            del others[self]
            if not others:
                del self.up.branches[self.at]

    def behind(self, number: int) -> Iterator["PageRun"]:
        """This run and all whose way leads through the block's page `number`, a page of this run."""
        yield self
        if self.branches:
            for at, branches in self.branches.items():
                if at > number:
                    for branch in branches:
                        yield from branch.behind(-1)

    def way_tokens(self, page_bytes: int) -> bytes:
        """The tokens from the block's first page to this run's last."""
        run, tokens = self, self.tokens
        while run.up is not None:
            tokens = run.up.tokens[: (run.at - run.up.at) * page_bytes] + tokens
            run = run.up
        return tokens

    def way_extra_keys(self) -> list[tuple[int, tuple[ExtraKey, ...]]]:
        """The extra keys from the block's first page to this run's last, with the pages' numbers."""
        found: list[tuple[int, tuple[ExtraKey, ...]]] = []
        run, end = self, self.end
        while True:
            if run.extra_keys:
                found += [(number, keys) for number, keys in run.extra_keys.items() if number < end]
            if run.up is None:
                return sorted(found, key=lambda one: one[0])
            run, end = run.up, run.at
