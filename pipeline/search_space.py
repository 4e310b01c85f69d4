"""What stage tune searches: keys of section distill, and how a trial's parameters make them up."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

    from pipeline.params import PairConfig

KEYS = ("features", "hidden", "learning_rate", "weight_decay", "visit_exponent", "policy_iterations")
"""The keys of section distill that are searched."""

GROUPS = ("text", "tree")
LAYERS = (1, 3)
WIDTH = (8, 128)  # of the first hidden layer; each further one is half as wide. A wider one takes too long a decision
# Not below 0.0001, which Python writes as 1e-05 and params.yaml would take for a text.
LEARNING_RATE = (1e-4, 3e-2)
WEIGHT_DECAY = (1e-4, 1e-1)
VISIT_EXPONENT = (0.0, 1.0)
POLICY_ITERATIONS = (1, 4)

LABELS = {
    "text": "text features",
    "tree": "tree features",
    "layers": "layers",
    "width": "width",
    "learning_rate": "learning rate",
    "weight_decay": "weight decay",
    "visit_exponent": "visit weight",
    "policy_iterations": "rounds",
}
"""A trial's parameters in words."""


def settings_of(config: "PairConfig") -> dict[str, Any]:
    """The present values of ``KEYS``, in JSON's types."""
    return config.distill.model_dump(mode="json", include=set(KEYS))


def with_settings(config: "PairConfig", settings: dict[str, Any]) -> "PairConfig":
    """``config`` with other values of ``KEYS``."""
    from pipeline.params import DistillParams

    values = config.distill.model_dump() | settings
    distill = DistillParams.model_validate(values, strict=False)  # a list for a tuple
    return config.model_copy(update={"distill": distill})


def suggest(trial: "BaseTrial") -> dict[str, Any]:
    """The settings of a new trial; numbers have few digits, so that what is written down is what was tried."""

    def logarithmic(name: str, low: float, high: float) -> float:
        return float(f"{trial.suggest_float(name, low, high, log=True):.3g}")

    chosen = [group for group in GROUPS if trial.suggest_categorical(group, [True, False])]
    return {
        "features": chosen,
        "hidden": _halving(trial.suggest_int("layers", *LAYERS), trial.suggest_int("width", *WIDTH, log=True)),
        "learning_rate": logarithmic("learning_rate", *LEARNING_RATE),
        "weight_decay": logarithmic("weight_decay", *WEIGHT_DECAY),
        "visit_exponent": round(trial.suggest_float("visit_exponent", *VISIT_EXPONENT), 2),
        "policy_iterations": trial.suggest_int("policy_iterations", *POLICY_ITERATIONS),
    }


def parameters_of(settings: dict[str, Any]) -> dict[str, Any] | None:
    """The parameters from which ``suggest`` makes ``settings``; None where they lie outside of what is searched."""
    hidden = settings["hidden"]
    parameters: dict[str, Any] = {group: group in settings["features"] for group in GROUPS}
    parameters |= {"layers": len(hidden), "width": hidden[0] if hidden else 0}
    parameters |= {name: settings[name] for name in KEYS[2:]}
    ranges = {
        "layers": LAYERS,
        "width": WIDTH,
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "visit_exponent": VISIT_EXPONENT,
        "policy_iterations": POLICY_ITERATIONS,
    }
    inside = all(low <= parameters[name] <= high for name, (low, high) in ranges.items())
    return parameters if inside and _suggested(parameters) == settings else None


def _suggested(parameters: dict[str, Any]) -> dict[str, Any]:
    from optuna.trial import FixedTrial

    return suggest(FixedTrial(parameters))


def _halving(layers: int, width: int) -> list[int]:
    return [width >> layer for layer in range(layers)]
