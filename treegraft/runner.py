"""Runs one language model over committed tokens and draft-tree nodes without ever processing a token twice.

Both the decoder (target and drafters) and the value system drive their models through this class.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from treegraft.cache import TreeCache
from treegraft.cpu_kernels import fewest_rows
from treegraft.models import LanguageModel
from treegraft.tree import BoolArray, IntArray

PREFILL_CHUNK = 512  # bounds the mask and the activations of a long prompt


class ModelRunner:
    """A model with its KV cache.

    ``committed`` tokens of the text have their KV in slots [0, committed); slots behind them belong to nodes of the
    current tree. Since ``reset``, ``tokens_processed`` counts the tokens that went through the model and ``forward_ms``
    the milliseconds until its forwards returned.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.device = next(model.module.parameters()).device
        self.dtype = next(model.module.parameters()).dtype
        self._lowest = torch.finfo(self.dtype).min
        self._fewest_rows = fewest_rows(model.module)
        self.cache = TreeCache(model.module.config.get_text_config().num_hidden_layers, 0)
        self.reset(0)

    def reset(self, capacity: int) -> None:
        """Forget everything; make room for ``capacity`` tokens (it grows when needed)."""
        if self.cache.capacity < capacity:
            # Buffers of an earlier request that are large enough serve again.
            self.cache = TreeCache(self.cache.layer_count, _rounded(capacity))
        self.cache.truncate(0)
        self.committed = 0
        self.tokens_processed = 0
        self.forward_ms = 0.0

    def forget(self) -> None:
        """Drop the buffers: the next request starts from new ones."""
        self.cache = TreeCache(self.cache.layer_count, 0)

    @torch.inference_mode()
    def forward(
        self, tokens: IntArray, positions: IntArray, visible: BoolArray, keep: Sequence[int] | slice
    ) -> torch.Tensor:
        """Process tokens at the next free slots.

        Args:
            tokens, positions: int64 [n].
            visible: bool [n, w]: which of the LAST w slots (these n tokens included) each token attends to; all slots
                before them are visible to every token.
            keep: the rows whose logits are wanted, a list or a slice of range(n).

        Returns:
            float [len(keep), vocabulary], on the model's device.
        """
        n, before, fewest = len(tokens), self.cache.length, self._fewest_rows
        rows = np.arange(n)[keep] if isinstance(keep, slice) else np.asarray(keep, np.int64)
        kept = len(rows)
        if n < fewest:
            tokens, positions, visible = _filled_up(tokens, positions, visible, fewest)
        if 0 < kept < fewest:
            rows = np.resize(rows, fewest)
        total = before + len(tokens)
        if total > self.cache.capacity:  # by a quarter at least, so that a growing text seldom moves its cache
            self.cache.reserve(_rounded(max(total, self.cache.capacity * 5 // 4)))
        # Left on the CPU, from where it can index any device: the last one of a spread model is another.
        wanted = torch.from_numpy(rows)
        ids, places, hidden = (torch.from_numpy(array).to(self.device) for array in (tokens, positions, ~visible))
        mask = torch.zeros(len(tokens), total, dtype=self.dtype, device=self.device)
        mask[:, total - visible.shape[1] :].masked_fill_(hidden, self._lowest)
        started = perf_counter()
        if self.model.lean is not None:
            logits = self.model.lean(ids, places, mask, self.cache, wanted)
        else:
            inputs: dict[str, Any] = {
                "input_ids": ids[None],
                "position_ids": places[None],
                "attention_mask": mask[None, None],
                "cache": self.cache,
                "use_cache": True,
                "logits_to_keep": wanted,
            }
            logits = self.model.module(**inputs).logits[0]
        self.forward_ms += (perf_counter() - started) * 1000
        self.tokens_processed += n
        if n < fewest:
            self.cache.truncate(before + n)
        return logits[:kept]

    def prefill(self, tokens: IntArray, keep_from: int | None = None) -> torch.Tensor:
        """Process committed tokens that follow those already in the cache.

        Args:
            tokens: int64 [n].
            keep_from: logits of tokens[keep_from:] are returned; None for none.

        Returns:
            float [n - keep_from, vocabulary] (or [0, vocabulary]).
        """
        first = len(tokens) if keep_from is None else keep_from
        logits = []
        for start in range(0, len(tokens), PREFILL_CHUNK):
            chunk = tokens[start : start + PREFILL_CHUNK]
            positions = np.arange(self.committed, self.committed + len(chunk))
            keep = slice(max(first - start, 0), len(chunk))
            logits.append(self.forward(chunk, positions, np.tri(len(chunk), dtype=np.bool_), keep))
            self.committed += len(chunk)
        if not logits:
            return torch.empty(0, self.model.vocab_size, dtype=self.dtype, device=self.device)
        return torch.cat(logits)

    def commit(self, slots: list[int]) -> None:
        """Make the tree slots ``slots`` (in text order) the next committed tokens and forget the other tree slots."""
        self.cache.keep(self.committed, slots)
        self.committed += len(slots)


def _filled_up(
    tokens: IntArray, positions: IntArray, visible: BoolArray, rows: int
) -> tuple[IntArray, IntArray, BoolArray]:
    """The arguments of a forward with as many rows; those behind the real ones are seen by themselves alone."""
    n, window = visible.shape
    wide = np.zeros((rows, window + rows - n), np.bool_)
    wide[:n, :window] = visible
    wide[n:] = True
    return np.resize(tokens, rows), np.resize(positions, rows), wide


def _rounded(tokens: int) -> int:
    """Capacity in steps of 256 slots."""
    return -(-tokens // 256) * 256
