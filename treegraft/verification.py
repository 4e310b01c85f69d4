"""Verification: one target forward over the root and the chosen nodes, then a walk along the target's own tokens."""

from collections.abc import Iterator

import numpy as np
import torch

from treegraft.runner import ModelRunner
from treegraft.sampling import TokenChooser
from treegraft.tree import DraftTree, IntArray


def verify(runner: ModelRunner, tree: DraftTree, nodes: IntArray) -> torch.Tensor:
    """The target's logits at the root and at ``nodes``.

    Args:
        runner: the target's; all tokens before the root are in its cache.
        nodes: int64 [N], ascending and closed under parents, the root left out.

    Returns:
        float [N + 1, vocabulary]: row 0 is the root's, row i + 1 is nodes[i]'s; columns without a token are cut off.
    """
    all_nodes = np.concatenate([[0], nodes])
    visible = tree.ancestors[np.ix_(all_nodes, all_nodes)]
    positions = runner.committed + tree.depth[all_nodes]
    logits = runner.forward(tree.token[all_nodes], positions, visible, slice(0, len(all_nodes)))
    return logits[:, : runner.model.vocab_size]


def walk(
    tree: DraftTree, nodes: IntArray, logits: torch.Tensor, chooser: TokenChooser, text: list[int]
) -> Iterator[tuple[int, int | None]]:
    """The tokens that this step emits, one at a time, each the target's own.

    Args:
        nodes, logits: as given to and returned by ``verify``; text: all tokens up to the root; the caller appends
            every token it emits before it asks for the next one.

    Yields:
        (token, the verified node that holds it or None for the bonus token, which ends the walk).
    """
    decided = logits.argmax(-1).tolist() if chooser.plain_argmax else None  # one transfer for the whole tree
    children = {(int(tree.parent[node]), int(tree.token[node])): int(node) for node in nodes}
    row_of = {0: 0} | {int(node): row + 1 for row, node in enumerate(nodes)}
    at: int | None = 0
    while at is not None:
        row = row_of[at]
        token = decided[row] if decided is not None else chooser.choose(logits[row], text)
        at = children.get((at, token))
        yield token, at
