"""Stage traces: labels every scheduling state and writes the two Parquet tables.

Policy iteration runs on the training prompts (pipeline/relabel.py). The labels of validation and test follow its final
learner, so all three tables mean the same.
"""

from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

from pipeline.files import read_json, replacing_folder, write_json, write_text
from pipeline.label import read_manifest
from pipeline.labelled import decide
from pipeline.profile import load_costs, read_profile
from pipeline.progress import log
from pipeline.prompts import SPLITS
from pipeline.relabel import fit_learner, label_training
from treegraft.errors import UserError

if TYPE_CHECKING:
    from pipeline.params import PairConfig
    from treegraft.values.tables import OutcomeTables


def run(config: "PairConfig") -> None:
    """Label all splits, write data/traces/<pair>/ and reports/<pair>/traces.json."""
    from treegraft.values.replay import fixed_actions, replay
    from treegraft.values.schema import data_card
    from treegraft.values.statistics import split_statistics
    from treegraft.values.traces import trace_manifest, write_split
    from treegraft.values.values import margins, visit_weights

    manifest = read_manifest(config)
    calibration = read_json(config.paths.outcomes / "calibration.json", f"run `pipeline label {config.slug}` again")
    tables = {split: load_split(config, manifest, split) for split in SPLITS}
    train = tables["train"]
    trained = label_training(train, config.traces.policy_iterations)
    schedule, labels = trained.schedule, trained.labelling
    log("traces: replayed tokens/s by round of policy iteration: " + ", ".join(f"{1000 * r:.2f}" for r in labels.rates))
    labelled = {"train": trained.labelled(train)}
    policy = {"train": labels.actions}
    learner = None if labels.learnt_from is None else fit_learner(train, *labels.learnt_from)
    for split in SPLITS[1:]:
        part = tables[split]
        actions = fixed_actions(part, schedule) if learner is None else decide(learner, part)
        policy[split] = actions
        played = replay(part, actions)
        labelled[split] = part.labelled(
            margins(part, actions, labels.result.decode_rate, labels.result.lag),
            visit_weights(part, actions, played.visited),
        )
    with replacing_folder(config.paths.traces) as folder:
        for split, part in labelled.items():
            write_split(folder, split, part)
        names, limit = [drafter.name for drafter in config.drafters], manifest["max_new_tokens"]
        about = trace_manifest(folder, labelled, names, manifest["temperature"], limit) | {
            "pair": config.slug,
            "best_fixed": list(schedule),
            "policy_iteration_tokens_per_ms": labels.rates,
        }
        write_json(folder / "calibration.json", calibration)
        write_json(folder / "profile.json", read_profile(config))
        write_text(folder / "README.md", data_card(config.slug, about))
        write_json(folder / "manifest.json", about)
    statistics = {split: split_statistics(part, names, schedule, policy[split]) for split, part in labelled.items()}
    write_json(config.paths.trace_metrics, statistics)


def load_split(config: "PairConfig", manifest: dict[str, Any], split: str) -> "OutcomeTables":
    """The unlabelled tables of one split, from the outcomes of stage label."""
    import numpy as np

    from treegraft.decoder import request_costs
    from treegraft.scheduling.features import feature_names
    from treegraft.values.lattice import Outcomes
    from treegraft.values.tables import build_tables

    if manifest.get("decoding") != config.decoding.model_dump(mode="json"):
        raise UserError(f"the outcomes have other decoding settings: run `pipeline label {config.slug}` again.")
    costs = load_costs(config)
    m = len(manifest["drafters"])
    prompts = []
    for turn in manifest["turns"]:
        if turn["split"] == split:
            path = config.paths.outcomes / turn["file"]
            try:
                with np.load(path) as stored:
                    outcomes = Outcomes(**{name: stored[name] for name in Outcomes.__dataclass_fields__})
            except (OSError, ValueError, KeyError, BadZipFile) as error:
                raise UserError(f"{path} is damaged or missing: run `pipeline label {config.slug}` again.") from error
            constant = request_costs(costs, turn["prompt_tokens"], manifest["max_new_tokens"]).features
            outcomes.features[..., : len(constant)] = constant
            prompts.append((turn["id"], turn["kind"], turn["prompt_tokens"], outcomes))
    settings = config.decoding.settings()
    return build_tables(prompts, feature_names(settings.depth, m), m, settings.depth, settings.verified_sizes, costs)
