"""Linear layers that read a few tokens at once as fast as memory allows, on CPU.

Verification multiplies a handful of rows with every weight of the target. PyTorch hands such products to a general
matrix kernel that repacks the weights each time and costs up to five times one row's product for four rows; oneDNN
with weights packed once reads them at memory speed (measured: benchmarks/linear_kernels.py).
"""

import torch
from torch import Tensor, nn

EXPECTED_ROWS = 8  # the layout is tuned for a verified tree; other sizes work too


class PackedLinear(nn.Module):
    """An inference-only replacement of ``nn.Linear``, holding its weights in oneDNN's blocked layout.

    in: float [..., in_features]; out: float [..., out_features].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # an opaque layout that no state dict could hold: plain attributes, not buffers
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), EXPECTED_ROWS)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return out


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has a packed kernel for a weight of this device and type."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack_linears(module: nn.Module) -> None:
    """Replace every ``nn.Linear`` below ``module`` whose weight can be packed, in place; the old weight is freed.

    A weight that is shared (a head tied to the embedding) stays in memory for its other user.
    """
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_pack(child.weight):
                setattr(parent, name, PackedLinear(child.weight, child.bias))
