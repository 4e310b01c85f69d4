"""Stage evaluate: measured speed of every method on the test prompts, in one process, interleaved prompt by prompt.

Writes data/evaluation/<pair>/runs.jsonl (one row a temperature, turn, method and repeat), summary.json, and steps.jsonl
(a few single steps for the report to draw; see `pipeline.step_recorder`).
"""

import json
import random
import shutil
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.files import (
    append_jsonl,
    digest,
    file_digest,
    library_code,
    read_jsonl,
    replacing_folder,
    scratch_folder,
    write_json,
    write_text,
)
from pipeline.labelled import Admission, decide
from pipeline.measurements import OWN_METHODS
from pipeline.methods import Bench, Method, ecosystem_methods, make_methods, prepare
from pipeline.progress import log, progress
from pipeline.prompts import Prompt, select_prompts, take
from pipeline.provenance import code_provenance, input_digests, source_digests
from pipeline.stages import WHO_WORKS
from pipeline.strong_baseline import StrongAlone, tune_strong
from treegraft.errors import UserError

TUNING_SHARE = 3  # of the validation prompts of every kind, one in so many
EXPERIMENT = {"seed", "profile", "decoding", "prompts", "label", "traces", "distill", "evaluate"}
"""What of params.yaml a report repeats, so that the run can be done again; models and machine stand there anyway."""

if TYPE_CHECKING:
    import numpy as np

    from pipeline.params import PairConfig


def run(config: "PairConfig") -> None:
    """Measure all methods on all test prompts; a killed run goes on with the turns that are missing."""
    from pipeline.step_recorder import record_steps

    code = source_digests()
    splits = select_prompts(config.prompts.sources, config.label)
    prompts = splits["test"]
    inputs = input_digests(config, prompts)
    bench = prepare(config)
    _refuse_seen(bench, prompts)
    scratch = _scratch(config, inputs)
    begun = scratch / "begun.json"
    if not begun.exists():
        write_json(begun, {"started": _now()})
    others = ecosystem_methods(bench)
    rows: list[dict[str, Any]] = []
    tuned = []
    for temperature in config.evaluate.temperatures:
        folder = scratch / f"temperature-{temperature}"
        strong = tuned_strong(bench, splits["validation"], temperature, folder / "strong.json")
        tuned.append(strong)
        rows += measure(bench, make_methods(bench, strong) | others, prompts, temperature, folder / "turns.jsonl")
    first_rows = [row for row in rows if row["temperature"] == config.evaluate.temperatures[0]]
    steps = record_steps(bench, prompts, first_rows, scratch / "steps.jsonl")
    summary = summarize(bench, prompts, tuned) | {
        "started": json.loads(begun.read_text(encoding="utf-8"))["started"],
        "ended": _now(),
        "provenance": {
            **code_provenance(code),
            "params_digest": digest(config.model_dump(mode="json")),
            "inputs": inputs,
            "versions": {
                name: version(name) for name in ("torch", "transformers", "lightning", "scikit-learn", "numpy")
            },
        },
    }
    with replacing_folder(config.paths.evaluation) as folder:
        for name, lines in (("runs.jsonl", rows), ("steps.jsonl", steps)):
            write_text(folder / name, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        write_json(folder / "summary.json", summary)
    shutil.rmtree(scratch)


def _refuse_seen(bench: Bench, prompts: list[Prompt]) -> None:
    """UserError if a prompt to be measured is one that the scheduler was trained or chosen on."""
    for split in ("train", "validation"):
        if seen := sorted({prompt.id for prompt in prompts} & set(bench.tables[split].questions)):
            raise UserError(
                f"the prompt {seen[0]} is to be measured, but it is among those that the scheduler was made with "
                f"({split}): run `pipeline label {bench.config.slug}` and all stages after it again."
            )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def tuned_strong(bench: Bench, prompts: list[Prompt], temperature: float, path: Path) -> StrongAlone:
    """The best drafter model alone, measured on some validation prompts, or as ``path`` has it."""
    from treegraft.pair import encode_turns
    from treegraft.values.replay import joint_rate, replay_fixed

    if not path.exists():
        plan = (len(bench.config.drafters) - 1,) * bench.config.decoding.depth
        guess = joint_rate([replay_fixed(bench.tables["train"], plan)])
        some = take(prompts, -(-bench.config.label.validation_per_kind // TUNING_SHARE))
        texts = [encode_turns(bench.models.target, prompt.turns[:1], []) for prompt in some]
        write_json(path, asdict(tune_strong(bench, texts, temperature, guess)))
    return StrongAlone(**json.loads(path.read_text(encoding="utf-8")))


def measure(
    bench: Bench, methods: dict[str, Method], prompts: list[Prompt], temperature: float, turns: Path
) -> list[dict[str, Any]]:
    """All methods on every turn, in an order shuffled anew for each turn and repeat; returns the rows of runs.jsonl.

    Later turns follow on plain decoding's first answers, so that all methods see the same text. ``turns`` gets one line
    a finished turn, so a kill costs the turn it falls into and nothing else.
    """
    from treegraft.pair import encode_turns
    from treegraft.sampling import SamplingSettings

    config = bench.config
    done = {(turn["prompt_id"], turn["turn"]): turn for turn in read_jsonl(turns)}
    if done:
        log(f"evaluate: {len(done)} turns were measured by an earlier run")
    warm = encode_turns(bench.models.target, prompts[0].turns[:1], [])[-64:]
    for method in methods.values():
        method(warm, SamplingSettings(temperature=temperature))
    for prompt in progress(prompts, desc=f"evaluate, temperature {temperature:g}", unit="prompt"):
        answers: list[str] = []
        for number in range(len(prompt.turns)):
            turn = done.get((prompt.id, number))
            if turn is None:
                tokens = encode_turns(bench.models.target, prompt.turns, answers)
                rows = _measure_turn(config, methods, prompt, number, tokens, temperature)
                plain = next(row for row in rows if row["method"] == "plain")
                _compare(bench, tokens, rows)
                turn = {"prompt_id": prompt.id, "turn": number, "answer": plain.pop("text"), "rows": rows}
                for row in rows:
                    row.pop("text", None)
                append_jsonl(turns, turn)
                done[prompt.id, number] = turn
            answers.append(turn["answer"])
    return [row for turn in done.values() for row in turn["rows"]]


def _measure_turn(
    config: "PairConfig",
    methods: dict[str, Method],
    prompt: Prompt,
    turn: int,
    tokens: "np.ndarray",
    temperature: float,
) -> list[dict[str, Any]]:
    """One row for each method and repeat."""
    from treegraft.sampling import SamplingSettings, prompt_seed

    found = []
    for repeat in range(config.evaluate.repeats):
        seed = prompt_seed(config.seed + repeat, tokens)  # of the first repeat, stage label's own
        names = list(methods)
        random.Random(f"{config.seed}/{prompt.id}/{turn}/{repeat}").shuffle(names)
        for name in names:
            row = methods[name](tokens, SamplingSettings(temperature=temperature, seed=seed))
            ids = {"prompt_id": prompt.id, "turn": turn, "bench": prompt.kind, "method": name, "repeat": repeat}
            found.append(ids | {"temperature": temperature, "seed": seed} | row)
    return found


def _compare(bench: Bench, prompt: "np.ndarray", rows: list[dict[str, Any]]) -> None:
    """Note in each row where its text leaves plain decoding's, and how far apart the target's logits are there.

    Plain decoding's of the same repeat, and so of the same seed. What transformers samples is not compared: it draws
    its own numbers.
    """
    texts = {row["repeat"]: row["token_ids"] for row in rows if row["method"] == "plain"}
    for row in rows:
        row["divergence"] = None
        own, plain = row["token_ids"], texts[row["repeat"]]
        if own == plain or (row["temperature"] > 0 and row["method"] not in OWN_METHODS):
            continue
        shorter = min(len(own), len(plain))
        at = next((i for i in range(shorter) if own[i] != plain[i]), shorter)
        gap = None
        if at < shorter:
            gap = _logit_gap(bench, [*prompt.tolist(), *plain[:at]], plain[at], own[at])
        row["divergence"] = {"token": at, "logit_gap": gap}


def _logit_gap(bench: Bench, text: list[int], one: int, other: int) -> float:
    import torch

    target = bench.models.target
    with torch.inference_mode():
        ids = torch.tensor([text], device=target.device)
        logits: torch.Tensor = target.module(ids, use_cache=False, logits_to_keep=1).logits[0, -1]
    return abs(float(logits[one] - logits[other]))


def summarize(bench: Bench, prompts: list[Prompt], tuned: list[StrongAlone]) -> dict[str, Any]:
    """What the report needs besides the runs and their provenance: machine, settings, replay, calibration.

    tuned: the baseline of one drafter model alone at each temperature.
    """
    from pipeline.pair import machine

    config = bench.config
    about = machine(config)
    # The tables hold the outcomes of some answers, which predict nothing about others.
    measured = (config.evaluate.temperatures[0], config.evaluate.max_new_tokens, {prompt.id for prompt in prompts})
    labelled = (config.label.temperature, config.label.max_new_tokens, set(bench.tables["test"].questions))
    comparable = measured == labelled
    return {
        "device": about,
        "dtype": about["dtype"],
        "temperatures": list(config.evaluate.temperatures),
        "settings": {
            **config.model_dump(mode="json", include=EXPERIMENT, exclude=WHO_WORKS),
            "target": config.target.name,
            "drafters": [drafter.name for drafter in config.drafters],
            "best_fixed": list(bench.scheduler.best_fixed),
            "strong_drafter": [config.drafters[strong.drafter].name for strong in tuned],
            "strong_depth": [strong.depth for strong in tuned],
        },
        "replay": replayed(bench, tuned[0]) if comparable else None,
        "calibration": node_calibration(bench) if comparable else None,
    }


def decisions(bench: Bench) -> "np.ndarray":
    """What the scheduler does in every state of the test tables, in requests of the measured length: int [P, S]."""
    admission = Admission(bench.scheduler.saving, bench.config.evaluate.max_new_tokens)
    return decide(bench.network, bench.tables["test"], admission)


def replayed(bench: Bench, strong: StrongAlone) -> dict[str, Any]:
    """Modelled tokens per ms of every method on the test tables, in all and for each benchmark.

    The tables know no tree that ends before its last layer: below its depth the drafter model alone gets what n-grams
    add there, which is more than the measured one has. Nor do they know deeper ones.
    """
    import numpy as np

    from treegraft.values.replay import joint_rate, oracle, plain, replay, replay_fixed

    tables = bench.tables["test"]
    seen = [bench.tables[split] for split in ("train", "validation")]
    schedules: dict[str, tuple[int, ...]] = {
        "ngram": (),
        "strong": (strong.drafter,) * min(strong.depth, tables.depth),
        "fixed": bench.scheduler.best_fixed,
    }
    # Verified sizes at the rates that the measured methods used.
    results = {
        name: replay_fixed(tables, plan, joint_rate([replay_fixed(part, plan) for part in seen]))
        for name, plan in schedules.items()
    }
    results["treegraft"] = replay(tables, decisions(bench), bench.scheduler.rate_tokens_per_ms)
    results |= {"plain": plain(tables), "oracle": oracle(tables)}
    kinds = np.array(tables.kinds)

    def rates(chosen: "np.ndarray") -> dict[str, float]:
        return {name: float(r.tokens[chosen].sum() / r.ms[chosen].sum()) for name, r in results.items()}

    return {
        "tokens_per_ms": rates(np.ones(len(kinds), np.bool_)),
        "benches": {kind: rates(kinds == kind) for kind in dict.fromkeys(tables.kinds)},
    }


def node_calibration(bench: Bench, bins: int = 10) -> list[dict[str, float]]:
    """Predicted chance of a node to be accepted against the share accepted, for the trees the scheduler grows.

    Nodes of neighbouring rank are taken together where the grid of verified sizes does so.
    """
    import numpy as np

    from treegraft.values.states import played

    tables = bench.tables["test"]
    rows, codes = np.arange(len(tables)), played(decisions(bench), tables.depth, tables.drafters)
    nodes = np.minimum(tables.nodes[rows, codes][:, None], np.array(tables.sizes))  # [P, G]: nodes up to each size
    count = np.diff(nodes, axis=1).ravel()
    expected = np.diff(tables.mass[rows, codes].astype(np.float64), axis=1).ravel()
    accepted = np.diff(tables.accepted[rows, codes].astype(np.int64), axis=1).ravel()
    chance = np.divide(expected, count, out=np.zeros(len(count)), where=count > 0)
    bin_of = np.minimum((chance * bins).astype(np.int64), bins - 1)
    found = []
    for number in range(bins):
        inside = (bin_of == number) & (count > 0)
        total = int(count[inside].sum())
        if total:
            predicted, observed = float(expected[inside].sum()) / total, float(accepted[inside].sum()) / total
            found.append({"predicted": min(predicted, 1.0), "observed": observed, "count": total})
    return found


def _scratch(config: "PairConfig", inputs: dict[str, str | None]) -> Path:
    """The scratch folder of measurements of exactly these inputs, this code, configuration and machine."""
    from pipeline.pair import machine

    own = ("evaluate", "hf_methods", "methods", "pair", "step_recorder", "strong_baseline")
    code = [*library_code(), *(Path(__file__).with_name(f"{name}.py") for name in own)]
    parts = {
        "config": config.model_dump(mode="json"),
        "machine": machine(config),
        "inputs": inputs,
        "code": [file_digest(path) for path in code],
    }
    return scratch_folder(config.paths.scratch("evaluate"), parts)
