"""Turns scores into probabilities of being the target's choice, fitted on the target's own answers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from treegraft.draft_vocabulary import UNKNOWN
from treegraft.drafters.lm import foreseen
from treegraft.drafters.ngram import HITS_START, NgramCounts, NgramState, prior_table
from treegraft.errors import UserError
from treegraft.settings import NgramSettings
from treegraft.tree import IntArray

TEMPERATURES = np.round(np.geomspace(0.3, 3.0, 31), 4)
PRIOR_TRIALS = 4.0  # how many observations the prior table counts for


@dataclass(frozen=True)
class Calibration:
    """Both kinds of scores; lives in the scheduler checkpoint."""

    ngram_table: NDArray[np.float64]
    """Chance that a continuation is the next token, of ``treegraft.drafters.ngram.table_shape``."""
    temperatures: tuple[float, ...]
    """Of each drafter, [m]; 1 for a drafter that is no model."""
    hits: tuple[float, ...]
    """Share of the target's tokens among those that each drafter proposes first, [m]; for a drafter that is no model
    what its own moving average begins with."""

    def to_json(self) -> dict[str, Any]:
        """What ``from_json`` reads."""
        return {
            "ngram_table": np.round(self.ngram_table, 6).tolist(),
            "temperatures": list(self.temperatures),
            "hits": list(self.hits),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Calibration":
        """Raises UserError where a part is missing or is no probability, temperature or share."""
        try:
            table = np.array(data["ngram_table"], np.float64)
            temperatures, hits = (tuple(float(value) for value in data[name]) for name in ("temperatures", "hits"))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"the calibration lacks or misnames a part ({error}); run stage label again.") from error
        usable = table.ndim == 2 and ((table > 0) & (table <= 1)).all() and all(t > 0 for t in temperatures)
        if not usable or len(hits) != len(temperatures) or not all(0 <= share <= 1 for share in hits):
            raise UserError(
                "the calibration holds a value that is no probability, temperature or share; run stage label again."
            )
        return Calibration(table, temperatures, hits)


class NgramFit:
    """The n-gram drafter's table, from answers whose prompts it has seen."""

    def __init__(self, settings: NgramSettings) -> None:
        self.settings = settings
        self.counts = NgramCounts(settings)

    def add(self, text: IntArray, prompt_tokens: int, alternatives: IntArray) -> None:
        """Count every position of an answer.

        Args:
            text: int64 [S], prompt and answer; alternatives: int64 [S - prompt_tokens, r], see ``Drafter.commit``.
        """
        state = NgramState(self.settings, prior_table(self.settings))
        state.read(text[:prompt_tokens].tolist())
        state.commit(text[prompt_tokens:].tolist(), alternatives.tolist())
        self.counts.hits += state.counts.hits
        self.counts.trials += state.counts.trials

    def table(self) -> NDArray[np.float64]:
        """Beta-smoothed chances, strictly between 0 and 1."""
        return self.counts.table(prior_table(self.settings), PRIOR_TRIALS)


class ModelFit:
    """What a drafter model makes of the target's tokens: their negative log-likelihood on a grid of temperatures, and
    how many of them are among its ``width`` likeliest."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.loss = np.zeros(len(TEMPERATURES))
        self.foreseen = self.positions = 0

    @torch.inference_mode()
    def add(self, logits: torch.Tensor, chosen: IntArray) -> None:
        """logits: [n, columns] of the drafter; chosen: int64 [n], the column of the target's token after each position.

        Positions whose token the drafter cannot say (UNKNOWN) are left out of the likelihood.
        """
        self.foreseen += int(foreseen(logits, chosen, self.width).sum())
        self.positions += len(chosen)
        known = torch.from_numpy(chosen != UNKNOWN).to(logits.device)
        target = torch.from_numpy(chosen).to(logits.device)[known, None]
        logits = logits[known].float()
        for i, temperature in enumerate(TEMPERATURES):
            scaled = logits / float(temperature)
            picked = scaled.gather(1, target)[:, 0]
            self.loss[i] += float((torch.logsumexp(scaled, dim=-1) - picked).double().sum())

    def temperature(self) -> float:
        """The likeliest temperature of the grid; 1 where nothing was added."""
        return float(TEMPERATURES[int(self.loss.argmin())]) if self.loss.any() else 1.0

    def hits(self) -> float:
        """Share of the tokens that were foreseen; the start of all moving averages where nothing was added."""
        return self.foreseen / self.positions if self.positions else HITS_START
