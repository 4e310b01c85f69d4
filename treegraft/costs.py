"""What decoding steps cost: medians of measured latencies, interpolated; the clock of replay and of the verified size.

Measured per pair and device by stage ``profile``; a step's modelled time is the sum of its layers, its verification
and a constant for everything outside the models.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treegraft.errors import UserError


class LatencyCurve:
    """Milliseconds of one forward against new tokens and context length: bilinear, rising in the new tokens.

    Args:
        new_tokens: int [a], rising; context_lengths: int [b], rising; ms: float [a, b], medians.
    """

    def __init__(self, new_tokens: ArrayLike, context_lengths: ArrayLike, ms: ArrayLike) -> None:
        self.new_tokens = np.asarray(new_tokens, np.float64)
        self.context_lengths = np.asarray(context_lengths, np.float64)
        measured = np.asarray(ms, np.float64)
        if measured.shape != (len(self.new_tokens), len(self.context_lengths)) or len(self.new_tokens) < 2:
            raise UserError("the cost model has a grid of the wrong shape; run stage profile again.")
        if not (np.isfinite(measured).all() and (measured > 0).all()):
            raise UserError("the cost model holds a time that is not a positive number; run stage profile again.")
        # A larger forward never takes less time; where it seems to, the clock was noisy.
        self.grid = np.maximum.accumulate(measured, axis=0)

    def ms(self, new_tokens: ArrayLike, context: ArrayLike) -> NDArray[np.float64]:
        """Time of a forward of ``new_tokens`` after ``context`` tokens; arrays are broadcast.

        Beyond the grid the last segment's slope goes on in new tokens; the context is clamped to the grid.
        """
        tokens, length = np.broadcast_arrays(np.asarray(new_tokens, np.float64), np.asarray(context, np.float64))
        row = np.clip(np.searchsorted(self.new_tokens, tokens, side="right") - 1, 0, len(self.new_tokens) - 2)
        low, high = self.new_tokens[row], self.new_tokens[row + 1]
        share = np.maximum((tokens - low) / (high - low), 0.0)
        if len(self.context_lengths) == 1:
            at_low, at_high = self.grid[row, 0], self.grid[row + 1, 0]
        else:
            length = np.clip(length, self.context_lengths[0], self.context_lengths[-1])
            column = np.searchsorted(self.context_lengths, length, side="right") - 1
            column = np.clip(column, 0, len(self.context_lengths) - 2)
            left, right = self.context_lengths[column], self.context_lengths[column + 1]
            along = (length - left) / (right - left)
            at_low = self.grid[row, column] * (1 - along) + self.grid[row, column + 1] * along
            at_high = self.grid[row + 1, column] * (1 - along) + self.grid[row + 1, column + 1] * along
        cost: NDArray[np.float64] = at_low + (at_high - at_low) * share
        # No new token, no forward.
        return np.where(tokens > 0, cost, 0.0)

    def to_json(self) -> dict[str, Any]:
        """Plain lists."""
        return {
            "new_tokens": self.new_tokens.astype(int).tolist(),
            "context_lengths": self.context_lengths.astype(int).tolist(),
            "ms": np.round(self.grid, 4).tolist(),
        }


@dataclass(frozen=True)
class CostModel:
    """Costs of one pair on one device."""

    target: LatencyCurve
    drafters: tuple[LatencyCurve | None, ...]
    """Of each drafter, [m]; None for the n-gram drafter, whose layers cost ``light_ms``."""
    target_prefill: LatencyCurve
    """Of the target where only the last of the new tokens gets logits."""
    drafter_prefill: tuple[LatencyCurve | None, ...]
    """The same of each drafter, [m]: tokens it catches up on get no logits."""
    light_ms: float
    """One layer of the n-gram drafter."""
    graft_ms: float
    """Tree work of one call of a drafter model."""
    scheduler_ms: float
    """One decision."""
    step_ms: float
    """The rest of a step: pruning, walk, commit, bookkeeping."""

    def verify_ms(self, sizes: ArrayLike, context: ArrayLike) -> NDArray[np.float64]:
        """Time to verify the root and ``sizes`` nodes after ``context`` committed tokens."""
        return self.target.ms(np.asarray(sizes) + 1, context)

    def layer_ms(
        self, drafter: int, new_tokens: ArrayLike, context: ArrayLike, lag: ArrayLike = 0
    ) -> NDArray[np.float64]:
        """Time of a layer in which ``drafter`` processes ``lag`` committed tokens it lacks and ``new_tokens`` nodes."""
        curve, prefill = self.drafters[drafter], self.drafter_prefill[drafter]
        if curve is None or prefill is None:
            shape = np.broadcast(np.asarray(new_tokens), np.asarray(context), np.asarray(lag)).shape
            return np.full(shape, self.light_ms)
        behind = np.asarray(lag, np.float64)
        catch_up = np.where(behind > 0, prefill.ms(behind + 1, context) - prefill.ms(1, context), 0.0)
        # No node to process, no forward, and then no catching up either.
        return self.graft_ms + curve.ms(new_tokens, context) + np.where(np.asarray(new_tokens) > 0, catch_up, 0.0)

    def prefill_ms(self, prompt_tokens: ArrayLike) -> NDArray[np.float64]:
        """The target's pass over a prompt; its last token belongs to the first step."""
        return self.target_prefill.ms(np.asarray(prompt_tokens) - 1, 0)

    def prompt_ms(self, drafter: int, prompt_tokens: ArrayLike) -> NDArray[np.float64]:
        """The least that a drafter's pass over a prompt can add to its first call, whatever the context."""
        prefill = self.drafter_prefill[drafter]
        if prefill is None:
            return np.zeros(np.shape(prompt_tokens))
        tokens = np.asarray(prompt_tokens)[..., None]
        added = prefill.ms(tokens, prefill.context_lengths) - prefill.ms(1, prefill.context_lengths)
        return np.maximum(added.min(axis=-1), 0.0)

    def to_json(self) -> dict[str, Any]:
        """What ``from_json`` reads."""
        return {
            "target": self.target.to_json(),
            "drafters": [None if curve is None else curve.to_json() for curve in self.drafters],
            "target_prefill": self.target_prefill.to_json(),
            "drafter_prefill": [None if curve is None else curve.to_json() for curve in self.drafter_prefill],
            "light_ms": round(self.light_ms, 5),
            "graft_ms": round(self.graft_ms, 5),
            "scheduler_ms": round(self.scheduler_ms, 5),
            "step_ms": round(self.step_ms, 5),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> "CostModel":
        """Rebuild a cost model; raises UserError where a part is missing or malformed."""
        try:
            return CostModel(
                target=LatencyCurve(**data["target"]),
                drafters=tuple(None if curve is None else LatencyCurve(**curve) for curve in data["drafters"]),
                target_prefill=LatencyCurve(**data["target_prefill"]),
                drafter_prefill=tuple(
                    None if curve is None else LatencyCurve(**curve) for curve in data["drafter_prefill"]
                ),
                light_ms=float(data["light_ms"]),
                graft_ms=float(data["graft_ms"]),
                scheduler_ms=float(data["scheduler_ms"]),
                step_ms=float(data["step_ms"]),
            )
        except (KeyError, TypeError) as error:
            raise UserError(f"the cost model lacks or misnames a part ({error}); run stage profile again.") from error

    def digest(self) -> str:
        """Hex sha256 of the model's JSON."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()
