"""Context Broadcasting: uniform attention, supplied by hand (CB, Eqn. 1; supplement for the gate and the hybrid).

    CB(x_i)        = (x_i + mean_j x_j) / 2
    CB_S(x_i)      = x_i + Λ ⊙ mean_j x_j
    CB_gate(x_i)   = x_i ⊙ (x_0 + 1)              x_0: the class token
    CB_hybrid(x_i) = x_i ⊙ x_0 + CB(x_i)

The mean runs over every token, the class token too. A feature map has no class token: there the mean token stands
in for x_0, as it does in a mean-pooled classifier (our reading; the paper defines the two for ViTs alone).
"""

import torch
from torch import Tensor

from vitrefine.errors import check_choice

TOKEN_DIMS = {"NLC": (1,), "NHWC": (1, 2), "NCHW": (2, 3)}


def mean_token(x: Tensor, *, layout: str = "NLC", mask: Tensor | None = None) -> Tensor:
    """The mean over tokens, kept broadcastable to x; over the tokens that `mask` (True: real) lets in, if given."""
    check_choice("layout", layout, TOKEN_DIMS)
    dims = TOKEN_DIMS[layout]
    if mask is None:
        return x.mean(dim=dims, keepdim=True)
    weight = mask.unsqueeze(1 if layout == "NCHW" else -1).to(x.dtype)
    wide = torch.promote_types(x.dtype, torch.float32)  # the sum of a sequence may be too large for half precision
    total, count = (t.sum(dim=dims, keepdim=True, dtype=wide) for t in (x * weight, weight))
    return (total / count.clamp(min=1)).to(x.dtype)


def _gate_token(x: Tensor, layout: str, class_token: bool, mask: Tensor | None) -> Tensor:
    return x[:, :1] if class_token and layout == "NLC" else mean_token(x, layout=layout, mask=mask)


def context_broadcast(x: Tensor, *, layout: str = "NLC", mask: Tensor | None = None) -> Tensor:
    """CB: halfway between each token and the mean token."""
    return torch.lerp(x, mean_token(x, layout=layout, mask=mask), 0.5)


def scaled_context_broadcast(x: Tensor, scale: Tensor, *, layout: str = "NLC", mask: Tensor | None = None) -> Tensor:
    """CB_S: the mean token added, each channel by its own learned amount."""
    if layout == "NCHW":
        scale = scale[:, None, None]
    return x + scale * mean_token(x, layout=layout, mask=mask)


def gated_context_broadcast(
    x: Tensor, *, layout: str = "NLC", class_token: bool = True, mask: Tensor | None = None
) -> Tensor:
    """CB_gate: the class token opens or closes channels of every token."""
    return x * (_gate_token(x, layout, class_token, mask) + 1)


def hybrid_context_broadcast(
    x: Tensor, *, layout: str = "NLC", class_token: bool = True, mask: Tensor | None = None
) -> Tensor:
    """CB_hybrid: the class token's gate, and the mean token."""
    gate = _gate_token(x, layout, class_token, mask)
    return x * gate + context_broadcast(x, layout=layout, mask=mask)
