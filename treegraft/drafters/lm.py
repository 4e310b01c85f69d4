"""A drafter that is itself a language model: grafts its own view onto the shared tree."""

import numpy as np
import torch

from treegraft.draft_vocabulary import UNKNOWN, DraftVocabulary
from treegraft.drafters.ngram import HITS_MOVING, HITS_START
from treegraft.grafting import graft, plan_call
from treegraft.models import LanguageModel
from treegraft.runner import PREFILL_CHUNK, ModelRunner
from treegraft.settings import DraftSettings
from treegraft.tree import NOT_PROCESSED, BoolArray, DraftTree, FloatArray, IntArray

LOWEST_LOGIT = 1e4


def foreseen(logits: torch.Tensor, chosen: IntArray, width: int) -> BoolArray:
    """Whether each token is among the ``width`` likeliest in its place: bool [n].

    Args:
        logits: [n, columns] of a drafter; chosen: int64 [n], the column of each token, UNKNOWN for none.
    """
    likeliest = logits.topk(min(width, logits.shape[-1]), dim=-1).indices.cpu().numpy()
    return np.asarray((likeliest == chosen[:, None]).any(axis=1))


class RowStore:
    """Logits that a drafter computed, one row a node, and their likeliest tokens (a ``grafting.NodeScores``).

    Rows stay on the model's device; only top tokens and asked-for edges travel to the host.

    Args:
        vocabulary: the tokens that target and drafter share; other columns are cut off.
        width: how many likeliest tokens are kept ready.
        temperature: divides the logits, so that probabilities are calibrated to the target's choices.
    """

    def __init__(self, vocabulary: DraftVocabulary, width: int, temperature: float) -> None:
        self.vocabulary = vocabulary
        self.width = min(width, vocabulary.size)
        self.temperature = temperature
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self.count = 0
        self._logits: list[torch.Tensor] = []  # chunks [n, vocabulary]
        self._log_total: list[torch.Tensor] = []  # chunks [n, 1]
        self._starts: list[int] = []
        self._tokens = np.zeros((0, self.width), np.int64)
        self._values = np.zeros((0, self.width), np.float64)

    def append(self, logits: torch.Tensor) -> IntArray:
        """Add rows; logits: [n, >= vocabulary]. Returns the row numbers, int64 [n]."""
        # A masked token's -inf would make NaN of 0 x -inf in path sums.
        scaled = logits[:, : self.vocabulary.size].float().clamp_min(-LOWEST_LOGIT)
        if self.temperature != 1.0:
            scaled = scaled / self.temperature
        log_total = torch.logsumexp(scaled, dim=-1, keepdim=True)
        values, columns = torch.topk(scaled, self.width, dim=-1)
        self._logits.append(scaled)
        self._log_total.append(log_total)
        self._starts.append(self.count)
        start, self.count = self.count, self.count + len(scaled)
        self._tokens = np.concatenate([self._tokens, self.vocabulary.of_columns(columns.cpu().numpy())])
        self._values = np.concatenate([self._values, (values - log_total).double().cpu().numpy()])
        return np.arange(start, self.count)

    def edges(self, rows: IntArray, tokens: IntArray) -> FloatArray:
        columns = self.vocabulary.columns_of(tokens)
        out = np.full(len(rows), np.nan)
        chunk_of = np.searchsorted(self._starts, rows, side="right") - 1
        for chunk in np.unique(chunk_of).tolist():
            here = np.flatnonzero((chunk_of == chunk) & (columns != UNKNOWN))
            logits, log_total = self._logits[chunk], self._log_total[chunk]
            row = torch.from_numpy(rows[here] - self._starts[chunk]).to(logits.device)
            column = torch.from_numpy(columns[here]).to(logits.device)
            out[here] = (logits[row, column] - log_total[row, 0]).double().cpu().numpy()
        return out

    def foresaw(self, rows: IntArray, tokens: IntArray) -> BoolArray:
        """Whether tokens[i] is among the likeliest tokens after row rows[i]: bool [n]."""
        return np.asarray((self._tokens[rows] == tokens[:, None]).any(axis=1))

    def top(self, rows: IntArray, count: int) -> tuple[IntArray, FloatArray]:
        return self._tokens[rows, :count], self._values[rows, :count]


class LanguageModelDrafter:
    """A decoder's drafter model.

    Its KV keeps committed tokens across steps and tree nodes across the calls of one step. A drafter that was not
    called for some steps catches up on the tokens it lacks inside the first forward of its next call.

    Args:
        temperature, hits: of its calibration; a request's hits begin there.
    """

    def __init__(
        self,
        index: int,
        model: LanguageModel,
        vocabulary: DraftVocabulary,
        temperature: float = 1.0,
        hits: float = HITS_START,
    ) -> None:
        self.name = model.name
        self.index = index
        self.model = model
        self.vocabulary = vocabulary
        self.temperature = temperature
        self.usual_hits = hits
        self.runner = ModelRunner(model)
        self.begin(np.zeros(0, np.int64), 0)

    def begin(self, prompt: IntArray, capacity: int) -> None:
        self.runner.reset(min(capacity, self.model.context_limit))
        self.text = prompt  # all committed tokens; the last one is the root
        self.hits = self.usual_hits
        self._end_step()

    def _end_step(self) -> None:
        self.rows: RowStore | None = None
        self.slots: list[int] = []  # node of each tree slot, in slot order

    @property
    def tokens_processed(self) -> int:
        return self.runner.tokens_processed

    def draft(self, tree: DraftTree, settings: DraftSettings, layer: int, max_depth: int) -> None:
        root_position = len(self.text) - 1
        # A drafter whose context is shorter than the target's proposes nothing beyond it.
        max_depth = min(max_depth, self.model.context_limit - root_position)
        nodes = plan_call(tree, self.index, settings, layer, max_depth)
        if len(nodes):
            if self.rows is None:
                self.rows = RowStore(self.vocabulary, settings.width, self.temperature)
            tree.row[self.index, nodes] = self.rows.append(self._process(tree, nodes))
        if self.rows is not None:
            graft(tree, self.index, self.rows, settings, layer, max_depth)

    def _process(self, tree: DraftTree, nodes: IntArray) -> torch.Tensor:
        """Logits [n, vocabulary] of tree nodes (ascending), after the committed tokens the cache lacks."""
        root_position = len(self.text) - 1
        missing = self.text[self.runner.committed : root_position]  # before the root
        if len(missing) > PREFILL_CHUNK:
            early = len(missing) - PREFILL_CHUNK
            self.runner.prefill(missing[:early])
            missing = missing[early:]
        before = len(self.slots)
        self.slots += nodes.tolist()
        n, tree_slots, lag = len(nodes), len(self.slots), len(missing)
        visible = np.zeros((lag + n, lag + tree_slots), np.bool_)
        visible[:lag, :lag] = np.tri(lag, dtype=np.bool_)
        visible[lag:, :lag] = True
        visible[lag:, lag:] = tree.ancestors[nodes[:, None], np.array(self.slots)]
        assert lag == 0 or before == 0, "catching up comes before any tree node"
        tokens = np.concatenate([missing, tree.token[nodes]])
        positions = np.concatenate([np.arange(lag) + root_position - lag, tree.depth[nodes] + root_position])
        logits = self.runner.forward(tokens, positions, visible, slice(lag, lag + n))
        self.runner.committed += lag
        return logits

    def commit(self, tree: DraftTree, accepted: IntArray, tokens: IntArray, alternatives: IntArray) -> None:
        path = np.concatenate([[0], accepted])
        path = path[np.logical_and.accumulate(tree.row[self.index, path] != NOT_PROCESSED)]  # as far as it went along
        where = {node: self.runner.committed + slot for slot, node in enumerate(self.slots)}
        kept = [where[node] for node in path.tolist()]
        if self.rows is not None:
            for foreseen in self.rows.foresaw(tree.row[self.index, path[: len(tokens)]], tokens[: len(path)]).tolist():
                self.hits += HITS_MOVING * (foreseen - self.hits)
        self.runner.commit(kept)
        self.text = np.concatenate([self.text, tokens])
        self._end_step()
