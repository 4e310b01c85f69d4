"""Stage profile: medians of every model's latency on this machine, on a grid of new tokens and context lengths.

The cost model that comes out is the clock of labels, replay and the verified size. Forwards go through the same
``ModelRunner`` as decoding does, so masks and cache handling are part of the time. Some points between those of the
grid are measured too and kept out of it: what interpolation makes of them is the cost model's error.
"""

import itertools
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from pipeline.files import read_json, write_json
from pipeline.progress import log, progress
from treegraft.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from pipeline.params import PairConfig
    from treegraft.costs import CostModel
    from treegraft.drafters.lm import RowStore
    from treegraft.models import LanguageModel
    from treegraft.pair import PairModels
    from treegraft.runner import ModelRunner

SCHEMA = 1
PREFILL_TOKENS = (1, 64, 256)  # lengths at which tokens without logits are timed
USUAL_HIDDEN = (64, 32)  # a student's hidden layers; its cost hardly depends on them
SETTLING_TOKENS = 32  # tokens decoded to measure what a step costs outside the models


def run(config: "PairConfig") -> None:
    """Measure all models of the pair and write data/profiles/<pair>.json."""
    from pipeline.pair import load_pair_models, machine
    from treegraft.costs import CostModel, LatencyCurve

    models = load_pair_models(config)
    grids: dict[str, dict[str, Any]] = {}
    for model in (models.target, *models.drafters):
        if model is not None:
            grids[model.name] = measure(config, model, is_drafter=model is not models.target)

    def curve(model: "LanguageModel", kind: str) -> LatencyCurve:
        grid = grids[model.name][kind]
        return LatencyCurve(grid["new_tokens"], grid["context_lengths"], grid["ms"])

    drafters = models.drafters
    rest = overheads(config, models)
    costs = CostModel(
        target=curve(models.target, "nodes"),
        drafters=tuple(None if model is None else curve(model, "nodes") for model in drafters),
        target_prefill=curve(models.target, "prefill"),
        drafter_prefill=tuple(None if model is None else curve(model, "prefill") for model in drafters),
        **{name: measured["ms"] for name, measured in rest.items()},
    )
    here = machine(config)
    profile = {
        "schema": SCHEMA,
        "pair": config.slug,
        "machine": here,
        "cost_model": costs.to_json(),
        "measured": grids,
        "overheads": rest,
        "tokenizer_hashes": models.tokenizer_hashes(),
    }
    write_json(config.paths.profile, profile)
    log(f"profile: {here['name']}, {here['threads']} threads, {here['dtype']}, torch {here['versions']['torch']}")
    for name, grid in grids.items():
        log(f"profile: {name}: {held_out_line(grid['held_out'])}")


def read_profile(config: "PairConfig") -> dict[str, Any]:
    """The pair's profile; UserError if it is missing or damaged."""
    profile = read_json(config.paths.profile, f"run `pipeline profile {config.slug}`")
    if profile.get("schema") != SCHEMA or not isinstance(profile.get("machine"), dict):
        raise UserError(f"{config.paths.profile} is of another version: run `pipeline profile {config.slug}` again.")
    return profile


def load_costs(config: "PairConfig") -> "CostModel":
    """The pair's cost model; UserError if it was measured on another device, dtype or thread count than this run's."""
    from pipeline.pair import machine
    from treegraft.costs import CostModel

    path, profile = config.paths.profile, read_profile(config)
    here = machine(config)
    for key in ("device", "name", "threads", "dtype", "drafter_dtype"):
        if profile["machine"].get(key) != here[key]:
            raise UserError(
                f"{path} was measured with {key} {profile['machine'].get(key)}, but this run has {here[key]}: "
                f"run `pipeline profile {config.slug}` again."
            )
    return CostModel.from_json(profile["cost_model"])


def measure(config: "PairConfig", model: "LanguageModel", is_drafter: bool) -> dict[str, dict[str, Any]]:
    """Latencies of tree nodes (every one gets logits) and of prefilled tokens (the last one does), on their grids."""
    settings = config.profile
    most = max(*settings.new_tokens, *PREFILL_TOKENS)
    contexts = [c for c in settings.context_lengths if c + most <= model.context_limit]
    if not contexts:
        raise UserError(
            f"{model.name} holds {model.context_limit} tokens, less than profile.context_lengths and {most} new ones: "
            "lower profile.context_lengths."
        )
    kind = "drafter" if is_drafter else "target"
    sizes, between = held_out_sizes(settings.new_tokens), middle(contexts)
    points = dict.fromkeys(contexts, settings.new_tokens)
    if sizes:
        points[between] = tuple(sorted({*points.get(between, ()), *sizes}))
    nodes = _measure(config, model, points, kind)
    grid = _grid(nodes, settings.new_tokens, contexts)
    prefill = _measure(config, model, {contexts[0]: PREFILL_TOKENS}, "prefill")
    return {
        "nodes": grid,
        "prefill": _grid(prefill, PREFILL_TOKENS, contexts[:1]),
        "held_out": _held_out(grid, {n: nodes[n, between] for n in sizes}, between),
    }


def held_out_sizes(new_tokens: tuple[int, ...]) -> tuple[int, ...]:
    """New tokens to measure besides the grid: the middles of every other of its intervals that has one."""
    middles = [(low + high) // 2 for low, high in itertools.pairwise(new_tokens) if high - low > 1]
    return tuple(middles[::2])


def middle(contexts: list[int]) -> int:
    """A context length between the middle two of the grid; the only one where it has but one."""
    half = len(contexts) // 2
    return (contexts[max(half - 1, 0)] + contexts[half]) // 2


def held_out_line(held_out: dict[str, Any]) -> str:
    """The error of interpolation in one line."""
    errors = held_out["relative_error"]
    if not errors:
        return "the grid leaves no point between its own to check the interpolation at"
    shown = ", ".join(f"{100 * e:+.1f} % at {n}" for n, e in zip(held_out["new_tokens"], errors, strict=True))
    return f"interpolation is off by {shown} new tokens after {held_out['context_length']}"


def _measure(
    config: "PairConfig", model: "LanguageModel", points: dict[int, tuple[int, ...]], kind: str
) -> dict[tuple[int, int], list[float]]:
    """Times in ms of forwards of n new tokens after c context tokens, by (n, c); ``points``: the n of each c."""
    import numpy as np

    from treegraft.draft_vocabulary import DraftVocabulary
    from treegraft.drafters.lm import RowStore
    from treegraft.runner import ModelRunner

    vocabulary = DraftVocabulary(model.vocab_size if model.draft_tokens is None else len(model.draft_tokens))
    store = RowStore(vocabulary, config.decoding.width, 1.0) if kind == "drafter" else None
    text = np.random.default_rng(config.seed).integers(
        0, model.vocab_size, max(points) + max(max(sizes) for sizes in points.values())
    )
    runners = {context: ModelRunner(model) for context in sorted(points)}
    for context, runner in runners.items():
        runner.reset(context + max(points[context]))
        runner.prefill(text[:context])
    repeats = config.profile.repeats if kind != "prefill" else min(3, config.profile.repeats)
    times: dict[tuple[int, int], list[float]] = {(n, c): [] for c, sizes in points.items() for n in sizes}
    # Round by round over all points, so that a slow minute of the machine does not fall on some of them alone.
    for repeat in progress(range(repeats + 1), desc=f"profile {model.name}, {kind}", unit="round"):
        for context, runner in runners.items():
            for n in points[context]:
                elapsed = _time_forward(runner, text[context : context + n], store, kind == "prefill")
                if repeat:  # the first round warms up
                    times[n, context].append(elapsed)
    return times


def _grid(
    times: dict[tuple[int, int], list[float]], new_tokens: tuple[int, ...], contexts: list[int]
) -> dict[str, Any]:
    """Medians, and the spread between the quartiles, of the points of a grid."""
    summed = [[_summary(times[n, c]) for c in contexts] for n in new_tokens]
    return {
        "new_tokens": list(new_tokens),
        "context_lengths": list(contexts),
        "ms": [[point["ms"] for point in row] for row in summed],
        "quartile_spread_ms": [[point["quartile_spread_ms"] for point in row] for row in summed],
        "repeats": len(times[new_tokens[0], contexts[0]]),
    }


def _held_out(grid: dict[str, Any], times: dict[int, list[float]], context: int) -> dict[str, Any]:
    """Measured against interpolated times at points that are not in the grid; ``times`` by new tokens."""
    from treegraft.costs import LatencyCurve

    curve = LatencyCurve(grid["new_tokens"], grid["context_lengths"], grid["ms"])
    measured = [_summary(runs) for runs in times.values()]
    interpolated = [round(float(curve.ms(n, context)), 4) for n in times]
    return {
        "new_tokens": list(times),
        "context_length": context,
        "ms": [point["ms"] for point in measured],
        "quartile_spread_ms": [point["quartile_spread_ms"] for point in measured],
        "interpolated_ms": interpolated,
        "relative_error": [
            round(guess / point["ms"] - 1, 4) for guess, point in zip(interpolated, measured, strict=True)
        ],
    }


def _summary(times: list[float]) -> dict[str, float]:
    """Median and distance between the quartiles, in ms."""
    import numpy as np

    low, half, high = np.percentile(times, [25, 50, 75])
    return {"ms": round(float(half), 5), "quartile_spread_ms": round(float(high - low), 5)}


def _time_forward(runner: "ModelRunner", tokens: "np.ndarray", store: "RowStore | None", last_only: bool) -> float:
    """Milliseconds until the host has what the decoder reads: the argmax tokens, or a drafter's top tokens."""
    import numpy as np

    n = len(tokens)
    visible = np.tri(n, dtype=np.bool_)
    positions = runner.committed + np.arange(n)
    started = perf_counter()
    logits = runner.forward(tokens, positions, visible, slice(n - 1 if last_only else 0, n))
    if store is None:
        logits.argmax(-1).tolist()
    else:
        store.append(logits)
    elapsed = (perf_counter() - started) * 1000
    runner.cache.truncate(runner.committed)
    if store is not None:
        store.clear()
    return elapsed


def overheads(config: "PairConfig", models: "PairModels") -> dict[str, dict[str, float]]:
    """Milliseconds, median and spread, of what is no forward; the names are those of ``CostModel``.

    ``light_ms``: one n-gram layer; ``scheduler_ms``: one decision; ``graft_ms``: one graft's tree work; ``step_ms``:
    the rest of a step.
    """
    import numpy as np
    import torch

    from treegraft.decoder import Decoder
    from treegraft.drafters.lm import RowStore
    from treegraft.drafters.ngram import HITS_START
    from treegraft.grafting import graft, plan_call
    from treegraft.pair import make_drafters
    from treegraft.scheduling.features import RequestCosts, SchedulingState, feature_names
    from treegraft.scheduling.network import MarginNetwork
    from treegraft.scheduling.outlook import Outlook
    from treegraft.scheduling.policy import FixedSchedule, LearnedScheduler
    from treegraft.tree import DraftTree

    settings = config.decoding.settings()
    m = len(models.drafters)
    # A short text that repeats itself, so that the n-gram drafter has something to do.
    prompt = (np.arange(48) % 12 + 100) % models.target.vocab_size
    alternating = FixedSchedule(tuple(layer % m for layer in range(settings.depth)))
    decoder = Decoder(
        models.target, make_drafters(models, settings.ngram, None), alternating, settings, ignore_eos=True
    )
    decoder.generate(prompt.tolist(), SETTLING_TOKENS // 4)  # warms up
    runs = [decoder.generate(prompt.tolist(), SETTLING_TOKENS).metrics for _ in range(config.profile.repeats)]
    light = [i for i, model in enumerate(models.drafters) if model is None]
    nothing = {"ms": 0.0, "quartile_spread_ms": 0.0}
    measured = {
        "light_ms": _summary([run.draft_light_ms / max(sum(run.calls[i] for i in light), 1) for run in runs]),
        "scheduler_ms": nothing,
        "graft_ms": nothing,
        "step_ms": _summary([run.other_ms / run.steps for run in runs]),
    }
    tree = DraftTree(0, m)
    tree.add(np.zeros(8, np.int64), np.arange(8), -np.arange(8.0), 0, 1)
    outlook = Outlook(drafter_hits=(HITS_START,) * (m - 1))
    state = SchedulingState(tree, 2, (0,), settings, 8, RequestCosts(48, 1.0, (1.0,) * (m - 1)), outlook)
    if m > 1:
        names = feature_names(settings.depth, m)
        widths = [len(names), *USUAL_HIDDEN, m - 1]
        shapes = list(itertools.pairwise(widths))
        zeros, ones = np.zeros(len(names), np.float32), np.ones(len(names), np.float32)
        weights, biases = [np.ones(s, np.float32) for s in shapes], [np.zeros(s[1], np.float32) for s in shapes]
        scheduler = LearnedScheduler(MarginNetwork(weights, biases, zeros, ones), names, names)
        measured["scheduler_ms"] = _timed(lambda: scheduler.choose(state))
    if len(light) < m:
        strong = next(i for i, model in enumerate(models.drafters) if model is not None)
        store = RowStore(models.vocabulary[strong], settings.width, 1.0)
        rows = store.append(torch.randn(len(tree), models.vocabulary[strong].size, device=models.target.device))

        def work() -> None:
            grown = tree.copy()
            nodes = plan_call(grown, strong, settings, 2, 8)
            grown.row[strong, nodes] = rows[: len(nodes)]
            graft(grown, strong, store, settings, 2, 8)

        measured["graft_ms"] = _timed(work)
    return measured


def _timed(call: Callable[[], object], repeats: int = 51) -> dict[str, float]:
    call()  # warms up
    times = []
    for _ in range(repeats):
        started = perf_counter()
        call()
        times.append((perf_counter() - started) * 1000)
    return _summary(times)
