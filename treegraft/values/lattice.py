"""Every schedule at every position, each model evaluation done once.

A drafter's output at a node depends on context and path only, so the trees of all m^D schedules share one trie of
paths. Layer by layer the paths that any schedule needs are collected and go through the drafter in one batch, several
positions together; the trees themselves are grown by the decoder's own grafting code.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from treegraft.draft_vocabulary import DraftVocabulary
from treegraft.drafters.lm import RowStore, foreseen
from treegraft.drafters.ngram import HITS_MOVING, NgramState, expand
from treegraft.grafting import accepted_mass, graft, plan_call, verification_order
from treegraft.models import LanguageModel
from treegraft.runner import ModelRunner
from treegraft.scheduling.features import RequestCosts, SchedulingState, features
from treegraft.scheduling.outlook import OutlookTracker
from treegraft.settings import DraftSettings
from treegraft.tree import NOT_PROCESSED, BoolArray, DraftTree, FloatArray, IntArray
from treegraft.values.calibration import Calibration
from treegraft.values.sampled import SampledTarget
from treegraft.values.states import code, offset, state_index


@dataclass(frozen=True)
class Outcomes:
    """What every schedule achieves at one prompt's positions (P positions, U = m^D schedules, S states, G sizes)."""

    features: NDArray[np.float32]
    """[P, S, F]"""
    accepted: NDArray[np.int16]
    """[P, U, G]: accepted length when the N best nodes are verified."""
    mass: NDArray[np.float32]
    """[P, U, G]: the accepted length that the tree's own scores expect."""
    nodes: NDArray[np.int16]
    """[P, U]: nodes of the tree, root left out."""
    layer_tokens: NDArray[np.int16]
    """[P, U, D]: tokens that the acting drafter processed in each layer, catching up left out; 0 for the light one."""
    path_processed: NDArray[np.int16]
    """[P, U, m]: leading tokens of root + true path that each drafter has processed (its KV if accepted)."""
    mean_accepted: NDArray[np.float32]
    """[P, U, G]: the mean of ``accepted`` over the target's draws, a token that ends the text left out; [P, U, 0] for
    greedy text, where ``accepted`` is certain."""


class PathTrie:
    """Paths below the roots of a block of positions; ids 0 .. B - 1 are the roots, parents come before children."""

    def __init__(self, roots: int) -> None:
        self.token = [-1] * roots
        self.parent = list(range(roots))
        self.depth = [0] * roots
        self.position = list(range(roots))
        self.ancestors = np.eye(roots, dtype=np.bool_)
        self._child: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.token)

    def child(self, parent: int, token: int) -> int:
        """The id of a path, new or known."""
        found = self._child.get((parent, token))
        if found is None:
            found = self._child[(parent, token)] = len(self.token)
            self.token.append(token)
            self.parent.append(parent)
            self.depth.append(self.depth[parent] + 1)
            self.position.append(self.position[parent])
            if found >= len(self.ancestors):
                grown = np.zeros((2 * found, 2 * found), np.bool_)
                grown[:found, :found] = self.ancestors[:found, :found]
                self.ancestors = grown
            self.ancestors[found] = self.ancestors[parent]
            self.ancestors[found, found] = True
        return found


class TrieDrafter:
    """One drafter model over the tries of one prompt: the text's KV once, then each path once."""

    def __init__(
        self, model: LanguageModel, vocabulary: DraftVocabulary, width: int, temperature: float, chunk: int
    ) -> None:
        self.model = model
        self.chunk = chunk
        self.runner = ModelRunner(model)
        self.rows = RowStore(vocabulary, width, temperature)

    def begin(self, text: IntArray, prompt_tokens: int) -> None:
        """Process the whole text (int64 [S]); its positions from the prompt's last token on are the roots."""
        usable = text[: self.model.context_limit]
        self.text_length = len(usable)
        self.runner.reset(len(usable) + 4 * self.chunk)
        self.root_logits = self.runner.prefill(usable, min(prompt_tokens - 1, len(usable)))

    def foreseen(self, answer: IntArray) -> BoolArray:
        """Whether each token of the answer is among the ``width`` likeliest where it comes: bool [n], as far as the
        model's context reaches."""
        vocabulary, width = self.rows.vocabulary, self.rows.width
        logits = self.root_logits[: len(answer), : vocabulary.size]
        return foreseen(logits, vocabulary.columns_of(answer[: len(logits)]), width)

    def begin_block(self, first: int, roots: int) -> None:
        """Start on positions first .. first + roots - 1 (0: the prompt's last token is the root)."""
        self.runner.cache.truncate(self.text_length)
        self.rows.clear()
        self.slots: list[int] = []  # trie id of each slot behind the text
        self.row_of = np.full(max(roots, 1), NOT_PROCESSED, np.int64)  # by trie id
        logits = self.root_logits[first : first + roots]
        self.row_of[: len(logits)] = self.rows.append(logits)

    def process(self, trie: PathTrie, wanted: IntArray, root_positions: IntArray) -> None:
        """Evaluate the trie paths ``wanted`` (ids, int64 [n]) that have not been yet.

        Args:
            root_positions: int64 [B], the text position of each root of the block.
        """
        if len(trie) > len(self.row_of):
            grown = np.full(2 * len(trie), NOT_PROCESSED, np.int64)
            grown[: len(self.row_of)] = self.row_of
            self.row_of = grown
        wanted = np.unique(wanted)
        wanted = wanted[self.row_of[wanted] == NOT_PROCESSED]
        for start in range(0, len(wanted), self.chunk):
            self._forward(trie, wanted[start : start + self.chunk], root_positions)

    def _forward(self, trie: PathTrie, ids: IntArray, root_positions: IntArray) -> None:
        self.slots += ids.tolist()
        root = root_positions[np.array(trie.position)[ids]]  # [n]
        visible = np.empty((len(ids), self.text_length + len(self.slots)), np.bool_)
        visible[:, : self.text_length] = np.arange(self.text_length) <= root[:, None]
        visible[:, self.text_length :] = trie.ancestors[ids[:, None], np.array(self.slots)]
        tokens = np.array(trie.token, np.int64)[ids]
        positions = root + np.array(trie.depth)[ids]
        logits = self.runner.forward(tokens, positions, visible, slice(0, len(ids)))
        self.row_of[ids] = self.rows.append(logits)


@dataclass
class _Branch:
    """One schedule prefix at one position of the block."""

    at: int
    prefix: tuple[int, ...]
    tree: DraftTree
    paths: list[int]  # trie id of each tree node
    layer_tokens: tuple[int, ...]


class Lattice:
    """Evaluates all schedules along a text that the target produced.

    Args:
        drafters: in order of cost; None stands for the n-gram drafter.
        vocabulary: what each drafter can propose, [m] (ignored for n-grams).
        calibration: of all drafters.
        tokens_per_forward: drafter tokens packed into one forward at most; bounds memory.
        target: where the text was sampled, the target under the settings of that; None for greedy text.
    """

    def __init__(
        self,
        settings: DraftSettings,
        drafters: Sequence[LanguageModel | None],
        vocabulary: Sequence[DraftVocabulary],
        calibration: Calibration,
        tokens_per_forward: int = 512,
        target: SampledTarget | None = None,
    ) -> None:
        self.settings = settings
        self.target = target
        self.count = len(drafters)
        self.models = [
            None
            if model is None
            else TrieDrafter(model, vocabulary[j], settings.width, calibration.temperatures[j], tokens_per_forward)
            for j, model in enumerate(drafters)
        ]
        self.calibration = calibration
        # With a new frontier in every layer a position asks for about this many paths in all.
        paths = settings.width * self.count**settings.depth // 2
        self.block = max(1, 2 * tokens_per_forward // paths)

    @torch.inference_mode()
    def evaluate(
        self,
        text: IntArray,
        prompt_tokens: int,
        alternatives: IntArray,
        confidence: FloatArray,
        max_new_tokens: int,
        costs: RequestCosts,
    ) -> Outcomes:
        """All schedules at every position of the answer.

        Args:
            text: int64 [S], prompt and the target's answer.
            alternatives: int64 [S - prompt_tokens, r], the target's likeliest tokens in place of each answer token.
            confidence: float64 [S - prompt_tokens], the probability that the target gave to each answer token.
            max_new_tokens: the limit under which the answer was decoded, the context's end counted in; drafts end there
                as the decoder's do.
        """
        self.text = text
        self.prompt_tokens = prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.costs = costs
        # The n-gram drafter learns from the committed text alone, so its state at a position is the same for all
        # schedules; the index answers for earlier positions too, the tables are kept.
        light = NgramState(self.settings.ngram, self.calibration.ngram_table)
        light.read(text[:prompt_tokens].tolist())
        tracker = OutlookTracker(light if None in self.models else None)
        for model in self.models:
            if model is not None:
                model.begin(text, prompt_tokens)
        positions = len(text) - prompt_tokens
        hits = self._hits(text[prompt_tokens:])
        # Both lists go by committed tokens of the answer.
        self.index, self.tables, self.outlooks = light.index, [light.table], [tracker.now(hits[0])]
        answer = zip(text[prompt_tokens:].tolist(), alternatives.tolist(), confidence.tolist(), hits[1:], strict=True)
        for token, likely, sure, after in answer:
            light.commit([token], [likely])
            tracker.commit([sure])
            self.tables.append(light.table)
            self.outlooks.append(tracker.now(after))
        if self.target is not None:
            self.target.begin(text, prompt_tokens)
        blocks = [self._block(first, min(self.block, positions - first)) for first in range(0, positions, self.block)]
        return Outcomes(*(np.concatenate([getattr(b, name) for b in blocks]) for name in Outcomes.__dataclass_fields__))

    def _hits(self, answer: IntArray) -> list[tuple[float, ...]]:
        """``Drafter.hits`` of each drafter but the light one before every token of the answer and after the last, as if
        it had been called everywhere."""
        found = []
        for model, usual in zip(self.models[1:], self.calibration.hits[1:], strict=True):
            assert model is not None  # only the light drafter is none
            values = [usual]
            known = model.foreseen(answer).tolist()
            for hit in known:
                values.append(values[-1] + HITS_MOVING * (hit - values[-1]))
            found.append(values + [values[-1]] * (len(answer) - len(known)))  # beyond the drafter's context
        return list(zip(*found, strict=True)) if found else [()] * (len(answer) + 1)

    def _max_depth(self, position: int) -> int:
        return self.max_new_tokens - position - 1

    def _block(self, first: int, count: int) -> Outcomes:
        settings, m = self.settings, self.count
        trie = PathTrie(count)
        roots = self.prompt_tokens - 1 + first + np.arange(count)
        for model in self.models:
            if model is not None:
                model.begin_block(first, count)
        branches = [
            _Branch(at, (), DraftTree(int(self.text[root]), m), [at], ()) for at, root in enumerate(roots.tolist())
        ]
        seen: NDArray[np.float32] | None = None
        for layer in range(1, settings.depth + 1):
            for branch in branches:
                vector = features(self._state(branch, layer, first))
                if seen is None:
                    seen = np.zeros((count, offset(settings.depth, m), len(vector)), np.float32)
                seen[branch.at, state_index(branch.prefix, m)] = vector
            branches = [
                child for action in range(m) for child in self._act(branches, action, layer, trie, first, roots)
            ]
        assert seen is not None
        reach = None if self.target is None else self.target.reach(trie, first, roots)
        return self._outcomes(branches, seen, reach, first, count)

    def _state(self, branch: _Branch, layer: int, first: int) -> SchedulingState:
        position = first + branch.at
        return SchedulingState(
            branch.tree,
            layer,
            branch.prefix,
            self.settings,
            self._max_depth(position),
            self.costs,
            self.outlooks[position],
        )

    def _act(
        self, branches: list[_Branch], action: int, layer: int, trie: PathTrie, first: int, roots: IntArray
    ) -> list[_Branch]:
        """The branches after ``action`` in ``layer``: all paths they need go through the drafter together."""
        settings, model = self.settings, self.models[action]
        children = []
        planned: list[IntArray] = []
        for branch in branches:
            tree = branch.tree.copy()
            child = _Branch(branch.at, (*branch.prefix, action), tree, list(branch.paths), branch.layer_tokens)
            max_depth = self._max_depth(first + branch.at)
            nodes = np.zeros(0, np.int64)
            if max_depth >= 1:
                if model is None:
                    limit = int(roots[branch.at]) + 1
                    table = self.tables[limit - self.prompt_tokens]
                    expand(tree, self.index, limit, table, settings, layer, max_depth, action)
                else:
                    usable = min(max_depth, model.model.context_limit - int(roots[branch.at]))
                    nodes = plan_call(tree, action, settings, layer, usable)
            child.layer_tokens = (*branch.layer_tokens, len(nodes))
            children.append(child)
            planned.append(nodes)
        if model is not None:
            wanted = [np.array(child.paths)[nodes] for child, nodes in zip(children, planned, strict=True)]
            model.process(trie, np.concatenate(wanted), roots)
            for child, nodes, ids in zip(children, planned, wanted, strict=True):
                child.tree.row[action, nodes] = model.row_of[ids]
                max_depth = self._max_depth(first + child.at)
                if max_depth >= 1 and (child.tree.row[action, : child.tree.size] != NOT_PROCESSED).any():
                    usable = min(max_depth, model.model.context_limit - int(roots[child.at]))
                    graft(child.tree, action, model.rows, settings, layer, usable)
        for child in children:
            for node in range(len(child.paths), child.tree.size):
                child.paths.append(trie.child(child.paths[child.tree.parent[node]], int(child.tree.token[node])))
        return children

    def _outcomes(
        self, leaves: list[_Branch], seen: NDArray[np.float32], reach: FloatArray | None, first: int, count: int
    ) -> Outcomes:
        """The arrays of a block; ``reach``: float64 by trie id, see ``SampledTarget``, or None for greedy text."""
        settings, m = self.settings, self.count
        sizes = settings.verified_sizes
        shape = (count, m**settings.depth)
        out = Outcomes(
            features=seen,
            accepted=np.zeros((*shape, len(sizes)), np.int16),
            mass=np.zeros((*shape, len(sizes)), np.float32),
            nodes=np.zeros(shape, np.int16),
            layer_tokens=np.zeros((*shape, settings.depth), np.int16),
            path_processed=np.zeros((*shape, m), np.int16),
            mean_accepted=np.zeros((*shape, 0 if reach is None else len(sizes)), np.float32),
        )
        for leaf in leaves:
            tree, where = leaf.tree, (leaf.at, code(leaf.prefix, m))
            start = self.prompt_tokens + first + leaf.at
            path = tree.walk(self.text[start : start + max(self._max_depth(first + leaf.at), 0)])
            order, probabilities = verification_order(tree, sizes[-1])
            rank = np.full(tree.size, tree.size, np.int64)
            rank[order] = np.arange(len(order))
            out.accepted[where] = (rank[path][:, None] < np.array(sizes)).sum(axis=0)
            out.mass[where] = accepted_mass(probabilities, sizes)
            if reach is not None:
                out.mean_accepted[where] = accepted_mass(reach[np.array(leaf.paths)[order]], sizes)
            out.nodes[where] = tree.size - 1
            out.layer_tokens[where] = leaf.layer_tokens
            along = tree.row[:, np.concatenate([[0], path])] != NOT_PROCESSED  # [m, path + 1]
            out.path_processed[where] = np.cumprod(along, axis=1).sum(axis=1)
        return out
