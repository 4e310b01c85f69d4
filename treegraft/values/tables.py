"""All schedules' outcomes of many prompts as arrays: what replay, values and distillation work on."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treegraft.costs import CostModel
from treegraft.values.lattice import Outcomes
from treegraft.values.states import offset


@dataclass(frozen=True)
class OutcomeTables:
    """Positions of many prompts (P in all), rows of one prompt contiguous and in text order.

    ``features``, ``accepted``, ``mass``, ``nodes``, ``layer_tokens``, ``path_processed`` and ``mean_accepted`` are
    those of ``Outcomes``. ``margins`` [P, S, m - 1] and ``visits`` [P, S] are the labels, zero before labelling.
    """

    prompt_ids: list[str]
    kinds: list[str]
    """Of each prompt."""
    prompt_tokens: NDArray[np.int64]
    """Of each prompt."""
    prompt_of: NDArray[np.int64]
    """[P]: index into the prompts."""
    position: NDArray[np.int64]
    """[P]: answer tokens before the step, from 0."""
    left: NDArray[np.int64]
    """[P]: answer tokens from here on."""
    feature_names: list[str]
    drafters: int
    depth: int
    sizes: tuple[int, ...]
    costs: CostModel
    features: NDArray[np.float32]
    accepted: NDArray[np.int16]
    mass: NDArray[np.float32]
    nodes: NDArray[np.int16]
    layer_tokens: NDArray[np.int16]
    path_processed: NDArray[np.int16]
    mean_accepted: NDArray[np.float32]
    margins: NDArray[np.float32]
    visits: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.position)

    @property
    def actions(self) -> int:
        """m, the number of actions."""
        return self.drafters

    @property
    def sampled(self) -> bool:
        """Whether the text was drawn, so that ``accepted`` is one draw of many."""
        return self.mean_accepted.shape[-1] > 0

    @property
    def context(self) -> NDArray[np.int64]:
        """[P]: committed tokens before the root."""
        return self.prompt_tokens[self.prompt_of] + self.position - 1

    @property
    def questions(self) -> list[str]:
        """The question of every turn in ``prompt_ids``: ids are <kind>/<question>/<turn>, and turns stay together."""
        return [turn.rsplit("/", 1)[0] for turn in self.prompt_ids]

    def select(self, prompts: NDArray[np.int64]) -> "OutcomeTables":
        """The tables of some prompts (indices, ascending) alone."""
        rows = np.flatnonzero(np.isin(self.prompt_of, prompts))
        per_position = {"position", "left", "margins", "visits", *Outcomes.__dataclass_fields__}
        values: dict[str, Any] = {name: getattr(self, name)[rows] for name in per_position}
        return replace(
            self,
            prompt_ids=[self.prompt_ids[i] for i in prompts],
            kinds=[self.kinds[i] for i in prompts],
            prompt_tokens=self.prompt_tokens[prompts],
            prompt_of=np.searchsorted(prompts, self.prompt_of[rows]),
            **values,
        )

    def with_features(self, names: list[str]) -> "OutcomeTables":
        """The same tables with only the features ``names``, in that order."""
        if names == self.feature_names:
            return self
        columns = [self.feature_names.index(name) for name in names]
        return replace(self, feature_names=names, features=self.features[..., columns])

    def labelled(self, margins: NDArray[np.float64], visits: NDArray[np.float64]) -> "OutcomeTables":
        """The same tables with labels."""
        return replace(self, margins=margins.astype(np.float32), visits=visits.astype(np.float32))


def build_tables(
    prompts: list[tuple[str, str, int, Outcomes]],
    feature_names: list[str],
    drafters: int,
    depth: int,
    sizes: tuple[int, ...],
    costs: CostModel,
) -> OutcomeTables:
    """Put the outcomes of prompts, each (id, kind, prompt tokens, outcomes), behind each other; unlabelled."""
    lengths = [len(outcomes.nodes) for *_, outcomes in prompts]
    stacked = {
        name: np.concatenate([getattr(outcomes, name) for *_, outcomes in prompts])
        for name in Outcomes.__dataclass_fields__
    }
    states = offset(depth, drafters)
    return OutcomeTables(
        prompt_ids=[prompt[0] for prompt in prompts],
        kinds=[prompt[1] for prompt in prompts],
        prompt_tokens=np.array([prompt[2] for prompt in prompts], np.int64),
        prompt_of=np.repeat(np.arange(len(prompts)), lengths),
        position=np.concatenate([np.arange(length) for length in lengths]),
        left=np.concatenate([np.arange(length, 0, -1) for length in lengths]),
        feature_names=feature_names,
        drafters=drafters,
        depth=depth,
        sizes=sizes,
        costs=costs,
        margins=np.zeros((sum(lengths), states, drafters - 1), np.float32),
        visits=np.zeros((sum(lengths), states), np.float32),
        **stacked,
    )
