"""Faster layers and the lean forward compute what transformers' own do."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.treegraft.tiny import tiny_tokenizer
from treegraft.cpu_kernels import FastRMSNorm, FusedPart, PackedLinear, QuantizedLinear, can_quantize, speed_up
from treegraft.lean import exact_attention, lean_forward
from treegraft.models import LanguageModel
from treegraft.runner import ModelRunner

VOCAB = 40
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
LEAN: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, attention_bias=True)),
    "llama with scaled rotations": (
        LlamaForCausalLM,
        LlamaConfig(
            **SHAPE,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"})),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE)),
}
OTHERS: dict[str, tuple[Any, Any]] = {
    "another order of norms": (Gemma2ForCausalLM, Gemma2Config(**SHAPE, pad_token_id=0)),
    "scaled residuals": (GraniteForCausalLM, GraniteConfig(**SHAPE, residual_multiplier=0.5, attention_multiplier=0.3)),
}


def build(kinds: dict[str, tuple[Any, Any]], name: str) -> PreTrainedModel:
    """A random model of a family; every weight differs from its usual start, biases and norms too."""
    model_class, config = kinds[name]
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)  # else the weights depend on the tests before
        model: PreTrainedModel = model_class(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.empty(parameter.shape).normal_(0, 0.2, generator=generator))
    return model.eval().requires_grad_(False)


def language_model(module: PreTrainedModel, lean: bool) -> LanguageModel:
    found = lean_forward(module) if lean else None
    assert (found is not None) == lean
    return LanguageModel("m", module, tiny_tokenizer(VOCAB), VOCAB, 128, (1,), None, folder=..., lean=found)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LEAN)
def test_the_lean_forward_equals_the_models_own(name: str) -> None:
    """A prompt, a tree with siblings behind it, the commit of one branch, another tree: the logits of both."""
    stock = build(LEAN, name)
    fast = copy.deepcopy(stock)
    speed_up(fast)
    runners = [ModelRunner(language_model(stock, lean=False)), ModelRunner(language_model(fast, lean=True))]
    parents = np.array([0, 0, 0, 1, 2])
    visible = np.eye(5, dtype=np.bool_)
    for node in range(1, 5):
        visible[node] |= visible[parents[node]]
    results = []
    for runner in runners:
        runner.reset(32)
        logits = [runner.prefill(np.arange(3, 20), 0)]
        for tokens in ([5, 9, 11, 2, 7], [6, 8, 3, 30, 4]):
            positions = runner.committed + visible.sum(1) - 1
            logits.append(runner.forward(np.array(tokens), positions, visible, [0, 1, 3, 4]))
            runner.commit([runner.committed, runner.committed + 2, runner.committed + 4])
        results.append(torch.cat(logits))
    torch.testing.assert_close(results[0], results[1], rtol=1e-3, atol=1e-4)
    assert runners[0].cache.length == runners[1].cache.length == 17 + 6


needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bf16 product for this CPU"
)


@needs_bf16
@pytest.mark.parametrize("name", LEAN)
def test_the_lean_forward_takes_bfloat16(name: str) -> None:
    stock = build(LEAN, name).bfloat16()
    fast = copy.deepcopy(stock)
    speed_up(fast)
    runner = ModelRunner(language_model(fast, lean=True))
    runner.reset(32)
    tokens = torch.arange(3, 20)
    ours, own = runner.prefill(tokens.numpy(), 0), stock(tokens[None]).logits[0]
    assert ours.dtype == torch.bfloat16
    assert (ours.float() - own.float()).norm() / own.float().norm() < 0.02  # a rounding is 0.004


def test_exact_attention_does_not_depend_on_where_ancestors_lie() -> None:
    """The same slots alone, and scattered among hidden strangers: the same bits. In float32 some would differ."""
    generator = torch.Generator().manual_seed(0)
    heads, shared, width, rows, slots, strangers = 8, 2, 64, 64, 90, 25
    lowest = torch.finfo(torch.bfloat16).min
    for _ in range(8):
        query, keys, values = (
            torch.randn(1, *shape, width, generator=generator).bfloat16()
            for shape in ((heads, rows), (shared, slots), (shared, slots))
        )
        alone = exact_attention(query, keys, values, torch.zeros(1, 1, rows, slots).bfloat16(), 0.125)
        own = torch.randperm(slots + strangers, generator=generator)[:slots].sort().values
        mask = torch.full((1, 1, rows, slots + strangers), lowest).bfloat16()
        mask[..., own] = 0
        among_keys, among_values = (
            torch.randn(1, shared, slots + strangers, width, generator=generator).bfloat16() for _ in range(2)
        )
        among_keys[:, :, own], among_values[:, :, own] = keys, values
        assert torch.equal(exact_attention(query, among_keys, among_values, mask, 0.125), alone)
        double = (query.double(), keys.double(), values.double())
        expected = scaled_dot_product_attention(*double, scale=0.125, enable_gqa=True).bfloat16()
        torch.testing.assert_close(alone, expected, rtol=8e-3, atol=0)


def products_keep_rows_apart() -> bool:
    """Whether packed bfloat16 products give a row the same bits in every company of two and more rows."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(rows, 48, generator=generator).bfloat16() for rows in (32, 40))
    packed = PackedLinear(weight)
    return all(torch.equal(packed(x[:rows].clone()), packed(x)[:rows]) for rows in range(2, 32))


@pytest.mark.skipif(not products_keep_rows_apart(), reason="packed products of this CPU depend on the number of rows")
@pytest.mark.parametrize("name", LEAN)
def test_in_bfloat16_a_trees_path_has_the_bits_of_plain_decoding(name: str) -> None:
    """A path decoded token by token, and scattered in trees of random siblings: the same logits, bit for bit."""
    random = np.random.default_rng(0)
    module = build(LEAN, name).bfloat16()
    speed_up(module)
    runner = ModelRunner(language_model(module, lean=True))
    for _ in range(20):
        prompt, path = random.integers(0, VOCAB, 40), random.integers(0, VOCAB, 5)
        runner.reset(128)
        runner.prefill(prompt)
        alone = torch.cat([runner.prefill(path[place : place + 1], 0) for place in range(len(path))])
        parents, on_path = [0], [0]
        for _ in path[1:]:
            parents += random.integers(0, len(parents), random.integers(0, 5)).tolist()  # siblings and cousins
            parents.append(on_path[-1])
            on_path.append(len(parents) - 1)
        visible = np.eye(len(parents), dtype=np.bool_)
        for node, parent in enumerate(parents[1:], 1):
            visible[node] |= visible[parent]
        tokens = random.integers(0, VOCAB, len(parents))
        tokens[on_path] = path
        runner.reset(128)
        runner.prefill(prompt)
        among = runner.forward(tokens, len(prompt) + visible.sum(1) - 1, visible, on_path)
        assert torch.equal(among, alone)


@needs_bf16
def test_the_norm_in_one_call_rounds_as_transformers_does() -> None:
    norm = LlamaRMSNorm(96, eps=1e-5).bfloat16()
    norm.weight.data.uniform_(0.5, 2)
    holder = nn.Module()
    holder.norm = copy.deepcopy(norm)
    speed_up(holder)
    assert isinstance(holder.norm, FastRMSNorm)
    x = torch.randn(7, 96).bfloat16()
    assert torch.equal(holder.norm(x), norm(x).detach())


@pytest.mark.parametrize("name", [*LEAN, *OTHERS])
def test_rows_that_fill_up_a_small_forward_leave_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A one-token prompt, single tokens, a tree of two siblings: logits and cache as without them."""
    module = build(LEAN | OTHERS, name)
    speed_up(module)
    head_rows: list[int] = []
    module.get_output_embeddings().register_forward_pre_hook(lambda _, x: head_rows.append(x[0].shape[-2]))
    results = []
    for capability, fewest in (("AVX2", 1), ("AVX512", 4)):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        runner = ModelRunner(language_model(module, lean=name in LEAN))
        runner.reset(1)
        head_rows.clear()
        logits = [runner.prefill(np.array([3]), 0)]
        for tokens in ([5], [6, 8]):
            places = np.full(len(tokens), runner.committed)
            logits.append(runner.forward(np.array(tokens), places, np.eye(len(tokens), dtype=np.bool_), slice(None)))
            runner.commit([runner.committed + len(tokens) - 1])
        logits.append(runner.prefill(np.arange(9, 16), 6))
        assert runner.prefill(np.array([4])).shape == (0, VOCAB)
        assert len(head_rows) >= 4
        assert head_rows[-1] == 0  # where no logits are wanted, none are made up
        assert min(rows for rows in head_rows if rows) == fewest
        results.append((torch.cat(logits), runner.cache.length, runner.tokens_processed))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=1e-5)
    assert results[0][1:] == results[1][1:] == (11, 12)


# By what PyTorch says of itself: the probe of `can_quantize` would skip the tests of a product that computes wrongly.
needs_int8 = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="this build of PyTorch has no FBGEMM"
)


@needs_int8
def test_the_probe_finds_the_int8_product() -> None:
    assert can_quantize()


@needs_int8
@pytest.mark.parametrize("name", LEAN)
def test_the_lean_forward_of_int8_weights_is_near_the_exact_model(name: str) -> None:
    stock = build(LEAN, name)
    fast = copy.deepcopy(stock)
    speed_up(fast, int8=True)
    assert all(type(module) is not nn.Linear for module in fast.modules())
    runner = ModelRunner(language_model(fast, lean=True))
    runner.reset(32)
    tokens = torch.arange(3, 20)
    ours, exact = runner.prefill(tokens.numpy(), 0), stock(tokens[None]).logits[0]
    assert 0 < (ours - exact).norm() / exact.norm() < 0.1


@needs_int8
def test_whole_numbers_go_through_int8_unchanged() -> None:
    """Weights and inputs on the grid of the rounding, some all at its ends: nothing is lost, nothing overflows."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-63, 64, (40, 64), generator=generator).float()
    weight[:, 0], weight[0] = 63, 63
    x = torch.randint(-127, 128, (3, 5, 64), generator=generator).float()
    x[..., 0], x[0, 0], x[0, 1] = 127, 127, -127
    bias = torch.arange(40.0)
    shrink = torch.logspace(-3, 3, 40, base=2)[:, None]  # each output has its own scale
    layer = QuantizedLinear(weight * shrink, bias)
    exact = x.double() @ (weight * shrink).T.double() + bias.double()  # a unit more or less would be 1/8 and more
    torch.testing.assert_close(layer(x).double(), exact, rtol=1e-6, atol=0.06)
    torch.testing.assert_close(layer(torch.zeros(2, 64)), bias.expand(2, 40))
    assert layer(x[:, :0]).shape == (3, 0, 40)


@needs_int8
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_int8_rounds_each_row_by_itself(rows: int) -> None:
    """What a drafter says of a node must not depend on the rest of the forward: decoder and lattice differ there."""
    layer = QuantizedLinear(torch.randn(48, 32))
    x = torch.randn(rows, 32) * torch.logspace(-3, 3, rows)[:, None]
    assert torch.equal(layer(x), torch.cat([layer(row[None]) for row in x]))


@needs_int8
def test_packing_for_int8_leaves_pytorchs_global_choice_alone() -> None:
    before = torch.backends.quantized.engine
    QuantizedLinear(torch.randn(8, 8))
    assert torch.backends.quantized.engine == before


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_keep_their_own_forward_and_its_result(name: str) -> None:
    stock = build(OTHERS, name)
    fast = copy.deepcopy(stock)
    speed_up(fast)
    assert lean_forward(fast) is None
    tokens = torch.arange(2, 12)[None]
    torch.testing.assert_close(fast(tokens).logits, stock(tokens).logits, rtol=1e-4, atol=1e-4)


def test_a_model_that_differs_inside_is_found_out() -> None:
    """All parts are there, but the MLP computes something else: the probe says no."""
    module = build(LEAN, "llama")
    for layer in module.model.layers:
        layer.mlp.act_fn = nn.GELU()
    speed_up(module)
    assert lean_forward(module) is None


SAME_PARTS: dict[str, tuple[Any, Any]] = {
    "queries scaled from a position on": (
        Ministral3ForCausalLM,
        Ministral3Config(
            **SHAPE,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e4,
                "llama_4_scaling_beta": 0.01,
                "original_max_position_embeddings": 64,
            },
        ),
    ),
    "a layer without rotation": (
        SmolLM3ForCausalLM,
        SmolLM3Config(**SHAPE | {"initializer_range": 0.02}, no_rope_layers=[1, 0], pad_token_id=0),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_bf16)], ids=str)
@pytest.mark.parametrize("name", SAME_PARTS)
def test_a_model_with_the_same_parts_and_other_arithmetic_is_not_taken(name: str, dtype: torch.dtype) -> None:
    """Differences that a probe's tolerance may let pass, in bfloat16 above all."""
    module: Any = build(SAME_PARTS, name)
    module.to(dtype)
    speed_up(module)
    assert lean_forward(module) is None


@pytest.mark.parametrize("rows", [1, 2, 8, 33])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_weights_give_the_same_product(rows: int, bias: bool) -> None:
    linear = nn.Linear(24, 40, bias=bias)
    x = torch.randn(2, rows, 24)
    packed = PackedLinear(linear.weight, linear.bias)
    torch.testing.assert_close(packed(x), linear(x).detach(), rtol=1e-5, atol=1e-5)


def test_fused_layers_answer_in_any_order() -> None:
    attention = nn.Module()
    attention.q_proj, attention.k_proj, attention.v_proj = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
    own = copy.deepcopy(attention)
    speed_up(attention)
    assert isinstance(attention.k_proj, FusedPart)
    one, two = torch.randn(3, 8), torch.randn(3, 8)
    for name, x in (("k_proj", one), ("q_proj", one), ("q_proj", two), ("v_proj", one), ("k_proj", two)):
        torch.testing.assert_close(getattr(attention, name)(x), getattr(own, name)(x).detach())
