"""How a draft tree is built and how much of it is verified: one typed field per knob."""

import itertools
from dataclasses import dataclass, field

from treegraft.errors import UserError


@dataclass(frozen=True)
class NgramSettings:
    """The light drafter's limits."""

    max_match: int = 4
    """Longest suffix of context + path that is looked up, in tokens."""
    branches: int = 2
    """Different continuations proposed at a node."""
    recycled: int = 4
    """The target's own likeliest tokens that are kept for every committed position and proposed there again."""
    path: int = 4
    """Tokens by which one skip may prolong the best continuation of a frontier node."""

    def __post_init__(self) -> None:
        for name in ("max_match", "branches", "path"):
            if getattr(self, name) < 1:
                raise UserError(f"decoding.ngram.{name} is {getattr(self, name)}; it must be at least 1.")
        if self.recycled < 0:
            raise UserError(f"decoding.ngram.recycled is {self.recycled}; it must be at least 0.")


@dataclass(frozen=True)
class DraftSettings:
    """One pair's drafting limits; the paper publishes depth 5, width 10, look_back 5 and 63 verified nodes."""

    depth: int = 4
    """D: layers, that is decisions, in one decoding step."""
    width: int = 4
    """k: nodes in a frontier, and children a drafter model proposes for each of them."""
    look_back: int = 4
    """L: a call reselects its frontier among the nodes of the last L layers."""
    verified_sizes: tuple[int, ...] = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    """The numbers of nodes (root not counted) that verification may choose from; 0 is plain decoding."""
    ngram: NgramSettings = field(default_factory=NgramSettings)

    def __post_init__(self) -> None:
        for name in ("depth", "width", "look_back"):
            if getattr(self, name) < 1:
                raise UserError(f"decoding.{name} is {getattr(self, name)}; it must be at least 1.")
        sizes = self.verified_sizes
        if not sizes or sizes[0] < 0 or any(a >= b for a, b in itertools.pairwise(sizes)):
            raise UserError(f"decoding.verified_sizes is {list(sizes)}; it must be a rising list of numbers >= 0.")
