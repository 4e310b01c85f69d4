"""Faster layers for a few tokens at a time on CPU, put into a loaded model in place of transformers' own.

Decoding multiplies one to a dozen rows with every weight. PyTorch hands such products to a general matrix kernel that
costs up to five times one row's product for four rows; oneDNN with weights packed once reads them at memory speed.
What is left is the price of many small calls: projections of the same input are fused, norms become one call.
Measured: benchmarks/engine.py. Any family's own forward works on with them; what a family does differently is left as
it is.

A drafter may have int8 weights: reading weights is most of the work of a small forward, and what a drafter rounds off
costs acceptance, never a wrong token.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

WEIGHT_LEVELS, ACTIVATION_LEVELS = 63, 127  # to each side of zero
TINY = 1e-12  # in place of the scale of a row of zeros
EXPECTED_ROWS = 8  # the packed layout is tuned for a verified tree; other sizes work too
SMALL_PRODUCT = 4  # rows that cost less than one with AVX-512; see `fewest_rows`
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers that transformers gives one input


class PackedLinear(nn.Module):
    """An inference-only ``nn.Linear``, holding its weights in oneDNN's blocked layout.

    in: float [..., in_features]; out: float [..., out_features].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # an opaque layout that no state dict could hold: plain attributes, not buffers
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), EXPECTED_ROWS)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


class QuantizedLinear(nn.Module):
    """An inference-only linear layer of int8 weights and activations, fed and answering in float32.

    Every output has its own weight scale and every row of the input its own activation scale, found as it comes: so a
    token's result does not depend on the tokens beside it. Weights take 7 of the 8 bits, because CPUs without VNNI
    instructions add pairs of products in 16 bits, which full ranges on both sides would overflow.

    in: float32 [..., in_features]; out: float32 [..., out_features].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        weight = weight.detach()
        scale = (weight.abs().amax(1) / WEIGHT_LEVELS).clamp_min(TINY)
        whole = (weight / scale[:, None]).round().to(torch.int8)
        zeros = torch.zeros(len(scale), dtype=torch.int64)
        with _fbgemm(), warnings.catch_warnings():
            # PyTorch warns that these tensors will go; oneDNN's product, which does without, takes two to three times
            # as long where there is no VNNI. A build without them is found out by `can_quantize`.
            warnings.simplefilter("ignore", UserWarning)
            rows = torch._make_per_channel_quantized_tensor(whole, scale.double(), zeros, 0)
            self.packed = torch.ops.quantized.linear_prepack(rows, None)
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        scale = rows.abs().amax(-1, keepdim=True).clamp_min_(TINY)  # the infinity norm takes ten times as long
        out: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            rows / scale, 1 / ACTIVATION_LEVELS, ACTIVATION_LEVELS + 1, self.packed
        )
        out.mul_(scale)
        if self.bias is not None:
            out.add_(self.bias)
        return out.view(*x.shape[:-1], self.out_features)


@contextmanager
def _fbgemm() -> Iterator[None]:
    """Pack for the one engine that has the product; PyTorch keeps the choice in a global."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


FastLinear = PackedLinear | QuantizedLinear


class _Fused:
    """Linear layers of one input as one product; whoever asks first with a new input computes it for all."""

    def __init__(self, parts: Sequence[nn.Linear], make: type[FastLinear]) -> None:
        weight = torch.cat([part.weight for part in parts])
        bias = torch.cat([part.bias for part in parts]) if parts[0].bias is not None else None
        self.linear = make(weight, bias)
        self.sizes = [part.out_features for part in parts]
        self.input: Tensor | None = None
        self.outputs: tuple[Tensor, ...] = ()

    def part(self, number: int, x: Tensor) -> Tensor:
        if x is not self.input:
            self.input, self.outputs = x, self.linear(x).split(self.sizes, dim=-1)
        out = self.outputs[number]
        if number == len(self.sizes) - 1:
            self.input, self.outputs = None, ()  # asked in order, so nobody needs them any more
        return out


class FusedPart(nn.Module):
    """One of several linear layers that share their input (see ``_Fused``)."""

    def __init__(self, fused: _Fused, number: int) -> None:
        super().__init__()
        self.fused = fused
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return self.fused.part(self.number, x)


class FastRMSNorm(nn.Module):
    """Root-mean-square norm as one call, [..., n] -> [..., n]."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # weighted afterwards: in bfloat16 transformers rounds in between
        return torch.rms_norm(x, self.weight.shape, None, self.eps).mul_(self.weight)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has a packed kernel for a weight of this device and type."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def fewest_rows(module: PreTrainedModel) -> int:
    """How many rows a forward of a causal model that ``speed_up`` has worked on should have at least.

    With AVX-512, oneDNN's kernels for one to three packed rows read the weights more slowly than the one for four to
    six. Measured on two Zen 4 cores, the head of Qwen2.5-Coder-1.5B: 1, 2, 4 and 6 rows take 27, 34, 20 and 20 ms in
    float32, 13, 16, 11 and 10 ms in bfloat16. With AVX2, and with int8 weights, one row is the fastest.
    """
    packed = isinstance(module.get_output_embeddings(), PackedLinear)
    return SMALL_PRODUCT if packed and torch.backends.cpu.get_cpu_capability() == "AVX512" else 1


@cache
def can_quantize() -> bool:
    """Whether this build has the int8 product of ``QuantizedLinear``, and it computes here what it should."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    weight = torch.full((8, 64), WEIGHT_LEVELS, dtype=torch.float32)
    x = torch.full((2, 64), ACTIVATION_LEVELS, dtype=torch.float32)
    try:
        return torch.allclose(QuantizedLinear(weight)(x), x @ weight.T)
    except (RuntimeError, AttributeError):  # the operator is no part of PyTorch's public interface
        return False


@torch.inference_mode()
def speed_up(module: nn.Module, int8: bool = False) -> None:
    """Replace layers below ``module`` by faster ones of the same function, in place; old weights are freed.

    With ``int8`` (for models in float32 on CPU) linear layers are rounded as ``QuantizedLinear`` says.
    A weight that is shared (a head tied to the embedding) stays in memory for its other user.
    """
    make = QuantizedLinear if int8 else PackedLinear
    for parent in list(module.modules()):
        for names in SIBLINGS:
            parts = [getattr(parent, name, None) for name in names]
            if _can_fuse(parts):
                fused = _Fused(parts, make)  # type: ignore[arg-type]
                for number, name in enumerate(names):
                    setattr(parent, name, FusedPart(fused, number))
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_pack(child.weight):
                setattr(parent, name, make(child.weight, child.bias))
            elif (norm := _fast_norm(child)) is not None:
                setattr(parent, name, norm)


def _can_fuse(parts: Sequence[object]) -> bool:
    layers = [part for part in parts if type(part) is nn.Linear and can_pack(part.weight)]
    same = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}
    return len(layers) == len(parts) and len(same) == 1


def _fast_norm(child: nn.Module) -> FastRMSNorm | None:
    """A one-call norm for a family's RMSNorm, if it computes the same (Gemma's, say, adds one to the weight)."""
    weight = getattr(child, "weight", None)
    eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
    if "RMSNorm" not in type(child).__name__ or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    if not can_pack(weight):  # where nothing is packed, nothing is changed
        return None
    norm = FastRMSNorm(weight, eps)
    probe = torch.linspace(-3, 2, 2 * weight.numel(), dtype=weight.dtype).view(2, -1)
    same = torch.allclose(norm(probe), child(probe), rtol=1e-5, atol=1e-6)
    return norm if same else None
