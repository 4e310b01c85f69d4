"""Labels by policy iteration: what stage traces does to the tables of a pair, whatever cost model they hold.

Start from the best fixed schedule, label, fit a quick learner that decides each prompt without having seen it, replay,
relabel. Labels depend on the clock and outcomes do not, so `pipeline generalize` labels the same tables anew for
every hardware regime.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.labelled import LabelledStates, Predict, decide, rows_of

if TYPE_CHECKING:
    from treegraft.values.tables import OutcomeTables
    from treegraft.values.values import FloatArray, IntArray, Labelling

FOLDS = 4  # each training prompt is decided by a learner fitted on the other three quarters


@dataclass(frozen=True)
class TrainingLabels:
    """Where policy iteration on the training tables started and ended."""

    schedule: tuple[int, ...]
    """The best fixed schedule, from which it started."""
    labelling: "Labelling"

    def labelled(self, train: "OutcomeTables") -> "OutcomeTables":
        """The training tables with their labels."""
        return train.labelled(self.labelling.margins, self.labelling.visits)


def label_training(train: "OutcomeTables", rounds: int) -> TrainingLabels:
    """Policy iteration on the training tables, ``rounds`` relabellings at most."""
    from treegraft.values.replay import best_fixed, fixed_actions
    from treegraft.values.values import policy_iteration

    schedule = best_fixed(train)
    return TrainingLabels(schedule, policy_iteration(train, fixed_actions(train, schedule), fit_out_of_fold, rounds))


def fit_learner(tables: "OutcomeTables", margins: "FloatArray", visits: "FloatArray") -> Predict:
    """Features [n, F] -> margins [n, m - 1]: quick, only meant to find the policy under which margins are measured."""
    import numpy as np

    from pipeline.baselines import fit_baseline

    labels = margins.reshape(-1, margins.shape[-1]).astype(np.float32)
    states = LabelledStates(rows_of(tables.features), labels, visits.ravel().astype(np.float32))
    return fit_baseline("gradient_boosting", states)


def fit_out_of_fold(tables: "OutcomeTables", margins: "FloatArray", visits: "FloatArray") -> "IntArray":
    """Actions in every state, each question's from a learner fitted on the other folds' questions: int64 [P, S]."""
    import numpy as np

    from pipeline.baselines import grouped_folds

    questions = np.array(tables.questions)  # whose turns share a fold
    actions = np.zeros(tables.features.shape[:2], np.int64)
    for fitted, held_out in grouped_folds(questions[tables.prompt_of], FOLDS):
        rest, part = (tables.select(np.unique(tables.prompt_of[rows])) for rows in (fitted, held_out))
        actions[held_out] = decide(fit_learner(rest, margins[fitted], visits[fitted]), part)
    return actions
