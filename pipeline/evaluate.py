"""Stage evaluate: measured speed of every method on the test prompts, in one process, interleaved prompt by prompt.

Methods: ``plain``; ``ngram`` and ``strong`` (the light and the dearest drafter alone, same engine, same KV reuse, same
hardware-aware verified size at their own rate); ``fixed`` (the schedule that was best on validation prompts);
``treegraft`` (the exported scheduler); and, where asked for, transformers' prompt lookup and assisted generation.

Writes data/evaluation/<pair>/runs.jsonl (one row a turn, method and repeat) and summary.json.
"""

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.files import append_jsonl, file_digest, json_text, read_jsonl, replacing_folder, write_json, write_text
from pipeline.labelled import decide
from pipeline.progress import log, progress
from pipeline.prompts import Prompt, select_prompts
from treegraft.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel

    from pipeline.pair import PairModels
    from pipeline.params import PairConfig
    from treegraft.decoder import Decoder
    from treegraft.metrics import DecodingMetrics
    from treegraft.scheduling.checkpoint import SchedulerConfig
    from treegraft.scheduling.network import MarginNetwork
    from treegraft.values.tables import OutcomeTables

PROMPT_LOOKUP_TOKENS = 10  # transformers' documentation uses 10

Method = Callable[["np.ndarray"], dict[str, Any]]
"""Prompt tokens -> a row of runs.jsonl without its ids, with the emitted tokens under ``token_ids``."""


@dataclass(frozen=True)
class Bench:
    """What all methods of one evaluation share."""

    config: "PairConfig"
    models: "PairModels"
    scheduler: "SchedulerConfig"
    network: "MarginNetwork"
    tables: "dict[str, OutcomeTables]"


def run(config: "PairConfig") -> None:
    """Measure all methods on all test prompts; a killed run goes on with the turns that are missing."""
    from datetime import UTC, datetime

    started = datetime.now(UTC).isoformat(timespec="seconds")
    prompts = select_prompts(config.prompts.sources, config.label)["test"]
    bench = prepare(config)
    methods = make_methods(bench)
    scratch = _scratch(config, prompts)
    rows = measure(bench, methods, prompts, scratch / "turns.jsonl")
    summary = summarize(bench, rows)
    summary |= {"started": started, "ended": datetime.now(UTC).isoformat(timespec="seconds")}
    with replacing_folder(config.paths.evaluation) as folder:
        write_text(folder / "runs.jsonl", "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
        write_json(folder / "summary.json", summary)
    shutil.rmtree(scratch)


def prepare(config: "PairConfig") -> Bench:
    """Models, scheduler and replay tables, checked to fit each other."""
    from pipeline.pair import load_pair_models
    from pipeline.profile import load_costs
    from treegraft.scheduling.checkpoint import check_fits, load_scheduler
    from treegraft.values.traces import read_traces

    network, scheduler = load_scheduler(config.paths.scheduler)
    models = load_pair_models(config)
    check_fits(
        scheduler,
        tokenizer_hashes=models.tokenizer_hashes(),
        depth=config.decoding.depth,
        width=config.decoding.width,
        drafters=[drafter.name for drafter in config.drafters],
    )
    if scheduler.draft_settings != config.decoding.settings():
        differ = [
            name
            for name in ("depth", "width", "look_back", "verified_sizes", "ngram")
            if getattr(scheduler.draft_settings, name) != getattr(config.decoding.settings(), name)
        ]
        raise UserError(
            f"the scheduler in {config.paths.scheduler} was trained with another decoding.{differ[0]}: "
            f"run `pipeline all {config.slug}`, or set decoding back."
        )
    if load_costs(config, models).digest() != scheduler.cost_model_digest:
        raise UserError(
            f"the scheduler in {config.paths.scheduler} is of another profile: run `pipeline traces {config.slug}` "
            f"and `pipeline distill {config.slug}` again."
        )
    tables = {split: read_traces(config.paths.traces, split) for split in ("train", "validation", "test")}
    return Bench(config, models, scheduler, network, tables)


def make_methods(bench: Bench) -> dict[str, Method]:
    """Every method as a function of the prompt's tokens."""
    from treegraft.scheduling.features import feature_names
    from treegraft.scheduling.policy import FixedSchedule, LearnedScheduler, never
    from treegraft.values.replay import joint_rate, replay_fixed

    config, scheduler = bench.config, bench.scheduler
    m, depth = len(config.drafters), config.decoding.depth

    def rate(schedule: tuple[int, ...]) -> float:
        return joint_rate([replay_fixed(bench.tables[split], schedule) for split in ("train", "validation")])

    last = (m - 1,) * depth
    names = feature_names(depth, m)
    learned = LearnedScheduler(bench.network, list(scheduler.feature_names), names)
    everyone = list(range(m))
    decoders = {
        "plain": _decoder(bench, [], never(), 0.0),
        "ngram": _decoder(bench, [0], never(), rate(())),
        "strong": _decoder(bench, [m - 1], never(), rate(last)),
        "fixed": _decoder(bench, everyone, FixedSchedule(scheduler.best_fixed), rate(scheduler.best_fixed)),
        "treegraft": _decoder(bench, everyone, learned, scheduler.rate_tokens_per_ms),
    }
    methods: dict[str, Method] = {name: _timed(config, decoder) for name, decoder in decoders.items()}
    if config.evaluate.hf_baselines:
        methods |= _hf_methods(bench)
    return methods


def _decoder(bench: Bench, members: list[int], policy: Any, rate: float) -> "Decoder":
    """A decoder with some of the pair's drafters and the cost model and calibration that the scheduler carries."""
    from pipeline.pair import make_drafters
    from treegraft.costs import CostModel
    from treegraft.decoder import Decoder
    from treegraft.values.calibration import Calibration

    calibration = Calibration.from_json(bench.scheduler.calibration)
    costs = CostModel.from_json(bench.scheduler.cost_model)
    drafters = make_drafters(bench.models, bench.config, calibration, members)
    return Decoder(bench.models.target, drafters, policy, bench.config.decoding.settings(), costs, rate)


def _timed(config: "PairConfig", decoder: "Decoder") -> Method:
    from treegraft.sampling import SamplingSettings

    sampling = SamplingSettings(temperature=config.evaluate.temperature, seed=config.seed)

    def method(tokens: "np.ndarray") -> dict[str, Any]:
        result = decoder.generate(tokens.tolist(), config.evaluate.max_new_tokens, sampling)
        return _row(result.metrics, decoder) | {
            "finish": result.finish,
            "token_ids": result.tokens,
            "text": result.text,
        }

    return method


def _row(metrics: "DecodingMetrics", decoder: "Decoder") -> dict[str, Any]:
    from treegraft.drafters import LanguageModelDrafter

    strong = [i for i, drafter in enumerate(decoder.drafters) if isinstance(drafter, LanguageModelDrafter)]
    return {
        "prompt_tokens": metrics.prompt_tokens,
        "tokens": metrics.tokens,
        "seconds": metrics.seconds,
        "steps": metrics.steps,
        "calls": metrics.calls,
        "strong_calls": sum(metrics.calls[i] for i in strong),
        "verified_nodes": metrics.verified_nodes,
        "accepted_by_depth": metrics.accepted_by_depth,
        "time_ms": {
            "prefill": metrics.prefill_ms,
            "draft_light": metrics.draft_light_ms,
            "draft_strong": metrics.draft_strong_ms,
            "verify": metrics.verify_ms,
            "scheduler": metrics.scheduler_ms,
            "other": metrics.other_ms,
        },
        "processed": metrics.processed,
    }


def _hf_methods(bench: Bench) -> dict[str, Method]:
    """transformers' own speculative decoding, as its documentation sets it up; it reports no steps."""
    strong = bench.models.drafters[-1]
    methods = {"hf_prompt_lookup": _hf_method(bench, None)}
    if strong is not None:
        methods["hf_assisted"] = _hf_method(bench, strong.module)
    return methods


def _hf_method(bench: Bench, assistant: "PreTrainedModel | None") -> Method:
    from time import perf_counter

    import torch
    from transformers import GenerationConfig

    target, settings = bench.models.target, bench.config.evaluate
    # Nothing of the model's own generation settings (a repetition penalty, say): the same task for all methods.
    neutral = GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        do_sample=settings.temperature > 0,
        temperature=settings.temperature or 1.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        eos_token_id=list(target.eos_token_ids),
        pad_token_id=target.eos_token_ids[0] if target.eos_token_ids else 0,
        prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS if assistant is None else None,
    )

    def method(tokens: "np.ndarray") -> dict[str, Any]:
        started = perf_counter()
        ids = torch.from_numpy(tokens)[None].to(target.device)
        out: Any = target.module.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), generation_config=neutral, assistant_model=assistant
        )
        emitted = out[0, len(tokens) :].tolist()
        seconds = perf_counter() - started
        finish = "eos" if emitted and emitted[-1] in target.eos_token_ids else "length"
        return {
            "prompt_tokens": len(tokens),
            "tokens": len(emitted),
            "seconds": seconds,
            "steps": None,
            "calls": None,
            "strong_calls": None,
            "verified_nodes": None,
            "accepted_by_depth": None,
            "time_ms": None,
            "processed": None,
            "finish": finish,
            "token_ids": emitted,
            "text": target.tokenizer.decode(emitted, skip_special_tokens=True),
        }

    return method


def measure(bench: Bench, methods: dict[str, Method], prompts: list[Prompt], turns: Path) -> list[dict[str, Any]]:
    """All methods on every turn, in an order shuffled anew for each turn and repeat; returns the rows of runs.jsonl.

    Later turns follow on plain decoding's answers, so that all methods see the same text. ``turns`` gets one line a
    finished turn, so a kill costs the turn it falls into and nothing else.
    """
    from pipeline.pair import encode_turns

    config = bench.config
    done = {(turn["prompt_id"], turn["turn"]): turn for turn in read_jsonl(turns)}
    if done:
        log(f"evaluate: {len(done)} turns were measured by an earlier run")
    warm = encode_turns(bench.models.target, prompts[0].turns[:1], [])[-64:]
    for method in methods.values():
        method(warm)
    for prompt in progress(prompts, desc="evaluate", unit="prompt"):
        answers: list[str] = []
        for number in range(len(prompt.turns)):
            turn = done.get((prompt.id, number))
            if turn is None:
                tokens = encode_turns(bench.models.target, prompt.turns, answers)
                rows = _measure_turn(config, methods, prompt, number, tokens)
                plain = next(row for row in rows if row["method"] == "plain")
                _compare(bench, tokens, plain["token_ids"], rows)
                turn = {"prompt_id": prompt.id, "turn": number, "answer": plain.pop("text"), "rows": rows}
                for row in rows:
                    row.pop("text", None)
                append_jsonl(turns, turn)
                done[prompt.id, number] = turn
            answers.append(turn["answer"])
    return [row for turn in done.values() for row in turn["rows"]]


def _measure_turn(
    config: "PairConfig", methods: dict[str, Method], prompt: Prompt, turn: int, tokens: "np.ndarray"
) -> list[dict[str, Any]]:
    """One row for each method and repeat."""
    found = []
    for repeat in range(config.evaluate.repeats):
        names = list(methods)
        random.Random(f"{config.seed}/{prompt.id}/{turn}/{repeat}").shuffle(names)
        for name in names:
            row = methods[name](tokens)
            ids = {"prompt_id": prompt.id, "turn": turn, "bench": prompt.kind, "method": name, "repeat": repeat}
            found.append(ids | row)
    return found


def _compare(bench: Bench, prompt: "np.ndarray", plain: list[int], rows: list[dict[str, Any]]) -> None:
    """Note in each row where its text leaves plain decoding's, and how far apart the target's logits are there."""
    for row in rows:
        own = row["token_ids"]
        at = next((i for i, (a, b) in enumerate(zip(own, plain, strict=False)) if a != b), None)
        if at is None and len(own) != len(plain):
            at = min(len(own), len(plain))
        row["divergence"] = None
        if at is not None:
            gap = None
            if at < min(len(own), len(plain)):
                gap = _logit_gap(bench, [*prompt.tolist(), *plain[:at]], plain[at], own[at])
            row["divergence"] = {"token": at, "logit_gap": gap}


def _logit_gap(bench: Bench, text: list[int], one: int, other: int) -> float:
    import torch

    target = bench.models.target
    with torch.inference_mode():
        logits: torch.Tensor = target.module(torch.tensor([text], device=target.device), use_cache=False).logits[0, -1]
    return abs(float(logits[one] - logits[other]))


def summarize(bench: Bench, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the report needs besides the runs: identity, replay, calibration, provenance."""
    from pipeline.pair import machine

    config = bench.config
    others = [row for row in rows if row["method"] not in ("plain", "hf_prompt_lookup", "hf_assisted")]
    apart = [row["divergence"] for row in others if row["divergence"] is not None]
    gaps = [divergence["logit_gap"] for divergence in apart if divergence["logit_gap"] is not None]
    about = machine(config, bench.models)
    return {
        "device": about,
        "settings": {
            "decoding": config.decoding.model_dump(mode="json"),
            "evaluate": config.evaluate.model_dump(mode="json"),
            "seed": config.seed,
            "target": config.target.name,
            "drafters": [drafter.name for drafter in config.drafters],
            "best_fixed": list(bench.scheduler.best_fixed),
        },
        "identity": {
            "dtype": about["dtype"],
            "compared_tokens": sum(row["tokens"] for row in others),
            "divergences": len(apart),
            "max_logit_gap": max(gaps, default=0.0),
        },
        "replay": replayed(bench),
        "calibration": node_calibration(bench),
        "provenance": provenance(config),
    }


def replayed(bench: Bench) -> dict[str, Any]:
    """Modelled tokens per ms of every method on the test tables, in all and for each benchmark."""
    import numpy as np

    from treegraft.values.replay import joint_rate, oracle, plain, replay, replay_fixed

    tables, m = bench.tables["test"], len(bench.config.drafters)
    seen = [bench.tables[split] for split in ("train", "validation")]
    schedules: dict[str, tuple[int, ...]] = {
        "ngram": (),
        "strong": (m - 1,) * tables.depth,
        "fixed": bench.scheduler.best_fixed,
    }
    # Verified sizes at the rates that the measured methods used.
    results = {
        name: replay_fixed(tables, plan, joint_rate([replay_fixed(part, plan) for part in seen]))
        for name, plan in schedules.items()
    }
    results["treegraft"] = replay(tables, decide(bench.network, tables), bench.scheduler.rate_tokens_per_ms)
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
    rows, codes = np.arange(len(tables)), played(decide(bench.network, tables), tables.depth, tables.drafters)
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


def provenance(config: "PairConfig") -> dict[str, Any]:
    """Which code, parameters and versions the figures are from."""
    import subprocess
    from importlib.metadata import version

    def git(*arguments: str) -> str | None:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain", "--untracked-files=no", "--", ":(exclude)dvc.lock")
    return {
        "git_revision": git("rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "params_digest": hashlib.sha256(json_text(config.model_dump(mode="json")).encode()).hexdigest(),
        "versions": {name: version(name) for name in ("torch", "transformers", "lightning", "scikit-learn", "numpy")},
    }


def _scratch(config: "PairConfig", prompts: list[Prompt]) -> Path:
    """The scratch folder of measurements of exactly this scheduler, code and configuration."""
    import treegraft

    code = [*sorted(Path(treegraft.__path__[0]).rglob("*.py")), Path(__file__), Path(__file__).with_name("pair.py")]
    manifests = [config.paths.manifest("fetch"), config.paths.manifest("draft"), config.paths.traces / "manifest.json"]
    parts = {
        "config": config.model_dump(mode="json"),
        "prompts": [[prompt.id, *prompt.turns] for prompt in prompts],
        "inputs": [file_digest(path) for path in [*manifests, config.paths.profile] if path.exists()],
        "scheduler": [file_digest(config.paths.scheduler / name) for name in ("config.json", "model.safetensors")],
        "code": [file_digest(path) for path in code],
    }
    folder = config.paths.scratch("evaluate") / hashlib.sha256(json_text(parts).encode()).hexdigest()[:16]
    if folder.parent.is_dir():
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
