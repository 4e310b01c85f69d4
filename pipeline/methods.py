"""The methods that an evaluation compares, each as a function of the prompt's tokens and the sampling settings.

``plain``; ``ngram`` and ``strong`` (the n-grams alone, and the drafter model alone that is best on validation prompts
at its best depth: same engine, same KV reuse, same hardware-aware verified size at their own rate); ``fixed`` (the
schedule that was best on validation prompts); ``treegraft`` (the exported scheduler); and, where asked for,
transformers' prompt lookup and assisted generation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treegraft.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from pipeline.params import PairConfig
    from pipeline.strong_baseline import StrongAlone
    from treegraft.decoder import Decoder
    from treegraft.metrics import DecodingMetrics
    from treegraft.pair import PairModels
    from treegraft.sampling import SamplingSettings
    from treegraft.scheduling.checkpoint import SchedulerConfig
    from treegraft.scheduling.network import MarginNetwork
    from treegraft.values.tables import OutcomeTables

Method = Callable[["np.ndarray", "SamplingSettings"], dict[str, Any]]
"""Prompt tokens and how to sample -> a row of runs.jsonl without its ids; the emitted tokens are ``token_ids``."""


@dataclass(frozen=True)
class Bench:
    """What all methods of one evaluation share."""

    config: "PairConfig"
    models: "PairModels"
    scheduler: "SchedulerConfig"
    network: "MarginNetwork"
    tables: "dict[str, OutcomeTables]"


def prepare(config: "PairConfig") -> Bench:
    """Models, scheduler and replay tables, checked to fit each other."""
    from pipeline.pair import load_pair_models
    from pipeline.profile import load_costs
    from treegraft.scheduling.checkpoint import check_fits, load_scheduler
    from treegraft.values.validation import read_validated

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
    if load_costs(config).digest() != scheduler.cost_model_digest:
        raise UserError(
            f"the scheduler in {config.paths.scheduler} is of another profile: run `pipeline traces {config.slug}` "
            f"and `pipeline distill {config.slug}` again."
        )
    tables = read_validated(config.paths.traces)
    seen = {split: table.with_features(list(scheduler.feature_names)) for split, table in tables.items()}
    return Bench(config, models, scheduler, network, seen)


def make_methods(bench: Bench, strong: "StrongAlone") -> dict[str, Method]:
    """This project's methods; a drafter model alone as it was tuned."""
    from treegraft.api import learned_scheduler
    from treegraft.scheduling.policy import FixedSchedule, never
    from treegraft.values.replay import joint_rate, replay_fixed

    config, scheduler = bench.config, bench.scheduler

    def rate(schedule: tuple[int, ...]) -> float:
        return joint_rate([replay_fixed(bench.tables[split], schedule) for split in ("train", "validation")])

    learned = learned_scheduler(bench.network, scheduler)
    everyone = list(range(len(config.drafters)))
    decoders = {
        "plain": _decoder(bench, [], never(), 0.0),
        "ngram": _decoder(bench, [0], never(), rate(())),
        "strong": _decoder(bench, [strong.drafter], never(), strong.tokens_per_ms, strong.depth),
        "fixed": _decoder(bench, everyone, FixedSchedule(scheduler.best_fixed), rate(scheduler.best_fixed)),
        "treegraft": _decoder(bench, everyone, learned, scheduler.rate_tokens_per_ms),
    }
    return {name: timed(config, decoder) for name, decoder in decoders.items()}


def ecosystem_methods(bench: Bench) -> dict[str, Method]:
    """transformers' own methods, where the parameters ask for them."""
    if not bench.config.evaluate.hf_baselines:
        return {}
    from pipeline.hf_methods import hf_methods

    methods = hf_methods(bench.models, bench.config.evaluate.max_new_tokens)
    return {name: method for name, method in methods.items() if name != "hf_generate"}


def _decoder(bench: Bench, members: list[int], policy: Any, rate: float, depth: int | None = None) -> "Decoder":
    """A decoder with some of the pair's drafters and all else that the scheduler carries."""
    from treegraft.api import make_decoder

    return make_decoder(bench.models, bench.scheduler, policy, rate, members, depth)


def timed(config: "PairConfig", decoder: "Decoder") -> Method:
    """A decoder as a method of this evaluation's length."""

    def method(tokens: "np.ndarray", sampling: "SamplingSettings") -> dict[str, Any]:
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
        "fallbacks": metrics.fallbacks,
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
        "forward_ms": metrics.forward_ms,
    }
