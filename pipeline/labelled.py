"""Labelled scheduling states as training rows, and the decisions of whatever was fitted to them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from treegraft.errors import UserError

if TYPE_CHECKING:
    from treegraft.scheduling.admission import Saving
    from treegraft.scheduling.network import MarginNetwork
    from treegraft.values.tables import OutcomeTables

Predict = Callable[[np.ndarray], np.ndarray]
"""Features [n, F] -> margins [n, m - 1] in tokens, or scores whose sign decides alike."""


@dataclass(frozen=True)
class LabelledStates:
    """Training data: one row a scheduling state."""

    features: np.ndarray
    """float32 [n, F]."""
    margins: np.ndarray
    """float [n, m - 1]: advantage of each dearer drafter over the light one, in tokens."""
    weights: np.ndarray
    """float [n]: how often the state is visited; 0 leaves a row out."""

    def __post_init__(self) -> None:
        rows = len(self.features)
        if self.features.ndim != 2 or self.margins.ndim != 2 or len(self.margins) != rows or len(self.weights) != rows:
            raise ValueError(f"shapes {self.features.shape}, {self.margins.shape}, {self.weights.shape} do not fit")
        for name in ("features", "margins", "weights"):
            values = getattr(self, name)
            if bad := int((~np.isfinite(values)).sum()):
                row = [int(index) for index in np.argwhere(~np.isfinite(values))[0]]
                raise UserError(
                    f"{bad} of {values.size} training {name} are NaN or infinite, the first at {row} (row, column); "
                    "make the traces again with `pipeline traces`."
                )
        if (self.weights < 0).any() or not (self.weights > 0).any():
            raise UserError("The training weights must not be negative, and some must be above 0.")


def rows_of(values: np.ndarray) -> np.ndarray:
    """[P, S, n] as [P * S, n]."""
    return values.reshape(-1, values.shape[-1])


@dataclass(frozen=True)
class Admission:
    """What decides, when a request begins, whether it calls drafter models at all (``scheduling/admission.py``)."""

    saving: "Saving"
    new_tokens: int
    """Most tokens of an answer."""


def decide(
    predict: "MarginNetwork | Predict", tables: "OutcomeTables", admission: Admission | None = None
) -> np.ndarray:
    """The action in every state, int [P, S], of a network or of any function from features to margins.

    ``admission``: what requests must weigh before they call; None: all of them may.
    """
    from treegraft.scheduling.admission import admitted, prompt_passes
    from treegraft.scheduling.network import MarginNetwork
    from treegraft.values.values import greedy_actions

    margins_of = predict.margins if isinstance(predict, MarginNetwork) else predict
    margins = margins_of(rows_of(tables.features)).reshape(*tables.features.shape[:2], -1)  # [P, S, m - 1]
    if admission is not None:
        passes = prompt_passes(tables.costs, tables.prompt_tokens)
        saving = admission.saving.at(tables.prompt_tokens)  # [prompts]
        may = admitted(saving[:, None], admission.new_tokens, passes)  # [prompts, m - 1]
        margins = np.where(may[tables.prompt_of][:, None], margins, 0.0)
    return greedy_actions(margins)
