"""A tiny pair with an exported scheduler in the folders that stage distill and its forerunners leave.

Guarantees: the drafter is the target's first layer, so that drafts are right now and then; the scheduler calls it in
the first layer of every step and skips in the others.
"""

from pathlib import Path

import numpy as np

from tests.treegraft.tiny import cost_model, save_tiny, tiny_tokenizer
from treegraft.costs import LatencyCurve
from treegraft.drafters.ngram import prior_table
from treegraft.scheduling.admission import Saving
from treegraft.scheduling.checkpoint import SchedulerConfig, save_scheduler
from treegraft.scheduling.features import feature_names
from treegraft.scheduling.network import MarginNetwork
from treegraft.settings import NgramSettings
from treegraft.values.calibration import Calibration
from treegraft.vocabulary import tokenizer_hash

PAIR = "tiny-1.0"
TARGET, DRAFTER = "tiny-target", "tiny-drafter"
DEPTH = 3


def make_scheduler(root: Path) -> Path:
    """Write target, drafter and scheduler below ``root``/models; returns the scheduler's folder."""
    save_tiny(root / "models/targets" / TARGET, seed=1, layers=2)
    save_tiny(root / "models/drafters" / DRAFTER, seed=1, layers=1)
    names = feature_names(DEPTH, 2)
    weights = np.zeros((len(names), 1), np.float32)
    weights[names.index("layer_share")] = -2.0
    means, scales = np.zeros(len(names), np.float32), np.ones(len(names), np.float32)
    network = MarginNetwork([weights], [np.ones(1, np.float32)], means, scales)
    cheap = LatencyCurve([1, 64], [1], [[0.1], [0.1001]])
    costs = cost_model(LatencyCurve([1, 64], [1], [[1.0], [1.0001]]), (None, cheap))
    ngram = NgramSettings(3, 2, 2, 3)
    folder = root / "models/schedulers" / PAIR
    save_scheduler(
        folder,
        network,
        SchedulerConfig(
            pair=PAIR,
            drafters=("ngram", DRAFTER),
            feature_names=tuple(names),
            means=tuple(means.tolist()),
            scales=tuple(scales.tolist()),
            hidden=(),
            depth=DEPTH,
            width=3,
            look_back=3,
            ngram=ngram,
            verified_sizes=(0, 1, 2, 4, 8),
            rate_tokens_per_ms=1.0,
            saving=Saving((1,), (1000.0,)),
            best_fixed=(0,) * DEPTH,
            calibration=Calibration(prior_table(ngram), (1.0, 1.1), (0.5, 0.6)).to_json(),
            cost_model=costs.to_json(),
            cost_model_digest=costs.digest(),
            tokenizer_hashes=dict.fromkeys((TARGET, DRAFTER), tokenizer_hash(tiny_tokenizer())),
            replay={},
            provenance={},
        ),
    )
    return folder
