"""Measures the engine against transformers on one pair: speed-ups, time outside the models, cost of long contexts.

    python benchmarks/engine.py smollm2-135m --prompts 2 --tokens 48

Everything runs interleaved in one process on the same prompts of a pair that `pipeline distill` has finished. Ratios
are medians over prompts of seconds per token, theirs over ours; the figures belong to this machine and no other.
"""

import argparse
import json
import os
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

OPPONENTS = {"plain": "hf_generate", "ngram": "hf_prompt_lookup", "strong": "hf_assisted"}
CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
ROUNDS = 7
Methods = dict[str, Callable[[Any, Any], dict[str, Any]]]


def main() -> None:
    """Parse, measure, print, and write the figures as JSON where asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", help="slug of a pair in params.yaml whose scheduler has been exported")
    parser.add_argument("--prompts", type=int, default=2, help="test prompts of each kind")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens for each prompt")
    parser.add_argument("--methods", nargs="+", help="only these, besides plain (default: all)")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()

    from pipeline.evaluate import tuned_strong
    from pipeline.hf_methods import hf_methods
    from pipeline.methods import make_methods, prepare
    from pipeline.params_file import load_pair
    from pipeline.prompts import load_prompts, select_prompts, split_prompts, take

    config = load_pair(options.pair, [f"evaluate.max_new_tokens={options.tokens}", "evaluate.hf_baselines=false"])
    if config.threads != "auto":
        os.environ["OMP_NUM_THREADS"] = str(config.threads)
    bench = prepare(config)
    tuned = config.paths.scratch("benchmark") / "strong.json"
    tuned.unlink(missing_ok=True)
    strong = tuned_strong(bench, select_prompts(config.prompts.sources, config.label)["validation"], 0.0, tuned)
    methods = make_methods(bench, strong) | hf_methods(bench.models, options.tokens)
    methods["ngram_not_recycled"] = not_recycled(bench)
    if options.methods:
        if unknown := sorted(set(options.methods) - methods.keys()):
            parser.error(f"{unknown[0]} is no method; there are {', '.join(methods)}")
        methods = {name: methods[name] for name in dict.fromkeys(["plain", *options.methods])}
    prompts = take(split_prompts(load_prompts(config.prompts.sources))["test"], options.prompts)
    rows = measure(methods, bench, prompts)
    figures = {
        "pair": options.pair,
        "strong_depth": strong.depth,
        "against_transformers": against(rows),
        "overhead": overhead(rows),
        "recycling": recycling(rows),
        "context": context(bench),
    }
    print(json.dumps(figures, indent=1))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")


def not_recycled(bench: Any) -> Callable[[Any, Any], dict[str, Any]]:
    """The n-gram drafter alone as ``ngram`` has it, but for the target's own earlier choices."""
    from pipeline.methods import timed
    from treegraft.costs import CostModel
    from treegraft.decoder import Decoder
    from treegraft.drafters import NgramDrafter
    from treegraft.scheduling.policy import never
    from treegraft.values.calibration import Calibration
    from treegraft.values.replay import joint_rate, replay_fixed

    settings = bench.scheduler.draft_settings
    settings = replace(settings, ngram=replace(settings.ngram, recycled=0))
    table = Calibration.from_json(bench.scheduler.calibration).ngram_table[:, : settings.ngram.branches]
    rate = joint_rate([replay_fixed(bench.tables[split], ()) for split in ("train", "validation")])
    costs = CostModel.from_json(bench.scheduler.cost_model)
    drafter = NgramDrafter(0, settings.ngram, table)
    return timed(bench.config, Decoder(bench.models.target, [drafter], never(), settings, costs, rate))


def measure(methods: Methods, bench: Any, prompts: list[Any]) -> list[dict[str, Any]]:
    """Every method on every prompt's first turn, in shuffled order, after one short warm-up each."""
    from pipeline.progress import progress
    from treegraft.pair import encode_turns
    from treegraft.sampling import SamplingSettings

    rows = []
    for number, prompt in enumerate(progress([prompts[0], *prompts], desc="benchmark", unit="prompt")):
        tokens = encode_turns(bench.models.target, prompt.turns[:1], [])
        names = list(methods)
        random.Random(number).shuffle(names)
        for name in names:
            row = methods[name](tokens, SamplingSettings()) | {"method": name, "prompt": prompt.id, "kind": prompt.kind}
            if number:  # the first prompt warms up
                rows.append(row)
    return rows


def against(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many times faster each single method is than its counterpart in transformers, by kind of prompt and in all.

    Both emit the same tokens in fp32; where rounding parts them, speed per token is what is compared.
    """
    pace = {(row["method"], row["prompt"]): row["seconds"] / row["tokens"] for row in rows}
    kind = {row["prompt"]: row["kind"] for row in rows}
    found: dict[str, Any] = {}
    for ours, theirs in OPPONENTS.items():
        if not {ours, theirs} <= {row["method"] for row in rows}:
            continue
        ratios = {prompt: pace[theirs, prompt] / pace[ours, prompt] for prompt in kind}
        kinds: dict[str, list[float]] = {}
        for prompt, ratio in ratios.items():
            kinds.setdefault(kind[prompt], []).append(ratio)
        found[f"{ours} / {theirs}"] = {
            "all": round(statistics.median(ratios.values()), 3),
            "kinds": {name: round(statistics.median(some), 3) for name, some in kinds.items()},
        }
    plain = {prompt: pace["plain", prompt] for prompt in kind}
    for name in dict.fromkeys(row["method"] for row in rows):
        ratio = statistics.median(plain[prompt] / pace[name, prompt] for prompt in kind)
        found.setdefault("over plain", {})[name] = round(ratio, 3)
    return found


def recycling(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Accepted tokens a step and speed of the n-gram drafter with the target's earlier choices, over those without."""
    found: dict[str, Any] = {}
    if not {"ngram", "ngram_not_recycled"} <= {row["method"] for row in rows}:
        return found
    for kind in dict.fromkeys(row["kind"] for row in rows):
        own, bare = (
            [row for row in rows if row["kind"] == kind and row["method"] == name]
            for name in ("ngram", "ngram_not_recycled")
        )
        accepted = [
            sum(sum(r["accepted_by_depth"]) for r in some) / sum(r["steps"] for r in some) for some in (own, bare)
        ]
        pace = [sum(r["seconds"] for r in some) / sum(r["tokens"] for r in some) for some in (own, bare)]
        figures = {"accepted": accepted[0], "accepted_without": accepted[1], "speed_ratio": pace[1] / pace[0]}
        found[kind] = {name: round(value, 3) for name, value in figures.items()}
    return found


def overhead(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Share of a request's time outside model forwards, prefill left out, by method."""
    found = {}
    for name in ("plain", "ngram", "strong", "fixed", "treegraft"):
        own = [row for row in rows if row["method"] == name]
        if not own:
            continue
        spent = {part: sum(row["time_ms"][part] for row in own) for part in own[0]["time_ms"]}
        decoding = sum(spent.values()) - spent["prefill"]
        forwards = sum(row["forward_ms"] for row in own)
        found[name] = round(1 - forwards / decoding, 4)
    return found


def context(bench: Any) -> dict[str, Any]:
    """Milliseconds of a whole plain step and of the target's bare forward at growing context, medians, interleaved."""
    import numpy as np
    import torch

    from treegraft.decoder import Decoder
    from treegraft.runner import ModelRunner
    from treegraft.scheduling.policy import never
    from treegraft.settings import DraftSettings

    target = bench.models.target
    steps = 8
    found = {}
    for length in CONTEXTS:
        if length + steps + 1 > target.context_limit:
            break
        text = np.random.default_rng(length).integers(0, target.vocab_size, length)
        decoder = Decoder(target, [], never(), DraftSettings(), ignore_eos=True)
        runner = ModelRunner(target)
        runner.reset(length + 8)
        runner.prefill(text)
        one = np.array([int(text[0])])
        whole, bare = [], []
        for _ in range(ROUNDS):
            metrics = decoder.generate(text.tolist(), steps).metrics
            whole.append((metrics.seconds * 1000 - metrics.prefill_ms) / metrics.steps)
            started = perf_counter()
            for _ in range(steps):
                with torch.inference_mode():
                    runner.forward(one, np.array([length]), np.ones((1, 1), np.bool_), slice(0, 1)).argmax(-1).tolist()
                runner.cache.truncate(length)
            bare.append((perf_counter() - started) * 1000 / steps)
        step, forward = statistics.median(whole[1:]), statistics.median(bare[1:])
        figures = {"step_ms": step, "forward_ms": forward, "ratio": step / forward}
        found[str(length)] = {name: round(value, 3) for name, value in figures.items()}
    return found


if __name__ == "__main__":
    main()
