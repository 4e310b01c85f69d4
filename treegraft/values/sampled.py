"""Values under sampling: the accepted length that a draft tree can expect when the target's tokens are drawn.

Each emitted token is one draw from the target's processed distribution, and the walk goes down while the draw is a
child. So a verified node is accepted with the product of the target's probabilities along its path, and the expected
accepted length is the sum of that over the verified nodes: exact, without any drawing. A node whose token ends the text
is not counted, since no bonus token follows it: so the step's tokens are always one more than the sum.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from treegraft.grafting import accepted_mass
from treegraft.models import LanguageModel
from treegraft.runner import ModelRunner
from treegraft.sampling import SamplingSettings, TokenChooser
from treegraft.tree import BoolArray, FloatArray, IntArray

ROWS = 64  # distributions over the vocabulary in memory at a time


class Paths(Protocol):
    """What is asked of a trie of paths: one entry a node, parents before children, the roots first."""

    token: list[int]
    parent: list[int]
    """A root is its own."""
    depth: list[int]
    position: list[int]
    """Number of the root that a node lies below."""
    ancestors: BoolArray
    """[at least n, at least n]: node i lies on the path to node j, or is it."""


def path_sums(parent: IntArray, edges: FloatArray) -> FloatArray:
    """Sum of the edges from the root to each node: float64 [n].

    Args:
        parent: int64 [n], a root being its own; edges: float64 [n], at most 0, and 0 at roots.
    """
    total, above = np.asarray(edges, np.float64), np.asarray(parent, np.int64)
    # Doubles the length of the summed stretch each time; from a root on there is nothing to add.
    while (total[above] != 0).any():
        total = total + total[above]
        above = above[above]
    return total


def expected_accepted(parent: IntArray, edges: FloatArray, order: IntArray, sizes: tuple[int, ...]) -> FloatArray:
    """Expected accepted length of a tree for each verified size: float64 [len(sizes)].

    Args:
        parent: int64 [n], the root being its own; edges: float64 [n], log of the target's processed probability of
            each node's token after its parent, 0 at the root.
        order: int64 [k], the nodes in the order in which they are verified, parents before children, no root.
    """
    return accepted_mass(np.exp(path_sums(parent, edges)[order]), sizes)


class SampledTarget:
    """The target's processed distribution over the tries of one prompt: the text once, then each inner path once."""

    def __init__(self, model: LanguageModel, sampling: SamplingSettings, tokens_per_forward: int) -> None:
        self.model = model
        self.chunk = tokens_per_forward
        self.runner = ModelRunner(model)
        self.chooser = TokenChooser(sampling)
        self.text: IntArray = np.zeros(0, np.int64)

    def begin(self, text: IntArray, prompt_tokens: int) -> None:
        """Process the whole text (int64 [S]); its positions from the prompt's last token on are the roots."""
        self.text = text
        self.runner.reset(len(text) + self.chunk)
        self.root_logits = self.runner.prefill(text, prompt_tokens - 1)

    def reach(self, trie: Paths, first: int, root_positions: IntArray) -> NDArray[np.float64]:
        """The chance that the walk from its root comes to each node and goes on there: float64 [len(trie)].

        It is 0 at a token that ends the text, and below it.

        Args:
            first: answer tokens before the first root; root_positions: int64 [B], the place of each root in the text.
        """
        parent, token = np.array(trie.parent, np.int64), np.array(trie.token, np.int64)
        edges = np.zeros(len(parent))
        roots = np.arange(len(root_positions))
        self._edges(trie, edges, roots, self.root_logits[first : first + len(roots)], root_positions)
        inner = np.unique(parent[len(roots) :])
        inner = inner[inner >= len(roots)]
        self.runner.cache.truncate(len(self.text))
        for start in range(0, len(inner), self.chunk):
            ids, slots = inner[start : start + self.chunk], inner[: start + self.chunk]
            at = root_positions[np.array(trie.position)[ids]]
            visible = np.empty((len(ids), len(self.text) + len(slots)), np.bool_)
            visible[:, : len(self.text)] = np.arange(len(self.text)) <= at[:, None]
            visible[:, len(self.text) :] = trie.ancestors[ids[:, None], slots]
            places = at + np.array(trie.depth)[ids]
            logits = self.runner.forward(token[ids], places, visible, slice(0, len(ids)))
            self._edges(trie, edges, ids, logits, root_positions)
        edges[len(roots) :][np.isin(token[len(roots) :], self.model.eos_token_ids)] = -np.inf
        return np.exp(path_sums(parent, edges))

    def _edges(
        self, trie: Paths, edges: FloatArray, ids: IntArray, logits: torch.Tensor, root_positions: IntArray
    ) -> None:
        """Write the edges of all children of the nodes ``ids`` (ascending), whose logits are [len(ids), vocabulary]."""
        parent, token = np.array(trie.parent, np.int64), np.array(trie.token, np.int64)
        children = np.arange(len(root_positions), len(parent))
        children = children[np.isin(parent[children], ids)]
        row = np.searchsorted(ids, parent[children])
        for start in range(0, len(ids), ROWS):
            texts = [self._text(trie, int(node), root_positions) for node in ids[start : start + ROWS]]
            log_p = self._log_probabilities(logits[start : start + ROWS], texts)
            here = (row >= start) & (row < start + ROWS)
            at = torch.from_numpy(row[here] - start).to(log_p.device)
            edges[children[here]] = log_p[at, torch.from_numpy(token[children[here]]).to(log_p.device)].cpu().numpy()

    def _text(self, trie: Paths, node: int, root_positions: IntArray) -> IntArray:
        """All tokens up to and with a node; only a repetition penalty asks for them."""
        if self.chooser.settings.repetition_penalty == 1.0:
            return self.text[:1]
        path = np.flatnonzero(trie.ancestors[node, : len(trie.token)])[1:]
        root = root_positions[trie.position[node]]
        return np.concatenate([self.text[: root + 1], np.array(trie.token, np.int64)[path]])

    def _log_probabilities(self, logits: torch.Tensor, texts: list[IntArray]) -> torch.Tensor:
        """Of every token after each text, under the settings: float64 [n, vocabulary]."""
        scores = logits[:, : self.model.vocab_size].float()
        if len(self.chooser.processors):
            longest = max(map(len, texts))
            # Processors ask which tokens a text holds, so repeating the last one changes nothing.
            ids = np.stack([np.pad(text, (0, longest - len(text)), mode="edge") for text in texts])
            scores = self.chooser.processors(torch.from_numpy(ids).to(logits.device), scores)  # type: ignore[arg-type]
        if self.chooser.greedy:
            certain = torch.full_like(scores, -torch.inf, dtype=torch.float64)
            return certain.scatter(1, scores.argmax(-1, keepdim=True), 0.0)
        return torch.log_softmax(scores.double(), dim=-1)
