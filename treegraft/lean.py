"""A leaner forward for the commonest decoder (Llama and its like), on CPU.

In a model of 135M parameters half of the time of a one-token forward goes into the framework: hundreds of small module
calls, masks, copies of grouped keys and values. This is the same arithmetic in the fewest calls, straight into the
preallocated cache. It knows one architecture: pre-norm layers of rotary attention and a gated SiLU MLP. A model must be
of a type that is known to be one, have its parts, and agree with its own class on a probe; any other runs through its
own class. Parts and probe alone would not do: models with the same parts leave out the rotation in some layers or scale
their queries, and what bfloat16 rounds away leaves room for that.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from treegraft.cache import TreeCache, TreeLayer
from treegraft.cpu_kernels import FastLinear, FastRMSNorm, FusedPart, QuantizedLinear

KNOWN_TYPES = {"llama", "mistral", "qwen2", "qwen3"}
LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
ATTENTION_PARTS = (PROJECTIONS, PROJECTIONS | {"q_norm", "k_norm"})
PROBE_TOKENS = 6
MOST_EXACT_ROWS = 64  # a verified tree; a longer forward is a prompt's, which plain decoding has in the same pieces


class LeanForward:
    """Logits of a model whose layers are of the one kind described above; see ``lean_forward``."""

    def __init__(self, module: PreTrainedModel) -> None:
        body: Any = module.model
        self.embed = body.embed_tokens
        self.rotary = body.rotary_emb
        self.norm = body.norm
        self.head = module.get_output_embeddings()
        self.layers = [_Layer(layer) for layer in body.layers]

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: TreeCache, rows: Tensor) -> Tensor:
        """Process tokens at the cache's next slots.

        Args:
            tokens, positions: int64 [n]; mask: float [n, cache.length + n], added to the attention scores.
            rows: int64 [r]: the tokens whose logits are wanted.

        Returns:
            float [r, vocabulary].
        """
        hidden = self.embed(tokens)
        cos, sin = self.rotary(hidden, positions[None])
        cos, sin = cos[0, :, None], sin[0, :, None].clone()  # [n, 1, head_dim]
        half = sin.shape[-1] // 2
        sin[..., :half].neg_()  # so that a rotation is two products: x cos + roll(x) sin
        for layer, slots in zip(self.layers, cache.tree_layers, strict=True):
            hidden = layer(hidden, cos, sin, half, mask[None, None], slots)
        logits: Tensor = self.head(self.norm(hidden[rows]))
        return logits


def exact_attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention in float64: rounded to bfloat16, it does not depend on where in the cache a token's ancestors lie.

    On some CPUs all else in a bfloat16 forward gives a row the same bits in every company (see decisions.md), so there
    a tree's path is decoded as plain decoding would decode it. In lower precision the order of summation shows, a last
    bit here and there, and the layers above make other logits of it.

    Args:
        query: [1, heads, n, head_dim]; keys, values: [1, shared, slots, head_dim]; mask: [1, 1, n, slots], added.

    Returns:
        [1, heads, n, head_dim] in the query's type.
    """
    _, heads, n, width = query.shape
    shared, slots = keys.shape[1:3]
    grouped = query[0].reshape(shared, -1, width).double().mul_(scale)  # [shared, heads / shared * n, head_dim]
    scores = torch.bmm(grouped, keys[0].double().transpose(1, 2))
    scores.view(shared, -1, n, slots).add_(mask[0])
    mixed = torch.bmm(scores.softmax(-1), values[0].double())
    return mixed.view(1, heads, n, width).to(query.dtype)


class _Layer:
    """One layer's parts, taken out of their modules."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norm_in, self.norm_out = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv, self.out = attention.q_proj.fused, attention.o_proj
        self.gate_up, self.down = mlp.gate_proj.fused.linear, mlp.down_proj
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.head_dim = int(attention.head_dim)
        self.heads = self.qkv.sizes[0] // self.head_dim
        self.kv_heads = self.qkv.sizes[1] // self.head_dim
        self.scaling = attention.scaling

    def __call__(self, hidden: Tensor, cos: Tensor, sin: Tensor, half: int, mask: Tensor, slots: TreeLayer) -> Tensor:
        n, heads = len(hidden), self.heads
        fused = self.qkv.linear(self.norm_in(hidden)).view(n, -1, self.head_dim)
        turned = fused[:, : heads + self.kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            turned = torch.cat([self.q_norm(turned[:, :heads]), self.k_norm(turned[:, heads:])], dim=1)
        turned = torch.addcmul(turned * cos, turned.roll(half, -1), sin)
        keys, values = slots.update(
            turned[:, heads:].transpose(0, 1)[None], fused[:, heads + self.kv_heads :].transpose(0, 1)[None]
        )
        query = turned[:, :heads].transpose(0, 1)[None]  # [1, heads, n, head_dim]
        if query.dtype == torch.bfloat16 and n <= MOST_EXACT_ROWS:
            mixed = exact_attention(query, keys, values, mask, self.scaling)
        else:
            mixed = scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, scale=self.scaling, enable_gqa=heads != self.kv_heads
            )
        hidden = hidden + self.out(mixed[0].transpose(0, 1).reshape(n, -1))
        gate, up = self.gate_up(self.norm_out(hidden)).chunk(2, dim=-1)
        return hidden.add_(self.down(silu(gate).mul_(up)))


def lean_forward(module: PreTrainedModel) -> LeanForward | None:
    """The lean forward of a model that ``speed_up`` has worked on; None if it is not of the one kind, or differs."""
    if module.config.model_type not in KNOWN_TYPES or not _has_the_parts(module):
        return None
    lean = LeanForward(module)
    return lean if _agrees(lean, module) else None


def _has_the_parts(module: PreTrainedModel) -> bool:
    body = getattr(module, "model", None)
    parts = {"embed_tokens", "layers", "norm", "rotary_emb"}
    if body is None or {name for name, _ in body.named_children()} != parts:
        return False
    if not isinstance(body.norm, FastRMSNorm) or not isinstance(module.get_output_embeddings(), FastLinear):
        return False
    return all(_is_known(layer) for layer in body.layers)


def _is_known(layer: Any) -> bool:
    def parts(of: nn.Module) -> set[str]:
        return {name for name, _ in of.named_children()}

    if parts(layer) != LAYER_PARTS or parts(layer.self_attn) not in ATTENTION_PARTS:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    fused = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj")] + [attention.q_proj]
    return (
        all(isinstance(part, FusedPart) for part in fused)
        and all(isinstance(part, FastLinear) for part in (attention.o_proj, getattr(mlp, "down_proj", None)))
        and all(isinstance(norm, FastRMSNorm) for norm in (layer.input_layernorm, layer.post_attention_layernorm))
        and isinstance(getattr(attention, "scaling", None), float)
    )


@torch.inference_mode()
def _agrees(lean: LeanForward, module: PreTrainedModel) -> bool:
    """Whether both forwards give the same logits for a few tokens of a small tree."""
    vocabulary: Any = module.get_input_embeddings().num_embeddings
    tokens = torch.arange(PROBE_TOKENS) * 7919 % vocabulary
    positions = torch.tensor([0, 1, 2, 3, 3, 4])  # two siblings, and a child of the second
    seen = torch.ones(PROBE_TOKENS, PROBE_TOKENS).tril().bool()
    seen[4, 3] = seen[5, 3] = False
    mask = torch.zeros(PROBE_TOKENS, PROBE_TOKENS, dtype=module.dtype).masked_fill_(
        ~seen, torch.finfo(module.dtype).min
    )
    count = module.config.get_text_config().num_hidden_layers
    ours = lean(tokens, positions, mask, TreeCache(count, PROBE_TOKENS), torch.arange(PROBE_TOKENS)).float()
    theirs = module(
        input_ids=tokens[None],
        position_ids=positions[None],
        attention_mask=mask[None, None],
        cache=TreeCache(count, PROBE_TOKENS),
        use_cache=True,
    ).logits[0]
    # what differs in the last digit may round to another integer
    exact = module.dtype == torch.float32 and not isinstance(module.get_output_embeddings(), QuantizedLinear)
    tolerance = 1e-3 if exact else 5e-2
    return bool((ours - theirs.float()).abs().max() <= tolerance * theirs.float().abs().max())
