"""The paired bootstrap over prompts: rates of sums, ratios of rates, and their 95% percentile intervals.

A drawn prompt brings all that was measured on it, of every method and of every report compared: what prompts differ in
cancels, and the interval shows what is left.

A resample draws one prompt fewer than there are: n draws of n would make the variance of a mean too small by 1 / n,
half of it where a benchmark has two prompts (the rescaling of Rao and Wu, 1988, doi:10.1080/01621459.1988.10478591).
"""

import zlib
from dataclasses import dataclass

import numpy as np

FEWEST_FOR_INTERVAL = 5
"""Of fewer no interval is shown: a bootstrap can only mix what it has seen."""


@dataclass(frozen=True)
class Sums:
    """Tokens of one method and what they took, summed over the turns and repeats of each prompt."""

    tokens: np.ndarray  # float64 [prompts]
    taken: np.ndarray  # float64 [prompts], in seconds, in milliseconds or in steps

    @property
    def rate(self) -> float:
        """Tokens per second (or millisecond, or step) over all prompts."""
        return float(self.tokens.sum() / self.taken.sum())

    def drawn_rates(self, draws: np.ndarray) -> np.ndarray:
        """Rate of each resample. draws: int [resamples, prompts]; returns float64 [resamples].

        A product and a sum, not a matrix product: equal inputs then give equal bits, so a method that equals plain
        has a speed-up of exactly 1.
        """
        return np.asarray((draws * self.tokens).sum(axis=1) / (draws * self.taken).sum(axis=1))


def draw_prompts(prompts: int, resamples: int, seed: int, name: str) -> np.ndarray | None:
    """How often each prompt is drawn in each resample: int [resamples, prompts]; None for fewer than two prompts.

    `name` (a benchmark) is part of the seed, so that another benchmark leaves the intervals of the rest as they were.
    """
    if prompts < 2:
        return None
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return random.multinomial(prompts - 1, np.full(prompts, 1 / prompts), size=resamples)


def drawn_ratios(method: Sums, base: Sums, draws: np.ndarray | None) -> np.ndarray | None:
    """Rate of `method` over rate of `base` in each resample: float64 [resamples], NaN where base emitted nothing."""
    if draws is None:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = method.drawn_rates(draws) / base.drawn_rates(draws)
    return np.where(np.isfinite(ratios), ratios, np.nan)


def percentile_interval(ratios: np.ndarray | None) -> dict[str, float | None]:
    """The 2.5th and 97.5th percentile as {low, high}; null where there is nothing to resample."""
    if ratios is None or np.isnan(ratios).all():
        return {"low": None, "high": None}
    low, high = np.nanpercentile(ratios, [2.5, 97.5])
    return {"low": float(low), "high": float(high)}
