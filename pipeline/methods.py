"""The methods that an evaluation compares, each as a function of the prompt's tokens.

``plain``; ``ngram`` and ``strong`` (the light and the dearest drafter alone, same engine, same KV reuse, same
hardware-aware verified size at their own rate); ``fixed`` (the schedule that was best on validation prompts);
``treegraft`` (the exported scheduler); and, where asked for, transformers' prompt lookup and assisted generation.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
