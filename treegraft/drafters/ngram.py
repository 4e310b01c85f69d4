"""The light drafter: continuations of the longest suffix that occurred before in the same request."""

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from treegraft.grafting import advance
from treegraft.settings import DraftSettings, NgramSettings
from treegraft.tree import DraftTree, IntArray

SCANNED_OCCURRENCES = 32  # newest occurrences of a suffix that are looked at; older ones hardly change the ranking


def prior_table(settings: NgramSettings) -> NDArray[np.float64]:
    """Chance that a proposal is right before anything was measured, [max_match, branches]: by match length and rank.

    Half for a full match, falling with a shorter match and a later rank; replaced by ``values.calibration``.
    """
    match = np.arange(1, settings.max_match + 1)[:, None] / settings.max_match
    rank = np.arange(1, settings.branches + 1)[None, :]
    return 0.5 * match / rank**2


class NgramIndex:
    """Where each n-gram (1 .. max_match tokens) of a text ends, updated as tokens are appended.

    The cost of ``append`` and of ``continuations`` does not grow with the text.
    """

    def __init__(self, max_match: int) -> None:
        self.max_match = max_match
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def append(self, tokens: list[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            end = len(self.tokens)
            for n in range(1, min(self.max_match, end) + 1):
                self._ends.setdefault(tuple(self.tokens[end - n : end]), []).append(end)

    def continuations(self, suffix: list[int], count: int, limit: int) -> list[tuple[int, int]]:
        """Up to ``count`` different tokens that followed ``suffix``, longest match first, then newest first.

        Args:
            suffix: the last tokens of context + path; the newest is last.
            limit: the text's first ``limit`` tokens are known (the value system asks about earlier positions).

        Returns:
            (token, match length) pairs, best first.
        """
        found: list[tuple[int, int]] = []
        seen: set[int] = set()
        for n in range(min(self.max_match, len(suffix)), 0, -1):
            ends = self._ends.get(tuple(suffix[-n:]))
            if ends is None:
                continue
            newest = bisect_right(ends, limit - 1)  # the token after the match must be known too
            for end in reversed(ends[max(0, newest - SCANNED_OCCURRENCES) : newest]):
                token = self.tokens[end]
                if token not in seen:
                    seen.add(token)
                    found.append((token, n))
                    if len(found) == count:
                        return found
        return found


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
        table: float64 [max_match, branches]: chance of being accepted by match length and rank.
    """
    ngram = settings.ngram
    log_table = np.log(table).tolist()
    context = index.tokens[max(0, limit - ngram.max_match) : limit]  # its last token is the root
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
        while node and len(path) < ngram.max_match:
            path.append(token[node])
            node = parent[node]
        suffix = (context + path[::-1])[-ngram.max_match :]
        node = frontier_node
        for step in range(ngram.path):
            if depth[node] >= max_depth:
                break
            # Only the first step branches: the rest prolongs the best continuation.
            found = index.continuations(suffix, ngram.branches if step == 0 else 1, limit)
            expanded.append(node)
            if not found:
                break
            children = []
            for rank, (following, match) in enumerate(found):
                below = child.get((node, following))
                if below is None:
                    below = child[node, following] = len(token)
                    parent.append(node)
                    token.append(following)
                    depth.append(depth[node] + 1)
                    edges.append(log_table[match - 1][rank])
                children.append(below)
            reached += children
            node = children[0]
            suffix = [*suffix, token[node]][-ngram.max_match :]
    tree.append(parent[known:], token[known:], edges, drafter, layer)
    tree.expanded[drafter, expanded] = True
    if reached:
        advance(tree, np.array(reached), settings)


class NgramDrafter:
    """The light drafter of a decoder; keeps one request's n-gram index."""

    tokens_processed = 0

    def __init__(self, index: int, settings: NgramSettings, table: NDArray[np.float64] | None = None) -> None:
        self.name = "ngram"
        self.index = index
        self.settings = settings
        self.table = prior_table(settings) if table is None else table
        self.begin(0)

    def begin(self, capacity: int) -> None:
        self.text = NgramIndex(self.settings.max_match)

    def extend(self, tokens: IntArray) -> None:
        self.text.append(tokens.tolist())

    def draft(self, tree: DraftTree, settings: DraftSettings, layer: int, max_depth: int) -> None:
        expand(tree, self.text, len(self.text.tokens), self.table, settings, layer, max_depth, self.index)

    def commit(self, tree: DraftTree, accepted: IntArray) -> None:
        """Nothing to keep: the tokens come with ``extend``."""
