"""The graft: how a drafter model's output changes the shared tree. Pure tree work, no model, no clock.

The decoder and the offline value system both call these functions; what differs is only where the scores come from
(one step's rows, or the rows of a trie shared by all schedules).
"""

from typing import Protocol

import numpy as np

from treegraft.settings import DraftSettings
from treegraft.tree import NOT_PROCESSED, BoolArray, DraftTree, FloatArray, IntArray


class NodeScores(Protocol):
    """What one drafter computed at the nodes it has processed, addressed by row."""

    def edges(self, rows: IntArray, tokens: IntArray) -> FloatArray:
        """Log-probability of tokens[i] after row rows[i], NaN for a token that the drafter cannot say: float64 [n]."""
        ...

    def top(self, rows: IntArray, count: int) -> tuple[IntArray, FloatArray]:
        """The ``count`` likeliest tokens after each row, and their log-probabilities: int64 and float64 [n, count]."""
        ...


def reselect(
    tree: DraftTree, drafter: int, settings: DraftSettings, layer: int, max_depth: int, allowed: BoolArray | None = None
) -> IntArray:
    """The frontier that a call of ``drafter`` would expand in ``layer``, best first: int64 [<= width].

    It is the ``width`` best nodes of the last ``look_back`` layers that this drafter has not expanded yet (its top
    children are in the tree already where it has) and whose children are not too deep to be of use.
    """
    n = tree.size
    closed = tree.expanded[drafter, :n]
    if allowed is not None:
        closed = closed | ~allowed
    depths, layers, scores = tree.depth[:n].tolist(), tree.layer[:n].tolist(), tree.score[:n].tolist()
    return np.array(best_open(closed.tolist(), depths, layers, scores, settings, layer, max_depth), np.int64)


def best_open(
    closed: list[bool],
    depths: list[int],
    layers: list[int],
    scores: list[float],
    settings: DraftSettings,
    layer: int,
    max_depth: int,
) -> list[int]:
    """``reselect`` among the nodes that are not closed, on a tree's arrays as lists, which a decision has at hand."""
    oldest = layer - settings.look_back
    nodes = [
        node for node, shut in enumerate(closed) if not shut and depths[node] < max_depth and layers[node] >= oldest
    ]
    nodes.sort(key=scores.__getitem__, reverse=True)  # stable in reverse too: ties by lower index
    return nodes[: settings.width]


def plan_call(tree: DraftTree, drafter: int, settings: DraftSettings, layer: int, max_depth: int) -> IntArray:
    """The nodes that a call of ``drafter`` has to process, ascending (parents first): int64 [n].

    These are the inner nodes it has not seen (to rescore what lies below them) and the nodes that look best for the
    new frontier by the scores so far. One forward serves both, so a call never costs two.
    """
    frontier = reselect(tree, drafter, settings, layer, max_depth)
    if len(frontier) == 0:
        return frontier
    wanted = tree.has_children()
    wanted[frontier] = True
    wanted &= tree.row[drafter, : tree.size] == NOT_PROCESSED
    wanted &= tree.depth[: tree.size] < max_depth  # beyond it another drafter with a longer context has been
    return np.flatnonzero(wanted)


def graft(
    tree: DraftTree, drafter: int, scores: NodeScores, settings: DraftSettings, layer: int, max_depth: int
) -> None:
    """Rescore, reselect, expand; the nodes of ``plan_call`` have been processed and ``tree.row`` says where.

    Never removes a node: a child that exists already is the same node.
    """
    n = tree.size
    rows = tree.row[drafter, :n]
    processed = rows != NOT_PROCESSED
    # What this drafter has scored already would get the same number.
    below = np.flatnonzero(processed[tree.parent[:n]] & (tree.scorer[:n] < drafter))
    below = below[below > 0]
    if len(below):
        edges = scores.edges(rows[tree.parent[below]], tree.token[below])
        known = ~np.isnan(edges)
        tree.rescore(below[known], edges[known], drafter)
    frontier = reselect(tree, drafter, settings, layer, max_depth, processed)
    if len(frontier) == 0:
        return
    tokens, edges = scores.top(rows[frontier], settings.width)
    parents = np.repeat(frontier, tokens.shape[1])
    children = tree.add(parents, tokens.ravel(), edges.ravel(), drafter, layer)
    # A child that the light drafter had found keeps its edge from the rescoring above: the same number.
    tree.expanded[drafter, frontier] = True
    advance(tree, children, settings)


def advance(tree: DraftTree, added: IntArray, settings: DraftSettings) -> None:
    """Make the best of the just added nodes that have no child the frontier; without such nodes it stays as it is."""
    leaves = np.unique(added[~tree.has_children()[added]])
    if len(leaves):
        tree.frontier = tree.best(leaves, settings.width)


def verification_order(tree: DraftTree, limit: int) -> tuple[IntArray, FloatArray]:
    """The best nodes of the tree in order of score, the root left out.

    Because a score is a log path probability, every prefix of this order contains the parents of its nodes (ties go
    to the lower index, and a parent's index is lower).

    Returns:
        nodes int64 [n <= limit]; probabilities float64 [n]: estimates that the node is accepted, falling.
    """
    order = tree.best(np.arange(1, tree.size), limit)
    return order, np.exp(tree.score[order])


def accepted_mass(probabilities: FloatArray, sizes: tuple[int, ...]) -> FloatArray:
    """Expected accepted length when the N best nodes are verified, for each N of ``sizes``: float64 [len(sizes)]."""
    total = np.concatenate([[0.0], np.cumsum(probabilities)])
    return total[np.minimum(sizes, len(probabilities))]


def choose_size(mass: FloatArray, verify_ms: FloatArray, tokens_per_ms: float) -> int:
    """Index of the verified size that is worth most when a millisecond is worth ``tokens_per_ms`` elsewhere.

    Nodes are worth verifying while the tokens they are expected to add exceed what the target's added time would have
    brought elsewhere; taking the maximum over the grid holds also where the cost curve has steps.

    Args:
        mass: float64 [g] from ``accepted_mass``; verify_ms: float64 [g], target milliseconds for the root and N nodes.
    """
    return int(np.argmax(mass - tokens_per_ms * verify_ms))
