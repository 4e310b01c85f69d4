"""Whether a request calls a drafter model at all: its first call pays for a pass over the prompt.

Margins compare single calls and cannot know of a cost that is paid once a request; it is large where prompts are long
and answers short. So it is weighed once, when the request begins: what calls save on every token, seen in replay of the
traces, against the pass. Both go on growing apart the wrong way as the text goes on (the pass becomes longer, what is
left to save on shorter), so a request that does not admit a drafter at its start never does.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treegraft.costs import CostModel
from treegraft.errors import UserError


@dataclass(frozen=True)
class Saving:
    """Milliseconds that calls save on each token of an answer once a drafter knows the prompt, by the prompt's length.

    Linear in the length's log between the given lengths, constant beyond them: answers to long prompts quote them more,
    which n-grams do for nothing, but nobody has seen how that goes on outside the traces.
    """

    prompt_tokens: tuple[int, ...]
    """Rising, at least one."""
    ms: tuple[float, ...]
    """At these lengths; below 0 where calls lose."""

    def __post_init__(self) -> None:
        lengths = self.prompt_tokens
        if not lengths or len(lengths) != len(self.ms) or lengths[0] < 1 or list(lengths) != sorted(set(lengths)):
            raise UserError(
                f"saving has {len(self.ms)} values for prompts of {list(lengths)} tokens; it must have one for each "
                "length, and the lengths must rise from 1 or more."
            )

    def at(self, prompt_tokens: ArrayLike) -> NDArray[np.float64]:
        """The saving for prompts of these lengths, in an array of their shape."""
        return np.asarray(np.interp(np.log(prompt_tokens), np.log(self.prompt_tokens), self.ms))


def admitted(saving_ms: ArrayLike, new_tokens: int, prompt_ms: ArrayLike) -> NDArray[np.bool_]:
    """Which passes over prompts pay for themselves.

    Args:
        saving_ms: milliseconds that calls save on each token (``Saving.at``).
        new_tokens: most tokens the request may emit.
        prompt_ms: of each pass; broadcast against ``saving_ms``.
    """
    return np.asarray(prompt_ms) < np.asarray(saving_ms) * new_tokens


def prompt_passes(costs: CostModel, prompt_tokens: ArrayLike) -> NDArray[np.float64]:
    """Milliseconds of each dearer drafter's pass over prompts of some lengths [n]: [n, m - 1]."""
    lengths = np.asarray(prompt_tokens)
    passes = np.zeros((*lengths.shape, len(costs.drafters) - 1))
    for j in range(1, len(costs.drafters)):
        passes[..., j - 1] = costs.prompt_ms(j, lengths)
    return passes
