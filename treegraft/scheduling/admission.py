"""Whether a request calls a drafter model at all: its first call pays for a pass over the prompt.

Margins compare single calls and cannot know of a cost that is paid once a request; it is large where prompts are long
and answers short. So it is weighed once, when the request begins: what calls save on every token, seen in replay of the
traces, against the pass. Both go on growing apart the wrong way as the text goes on (the pass becomes longer, what is
left to save on shorter), so a request that does not admit a drafter at its start never does.
"""

from typing import overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from treegraft.costs import CostModel


@overload
def admitted(saving_ms: float, new_tokens: int, prompt_ms: float) -> bool: ...
@overload
def admitted(saving_ms: float, new_tokens: int, prompt_ms: NDArray[np.float64]) -> NDArray[np.bool_]: ...
def admitted(saving_ms: float, new_tokens: int, prompt_ms: float | NDArray[np.float64]) -> bool | NDArray[np.bool_]:
    """Whether a pass over a prompt pays for itself, or which of several do.

    Args:
        saving_ms: milliseconds that calls save on each token once a drafter knows the prompt.
        new_tokens: most tokens the request may emit.
        prompt_ms: of one pass, or of several in any shape.
    """
    return prompt_ms < saving_ms * new_tokens


def prompt_passes(costs: CostModel, prompt_tokens: ArrayLike) -> NDArray[np.float64]:
    """Milliseconds of each dearer drafter's pass over prompts of some lengths [n]: [n, m - 1]."""
    lengths = np.asarray(prompt_tokens)
    passes = np.zeros((*lengths.shape, len(costs.drafters) - 1))
    for j in range(1, len(costs.drafters)):
        passes[..., j - 1] = costs.prompt_ms(j, lengths)
    return passes
