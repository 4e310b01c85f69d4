"""What a search has found: tune.json, and a page with the same in one table and one chart."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from pipeline.search_space import KEYS, LABELS

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

    from pipeline.params import PairConfig

SCHEMA = "treegraft.tune/1"
OBJECTIVE = "replayed tokens per ms on the validation prompts: each seed's best round, the mean over the seeds"
ENOUGH = 20  # complete trials; with fewer, eight parameters cannot be told apart


def write_report(config: "PairConfig", study: "Study", present: dict[str, Any]) -> None:
    """Write tune.json and tune.html of the pair."""
    from pipeline.files import write_json, write_text
    from pipeline.report_html import render_tune

    trials = study.get_trials(deepcopy=False)
    shares = importance(study)
    report = {
        "schema": SCHEMA,
        "pair": config.slug,
        "objective": OBJECTIVE,
        "seeds": config.distill.seeds,
        "count": {state.lower(): number for state, number in Counter(trial.state.name for trial in trials).items()},
        "present": present,
        "best": _row(study.best_trial),
        "importance": shares,
        "trials": [_row(trial) for trial in trials],
    }
    write_json(config.paths.tune_report, report)
    page = render_tune(report, KEYS, ENOUGH, None if shares is None else _chart(shares))
    write_text(config.paths.tune_report.with_suffix(".html"), page)


def importance(study: "Study") -> dict[str, float] | None:
    """Each parameter's share (they add up to 1) in the variance of the value; None where too few are complete."""
    import optuna

    complete = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    searched = [trial for trial in complete if trial.params]
    if len(searched) < ENOUGH or len({trial.value for trial in searched}) == 1:
        return None
    # Not Optuna's default (PED-ANOVA), which looks at the best tenth: two trials of twenty say nothing.
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return optuna.importance.get_param_importances(study, evaluator=evaluator, params=list(LABELS))


def _row(trial: "FrozenTrial") -> dict[str, Any]:
    """A pruned trial's value is its speed when it was given up."""
    return {
        "number": trial.number,
        "state": trial.state.name.lower(),
        "value": trial.value,
        "settings": trial.user_attrs.get("settings"),
    }


def _chart(shares: dict[str, float]) -> str:
    """The importance of each parameter as an SVG."""
    from pipeline import svg

    bars = [svg.Bar(LABELS[name], "treegraft", share) for name, share in shares.items()]
    return svg.bars(
        "importance",
        "Importance of each parameter",
        bars,
        high=max(shares.values()),
        reference=1 / len(bars),
        reference_label="all alike",
        unit="",
    )
