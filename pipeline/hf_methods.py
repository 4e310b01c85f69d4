"""transformers' own decoding as methods of an evaluation: what users of that library have today."""

from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from treegraft.models import load_stock

if TYPE_CHECKING:
    import numpy as np

    from pipeline.methods import Method
    from treegraft.pair import PairModels
    from treegraft.sampling import SamplingSettings

PROMPT_LOOKUP_TOKENS = 10  # transformers' documentation uses 10
ENGINE_ONLY = (  # what transformers does not tell
    "steps",
    "calls",
    "strong_calls",
    "fallbacks",
    "verified_nodes",
    "accepted_by_depth",
    "time_ms",
    "processed",
    "forward_ms",
)


def hf_methods(models: "PairModels", max_new_tokens: int) -> "dict[str, Method]":
    """``hf_generate``, ``hf_prompt_lookup`` and, for a pair with a drafter model, ``hf_assisted``.

    They run as transformers' documentation sets them up and report no steps. Their models are loaded once more, as
    transformers runs them: ours have other layers and smaller heads.
    """
    target, strong = load_stock(models.target), models.drafters[-1]
    methods = {
        "hf_generate": _method(models, target, max_new_tokens),
        "hf_prompt_lookup": _method(models, target, max_new_tokens, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS),
    }
    if strong is not None:
        methods["hf_assisted"] = _method(models, target, max_new_tokens, load_stock(strong))
    return methods


def _neutral(models: "PairModels", max_new_tokens: int, temperature: float, **others: Any) -> GenerationConfig:
    """Nothing of the model's own generation settings (a repetition penalty, say): the same task for all methods."""
    eos = models.target.eos_token_ids
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        temperature=temperature or 1.0,
        top_k=0,
        top_p=1.0,
        repetition_penalty=1.0,
        eos_token_id=list(eos),
        pad_token_id=eos[0] if eos else 0,
        **others,
    )


def _method(
    models: "PairModels",
    module: PreTrainedModel,
    max_new_tokens: int,
    assistant: PreTrainedModel | None = None,
    **others: Any,
) -> "Method":
    target = models.target

    def method(tokens: "np.ndarray", sampling: "SamplingSettings") -> dict[str, Any]:
        settings = _neutral(models, max_new_tokens, sampling.temperature, **others)
        torch.manual_seed(sampling.seed)
        started = perf_counter()
        ids = torch.from_numpy(tokens)[None].to(target.device)
        out: Any = module.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), generation_config=settings, assistant_model=assistant
        )
        emitted = out[0, len(tokens) :].tolist()
        seconds = perf_counter() - started
        finish = "eos" if emitted and emitted[-1] in target.eos_token_ids else "length"
        return dict.fromkeys(ENGINE_ONLY) | {
            "prompt_tokens": len(tokens),
            "tokens": len(emitted),
            "seconds": seconds,
            "finish": finish,
            "token_ids": emitted,
            "text": target.tokenizer.decode(emitted, skip_special_tokens=True),
        }

    return method
