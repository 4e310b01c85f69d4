"""What is known about the next tokens before anything is drafted.

All but the hits of drafter models depends on the text alone, not on how it was drafted: the value system knows it at
every position. A model's hits are known where it was called; the value system takes them as if it had been everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from treegraft.drafters.ngram import HITS_MOVING as MOVING
from treegraft.drafters.ngram import HITS_START as START
from treegraft.drafters.ngram import NgramState


@dataclass(frozen=True)
class Outlook:
    """The state of a request between two steps, as a scheduler sees it."""

    answer_tokens: int = 0
    match: float = 0.0
    """Row of the n-gram table for the longest suffix of the text that occurred before, as a share of all rows."""
    chance: float = 0.0
    """That its best continuation is the next token, by the n-gram drafter's table."""
    hits: float = START
    """Share of the latest tokens that the best continuation foresaw, as a moving average."""
    confidence: float = START
    """Probability that the target gave to its latest tokens, as a moving average."""
    drafter_hits: tuple[float, ...] = ()
    """``Drafter.hits`` of each drafter but the light one, [m - 1]."""


class OutlookTracker:
    """Keeps the outlook of one request; ``light`` is its n-gram drafter's state, None in a pair without one."""

    def __init__(self, light: NgramState | None) -> None:
        self.light = light
        self._answer_tokens = 0
        self._confidence = START

    def commit(self, confidence: Sequence[float]) -> None:
        """Note committed tokens by the target's probability of each; ``light`` has committed them already."""
        for chance in confidence:
            self._confidence += MOVING * (chance - self._confidence)
        self._answer_tokens += len(confidence)

    def now(self, drafter_hits: tuple[float, ...]) -> Outlook:
        """The outlook after the tokens so far, with the hits of all drafters but the light one, [m - 1]."""
        match, chance, hits = (0.0, 0.0, START) if self.light is None else self.light.outlook()
        return Outlook(self._answer_tokens, match, chance, hits, self._confidence, drafter_hits)
