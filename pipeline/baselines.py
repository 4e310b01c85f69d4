"""The simpler learners that every report sets beside the student: scikit-learn models of the same labelled states.

Each becomes a function from features [n, F] to margins [n, m - 1] (or scores whose sign decides alike), so that it can
be replayed as a policy. It knows nothing of tables; whoever calls it replays.
"""

from collections.abc import Iterator

import numpy as np

from pipeline.labelled import LabelledStates, Predict

BASELINES = ("linear", "logistic", "decision_tree", "gradient_boosting")
"""Names, as in distill.json."""

TREE_DEPTH = 4
MAX_BINS = 255  # scikit-learn's own limit


def fit_baseline(name: str, states: LabelledStates) -> Predict:
    """Fit the learner ``name`` (one of ``BASELINES``), weighted by visits; equal states give an equal function."""
    used = states.weights > 0
    features, margins = states.features[used], states.margins[used]
    # Mean 1, so that a penalty means the same whatever unit the visits are counted in.
    weights = states.weights[used] / states.weights[used].mean()
    fit = {
        "linear": _linear,
        "logistic": _logistic,
        "decision_tree": _decision_tree,
        "gradient_boosting": _gradient_boosting,
    }[name]
    columns = [fit(features, margins[:, j], weights) for j in range(margins.shape[1])]
    return lambda rows: np.stack([column(rows) for column in columns], axis=1)


def grouped_folds(groups: np.ndarray, folds: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Row numbers (fitted, held out) of each fold; no group is on both sides. Fewer folds where there are fewer groups.

    Args:
        groups: int [n], the prompt of every row.
        folds: at most so many; nothing is yielded for fewer than two groups.
    """
    from sklearn.model_selection import GroupKFold

    folds = min(folds, len(np.unique(groups)))
    if folds >= 2:
        yield from GroupKFold(n_splits=folds).split(groups, groups=groups)


def _linear(features: np.ndarray, margins: np.ndarray, weights: np.ndarray) -> Predict:
    from sklearn.linear_model import LinearRegression

    return LinearRegression().fit(features.astype(np.float64), margins, sample_weight=weights).predict


def _logistic(features: np.ndarray, margins: np.ndarray, weights: np.ndarray) -> Predict:
    """Predicts whether the call pays; a wrong answer weighs what it costs, |margin| tokens a visit."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    cost = np.abs(margins) * weights
    decided = cost > 0
    pays = margins[decided] > 0
    if pays.all() or not pays.any():  # one class only (or no row at all): nothing to learn
        constant = 1.0 if pays.size and pays.all() else -1.0
        return lambda rows: np.full(len(rows), constant)
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))
    cost = cost[decided] / cost[decided].mean()
    return model.fit(features[decided], pays, logisticregression__sample_weight=cost).decision_function


def _decision_tree(features: np.ndarray, margins: np.ndarray, weights: np.ndarray) -> Predict:
    from sklearn.tree import DecisionTreeRegressor

    return DecisionTreeRegressor(max_depth=TREE_DEPTH, random_state=0).fit(features, margins, weights).predict


def _gradient_boosting(features: np.ndarray, margins: np.ndarray, weights: np.ndarray) -> Predict:
    from sklearn.ensemble import HistGradientBoostingRegressor

    # Binned here, since scikit-learn 1.9 takes minutes to bin weighted rows: it sorts anew for every threshold.
    # Columns of few values it takes as they are, and trees care for order only.
    edges = [np.unique(np.quantile(column, np.linspace(0, 1, MAX_BINS)[1:-1])) for column in features.T]

    def binned(rows: np.ndarray) -> np.ndarray:
        return np.stack([np.searchsorted(edge, column) for edge, column in zip(edges, rows.T, strict=True)], axis=1)

    # Its own early stopping would hold out rows of the same prompts; the usual 100 small trees need none.
    model = HistGradientBoostingRegressor(early_stopping=False, random_state=0)
    model.fit(binned(features), margins, sample_weight=weights)
    return lambda rows: model.predict(binned(rows))
