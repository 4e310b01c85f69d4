"""A preallocated KV cache that holds committed tokens and the current draft tree's nodes side by side.

transformers models write into it through their ordinary cache argument; after verification the accepted nodes are
gathered behind the committed tokens. Slot i < committed length is token i of the text.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class TreeLayer(CacheLayerMixin):
    """One layer's keys and values in buffers of fixed capacity, [1, heads, capacity, head_dim] each."""

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, head_dim = states.shape
        return torch.empty(batch, heads, self.capacity, head_dim, dtype=states.dtype, device=states.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        end = self.length + key_states.shape[-2]
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.capacity

    def resize(self, capacity: int) -> None:
        """Move to buffers of another capacity, keeping the contents."""
        self.capacity = capacity
        if self.keys is not None and self.values is not None:
            for name, old in (("keys", self.keys), ("values", self.values)):
                new = self._buffer(old)
                new[:, :, : self.length] = old[:, :, : self.length]
                setattr(self, name, new)

    def gather(self, start: int, slots: torch.Tensor) -> None:
        """Move ``slots`` (int64 [a] on the layer's device, each >= start) to start, start + 1, ..."""
        if self.keys is not None and self.values is not None:
            end = start + len(slots)
            self.keys[:, :, start:end] = self.keys.index_select(2, slots)
            self.values[:, :, start:end] = self.values.index_select(2, slots)


class TreeCache(Cache):
    """KV of one model: ``length`` slots in use out of ``capacity``."""

    def __init__(self, layers: int, capacity: int) -> None:
        self.tree_layers = [TreeLayer(capacity) for _ in range(layers)]
        super().__init__(layers=list(self.tree_layers))

    @property
    def layer_count(self) -> int:
        return len(self.tree_layers)

    @property
    def length(self) -> int:
        return self.tree_layers[0].length

    @property
    def capacity(self) -> int:
        return self.tree_layers[0].capacity

    def reserve(self, capacity: int) -> None:
        """Make room for at least ``capacity`` slots."""
        if capacity > self.capacity:
            for layer in self.tree_layers:
                layer.resize(capacity)

    def truncate(self, length: int) -> None:
        """Forget every slot from ``length`` on."""
        for layer in self.tree_layers:
            layer.length = min(layer.length, length)

    @torch.inference_mode()
    def keep(self, start: int, slots: list[int]) -> None:
        """Keep slots [0, start) and then ``slots`` in this order, contiguously; forget the rest."""
        if slots != list(range(start, start + len(slots))):
            index = torch.tensor(slots)
            for layer in self.tree_layers:
                if layer.keys is not None and layer.keys.device != index.device:
                    index = index.to(layer.keys.device)  # once for all layers that lie together
                layer.gather(start, index)
        self.truncate(start + len(slots))
