"""The light drafter: what followed the longest suffix that occurred before in the same request.

Two kinds of continuation, both free: the literal token behind an earlier occurrence, and the tokens that the target
itself found likely there when it verified that place (recycled, after Luo et al. 2024, arXiv:2408.08696).
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from treegraft.grafting import advance
from treegraft.settings import DraftSettings, NgramSettings
from treegraft.tree import DraftTree, IntArray

SCANNED_OCCURRENCES = 32  # newest occurrences of a suffix that are looked at; older ones hardly change the ranking
HITS_MOVING, HITS_START = 0.1, 0.5  # weight of the newest token in the moving share of foreseen ones; its start
RUNS = (0, 2, 4, 8, 16)  # tokens by which a full match goes on backwards, where a row of the table begins
TABLE_WEIGHT = 30.0  # observations of this request that weigh as much as the calibrated table


class Continuation(NamedTuple):
    """A token that may follow, with what its chance depends on."""

    token: int
    row: int
    """Row of the table: by the length of the suffix that occurred before (see ``table_shape``)."""
    rank: int
    """Its place among the literal continuations, from 0; recycled ones are counted from ``branches`` on."""


def table_shape(settings: NgramSettings) -> tuple[int, int]:
    """Rows and columns of a table of chances.

    Row n - 1 is for a match of n < max_match tokens; the last rows are for matches of max_match tokens that go on
    backwards for at least 0, 2, 4, 8 and 16 more (``RUNS``): text that is being copied is likely copied further.
    Columns are ranks: ``branches`` literal ones, then ``recycled``.
    """
    return settings.max_match - 1 + len(RUNS), settings.branches + settings.recycled


def prior_table(settings: NgramSettings) -> NDArray[np.float64]:
    """Chances before anything was measured, of ``table_shape``; replaced by ``values.calibration``.

    Half for a full match, more where it goes on, falling with a shorter match and a later rank.
    """
    short = 0.5 * np.arange(1, settings.max_match) / settings.max_match
    base = np.concatenate([short, np.linspace(0.5, 0.9, len(RUNS))])[:, None]
    literal = 1 / np.arange(1, settings.branches + 1) ** 2
    recycled = 0.2 / np.arange(1, settings.recycled + 1)
    return base * np.concatenate([literal, recycled])


class NgramCounts:
    """Hits and trials of continuations, of ``table_shape`` each."""

    def __init__(self, settings: NgramSettings) -> None:
        self.hits = np.zeros(table_shape(settings))
        self.trials = np.zeros(table_shape(settings))

    def add(self, found: Sequence[Continuation], token: int) -> None:
        """``token`` came where ``found`` had been proposed."""
        for following, row, rank in found:
            self.trials[row, rank] += 1
            self.hits[row, rank] += following == token

    def table(self, prior: NDArray[np.float64], weight: float) -> NDArray[np.float64]:
        """Chances after these observations, with a Beta prior of mean ``prior`` worth ``weight`` observations."""
        chances: NDArray[np.float64] = (self.hits + weight * prior) / (self.trials + weight)
        return chances


class NgramIndex:
    """Where each n-gram (1 .. max_match tokens) of a text ends, updated as tokens are appended.

    The cost of ``append`` and of ``continuations`` does not grow with the text.
    """

    def __init__(self, settings: NgramSettings) -> None:
        self.settings = settings
        self.tokens: list[int] = []
        self.alternatives: list[list[int]] = []  # of each token: what the target found likely in its place
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def append(self, tokens: list[int], alternatives: list[list[int]] | None = None) -> None:
        """Add tokens; alternatives: of each the target's likeliest tokens in its place, best first, where known."""
        self.alternatives += [[]] * len(tokens) if alternatives is None else alternatives
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for n in range(1, min(self.settings.max_match, end) + 1):
                self._ends.setdefault(tuple(self.tokens[end - n : end]), []).append(end)

    @property
    def reach(self) -> int:
        """Tokens of a suffix that can matter."""
        return self.settings.max_match + RUNS[-1]

    def continuations(self, suffix: list[int], limit: int, best_only: bool = False) -> list[Continuation]:
        """Different tokens that may follow ``suffix``: longest match first, then newest first.

        Up to ``branches`` literal continuations come first, then up to ``recycled`` of the target's.

        Args:
            suffix: the last tokens of context + path, ``reach`` of them or all there are; the newest is last.
            limit: the text's first ``limit`` tokens are known (the value system asks about earlier positions).
            best_only: stop at the first literal continuation.
        """
        settings = self.settings
        found: list[Continuation] = []
        seen: set[int] = set()
        places: list[tuple[int, int]] = []  # (place behind an occurrence, row) in order of preference
        count = 1 if best_only else settings.branches
        for n in range(min(settings.max_match, len(suffix)), 0, -1):
            ends = self._ends.get(tuple(suffix[-n:]))
            if ends is None:
                continue
            newest = bisect_right(ends, limit - 1)  # the token after the match must be known too
            here = [(end, n - 1) for end in reversed(ends[max(0, newest - SCANNED_OCCURRENCES) : newest])]
            if n == settings.max_match:
                here = self._longest_first([end for end, _ in here], suffix)
            places += here
            for end, row in here:
                token = self.tokens[end]
                if token not in seen and len(found) < count:
                    seen.add(token)
                    found.append(Continuation(token, row, len(found)))
            if len(found) == count and len(places) >= settings.recycled:
                break
        if best_only:
            return found
        rank, last = settings.branches, settings.branches + settings.recycled
        for end, row in places:
            if rank == last:
                break
            for token in self.alternatives[end]:
                if token not in seen and rank < last:
                    seen.add(token)
                    found.append(Continuation(token, row, rank))
                    rank += 1
        return found

    def _longest_first(self, ends: list[int], suffix: list[int]) -> list[tuple[int, int]]:
        """Places behind full matches (newest first) with their rows, those that go on furthest backwards first."""
        full, tokens = self.settings.max_match, self.tokens
        rated = []
        for end in ends:
            length, longest = full, min(len(suffix), end)
            while length < longest and tokens[end - length - 1] == suffix[-length - 1]:
                length += 1
            rated.append((end, full - 1 + bisect_right(RUNS, length - full) - 1, length))
        rated.sort(key=lambda place: -place[2])  # stable: the newest stays first among equals
        return [(end, row) for end, row, _ in rated]


def expand(
    tree: DraftTree,
    index: NgramIndex,
    limit: int,
    table: NDArray[np.float64],
    settings: DraftSettings,
    layer: int,
    max_depth: int,
    drafter: int = 0,
) -> None:
    """One skip: children for every frontier node, and below the best of them its continuation, token by token.

    Args:
        limit: tokens of the index's text that are committed; the last of them is the tree's root.
        table: chances of being accepted, float64 of ``table_shape``.
    """
    if tree.expanded[drafter, tree.frontier].all():
        return  # a frontier holds leaves only, and what found no continuation before finds none now
    ngram = settings.ngram
    log_table = np.log(table).tolist()
    reach = index.reach
    context = index.tokens[max(0, limit - reach) : limit]  # its last token is the root
    # Plain lists: hundreds of single look-ups are several times dearer on arrays.
    known = tree.size
    parent, token = tree.parent[:known].tolist(), tree.token[:known].tolist()
    depth = tree.depth[:known].tolist()
    child = {(parent[node], token[node]): node for node in range(1, known)}
    edges: list[float] = []
    reached: list[int] = []
    expanded: list[int] = []
    for frontier_node in tree.frontier.tolist():
        node = frontier_node
        path: list[int] = []
        while node and len(path) < reach:
            path.append(token[node])
            node = parent[node]
        suffix = (context + path[::-1])[-reach:]
        node = frontier_node
        for step in range(ngram.path):
            if depth[node] >= max_depth:
                break
            # Only the first step branches: the rest prolongs the best continuation.
            found = index.continuations(suffix, limit, best_only=step > 0)
            expanded.append(node)
            if not found:
                break
            children = []
            for following, row, rank in found:
                below = child.get((node, following))
                if below is None:
                    below = child[node, following] = len(token)
                    parent.append(node)
                    token.append(following)
                    depth.append(depth[node] + 1)
                    edges.append(log_table[row][rank])
                children.append(below)
            reached += children
            node = children[0]
            suffix = [*suffix, token[node]][-reach:]
    tree.append(parent[known:], token[known:], edges, drafter, layer)
    tree.expanded[drafter, expanded] = True
    if reached:
        advance(tree, np.array(reached), settings)


class NgramState:
    """One request's text with the chances of its n-grams, which it learns as tokens are committed."""

    def __init__(self, settings: NgramSettings, table: NDArray[np.float64]) -> None:
        self.index = NgramIndex(settings)
        self.counts = NgramCounts(settings)
        self.calibrated = table
        self.table = table
        self.hits = HITS_START

    def read(self, prompt: list[int]) -> None:
        """Note the prompt; how it repeats itself says little about the answer and is not counted."""
        self.index.append(prompt)

    def commit(self, tokens: list[int], alternatives: list[list[int]] | None) -> None:
        """Note committed tokens of the answer, one by one, and how well they were foreseen."""
        index, reach = self.index, self.index.reach
        for i, token in enumerate(tokens):
            limit = len(index.tokens)
            found = index.continuations(index.tokens[max(0, limit - reach) :], limit)
            self.counts.add(found, token)
            self.hits += HITS_MOVING * ((bool(found) and found[0].token == token) - self.hits)
            index.append([token], None if alternatives is None else [alternatives[i]])
        self.table = self.counts.table(self.calibrated, TABLE_WEIGHT)

    def outlook(self) -> tuple[float, float, float]:
        """Of the text's best continuation: its row as a share of the table's, its chance, and the late hits."""
        index, reach = self.index, self.index.reach
        limit = len(index.tokens)
        found = index.continuations(index.tokens[max(0, limit - reach) :], limit, best_only=True)
        if not found:
            return 0.0, 0.0, self.hits
        _, row, rank = found[0]
        return (row + 1) / len(self.table), float(self.table[row, rank]), self.hits


class NgramDrafter:
    """The light drafter of a decoder; keeps one request's n-grams."""

    tokens_processed = 0

    def __init__(self, index: int, settings: NgramSettings, table: NDArray[np.float64] | None = None) -> None:
        self.name = "ngram"
        self.index = index
        self.settings = settings
        self.calibrated = prior_table(settings) if table is None else table
        self.begin(np.zeros(0, np.int64), 0)

    def begin(self, prompt: IntArray, capacity: int) -> None:
        self.state = NgramState(self.settings, self.calibrated)
        self.state.read(prompt.tolist())

    @property
    def hits(self) -> float:
        return self.state.hits

    def draft(self, tree: DraftTree, settings: DraftSettings, layer: int, max_depth: int) -> None:
        state = self.state
        expand(tree, state.index, len(state.index.tokens), state.table, settings, layer, max_depth, self.index)

    def commit(self, tree: DraftTree, accepted: IntArray, tokens: IntArray, alternatives: IntArray) -> None:
        self.state.commit(tokens.tolist(), alternatives.tolist())
