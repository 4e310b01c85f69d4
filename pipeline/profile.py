"""Stage profile: medians of every model's latency on this machine, on a grid of new tokens and context lengths.

The cost model that comes out is the clock of labels, replay and the verified size. Forwards go through the same
``ModelRunner`` as decoding does, so masks and cache handling are part of the time.
"""

import itertools
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from pipeline.files import read_json, write_json
from pipeline.progress import progress
from treegraft.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from pipeline.pair import PairModels
    from pipeline.params import PairConfig
    from treegraft.costs import CostModel
    from treegraft.drafters.lm import RowStore
    from treegraft.models import LanguageModel
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
    light_ms, scheduler_ms, graft_ms, step_ms = overheads(config, models)
    costs = CostModel(
        target=curve(models.target, "nodes"),
        drafters=tuple(None if model is None else curve(model, "nodes") for model in drafters),
        target_prefill=curve(models.target, "prefill"),
        drafter_prefill=tuple(None if model is None else curve(model, "prefill") for model in drafters),
        light_ms=light_ms,
        scheduler_ms=scheduler_ms,
        graft_ms=graft_ms,
        step_ms=step_ms,
    )
    profile = {
        "schema": SCHEMA,
        "pair": config.slug,
        "machine": machine(config, models),
        "cost_model": costs.to_json(),
        "measured": grids,
        "tokenizer_hashes": models.tokenizer_hashes(),
    }
    write_json(config.paths.profile, profile)


def read_profile(config: "PairConfig") -> dict[str, Any]:
    """The pair's profile; UserError if it is missing or damaged."""
    profile = read_json(config.paths.profile, f"run `pipeline profile {config.slug}`")
    if profile.get("schema") != SCHEMA or not isinstance(profile.get("machine"), dict):
        raise UserError(f"{config.paths.profile} is of another version: run `pipeline profile {config.slug}` again.")
    return profile


def load_costs(config: "PairConfig", models: "PairModels") -> "CostModel":
    """The pair's cost model; UserError if it was measured on another machine, dtype or thread count."""
    from pipeline.pair import machine
    from treegraft.costs import CostModel

    path, profile = config.paths.profile, read_profile(config)
    here = machine(config, models)
    for key in ("device", "name", "threads", "dtype"):
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
    nodes = _measure_grid(config, model, settings.new_tokens, tuple(contexts), "drafter" if is_drafter else "target")
    prefill = _measure_grid(config, model, PREFILL_TOKENS, (contexts[0],), "prefill")
    return {"nodes": nodes, "prefill": prefill}


def _measure_grid(
    config: "PairConfig", model: "LanguageModel", new_tokens: tuple[int, ...], contexts: tuple[int, ...], kind: str
) -> dict[str, Any]:
    """Medians (and the spread between the quartiles) of forwards of n new tokens after c context tokens, in ms."""
    import numpy as np

    from treegraft.draft_vocabulary import DraftVocabulary
    from treegraft.drafters.lm import RowStore
    from treegraft.runner import ModelRunner

    runner = ModelRunner(model)
    runner.reset(contexts[-1] + new_tokens[-1])
    vocabulary = DraftVocabulary(model.vocab_size if model.draft_tokens is None else len(model.draft_tokens))
    store = RowStore(vocabulary, config.decoding.width, 1.0) if kind == "drafter" else None
    text = np.random.default_rng(config.seed).integers(0, model.vocab_size, contexts[-1] + new_tokens[-1])
    repeats = config.profile.repeats if kind != "prefill" else min(3, config.profile.repeats)
    times: dict[tuple[int, int], list[float]] = {(n, c): [] for c in contexts for n in new_tokens}
    for context in contexts:
        runner.prefill(text[runner.committed : context])
        # Round by round over all sizes, so that a slow minute of the machine does not fall on one of them alone.
        rounds = progress(range(repeats + 1), desc=f"profile {model.name}, {kind}, context {context}", unit="round")
        for repeat in rounds:
            for n in new_tokens:
                elapsed = _time_forward(runner, text[context : context + n], store, kind == "prefill")
                if repeat:  # the first round warms up
                    times[n, context].append(elapsed)
    grid = np.array([[statistics.median(times[n, c]) for c in contexts] for n in new_tokens])
    spread = np.array([[np.subtract(*np.percentile(times[n, c], [75, 25])) for c in contexts] for n in new_tokens])
    return {
        "new_tokens": list(new_tokens),
        "context_lengths": list(contexts),
        "ms": grid.round(4).tolist(),
        "quartile_spread_ms": spread.round(4).tolist(),
        "repeats": repeats,
    }


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


def overheads(config: "PairConfig", models: "PairModels") -> tuple[float, float, float, float]:
    """Milliseconds of one n-gram layer, of one decision, of one graft's tree work, and of the rest of a step."""
    import numpy as np
    import torch

    from pipeline.pair import make_drafters
    from treegraft.decoder import Decoder
    from treegraft.drafters.lm import RowStore
    from treegraft.grafting import graft, plan_call
    from treegraft.scheduling.features import RequestCosts, SchedulingState, feature_names
    from treegraft.scheduling.network import MarginNetwork
    from treegraft.scheduling.policy import FixedSchedule, LearnedScheduler
    from treegraft.tree import DraftTree

    settings = config.decoding.settings()
    m = len(models.drafters)
    # A short text that repeats itself, so that the n-gram drafter has something to do.
    prompt = (np.arange(48) % 12 + 100) % models.target.vocab_size
    alternating = FixedSchedule(tuple(layer % m for layer in range(settings.depth)))
    decoder = Decoder(models.target, make_drafters(models, config, None), alternating, settings, ignore_eos=True)
    decoder.generate(prompt.tolist(), SETTLING_TOKENS // 4)  # warms up
    metrics = decoder.generate(prompt.tolist(), SETTLING_TOKENS).metrics
    light = [i for i, model in enumerate(models.drafters) if model is None]
    light_ms = metrics.draft_light_ms / max(sum(metrics.calls[i] for i in light), 1)
    tree = DraftTree(0, m)
    tree.add(np.zeros(8, np.int64), np.arange(8), -np.arange(8.0), 0, 1)
    state = SchedulingState(tree, 2, (0,), settings, 8, RequestCosts(48, 1.0, (1.0,) * (m - 1)))
    scheduler_ms = 0.0
    if m > 1:
        names = feature_names(settings.depth, m)
        widths = [len(names), *USUAL_HIDDEN, m - 1]
        shapes = list(itertools.pairwise(widths))
        zeros, ones = np.zeros(len(names), np.float32), np.ones(len(names), np.float32)
        weights, biases = [np.ones(s, np.float32) for s in shapes], [np.zeros(s[1], np.float32) for s in shapes]
        scheduler = LearnedScheduler(MarginNetwork(weights, biases, zeros, ones), names, names)
        scheduler_ms = _median_ms(lambda: scheduler.choose(state))
    graft_ms = 0.0
    if len(light) < m:
        strong = next(i for i, model in enumerate(models.drafters) if model is not None)
        store = RowStore(models.vocabulary[strong], settings.width, 1.0)
        rows = store.append(torch.randn(len(tree), models.vocabulary[strong].size, device=models.target.device))

        def work() -> None:
            grown = tree.copy()
            nodes = plan_call(grown, strong, settings, 2, 8)
            grown.row[strong, nodes] = rows[: len(nodes)]
            graft(grown, strong, store, settings, 2, 8)

        graft_ms = _median_ms(work)
    return light_ms, scheduler_ms, graft_ms, metrics.other_ms / metrics.steps


def _median_ms(call: Callable[[], object], repeats: int = 51) -> float:
    times = []
    for _ in range(repeats):
        started = perf_counter()
        call()
        times.append((perf_counter() - started) * 1000)
    return statistics.median(times)
