"""Context Broadcasting as modules, and the MLP that ends with one (CB, Eqn. 1, Fig. 6b; supplement Table S5).

Only CB_S has a parameter, its Λ: `scale`. It starts at zero, so that a model with CB_S starts as the model without.
The other three change the output of the model from the first step on.
"""

from typing import Any

import torch
from timm.layers import Mlp
from torch import Tensor, nn

from vitrefine.errors import check_choice
from vitrefine.ops.context_broadcast import (
    TOKEN_DIMS,
    context_broadcast,
    gated_context_broadcast,
    hybrid_context_broadcast,
    scaled_context_broadcast,
)


class _Broadcast(nn.Module):
    def __init__(self, layout: str = "NLC") -> None:
        super().__init__()
        check_choice("layout", layout, TOKEN_DIMS)
        self.layout = layout

    def extra_repr(self) -> str:
        return f"layout={self.layout!r}"


class ContextBroadcast(_Broadcast):
    """CB: halfway between each token and the mean token.

    Args:
        layout: `NLC` for tokens, `NHWC` or `NCHW` for a feature map.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return context_broadcast(x, layout=self.layout, mask=mask)


class ScaledContextBroadcast(_Broadcast):
    """CB_S: the mean token added, each channel by its own learned amount, zero at the start.

    Args:
        dim: Number of channels.
        layout: `NLC` for tokens, `NHWC` or `NCHW` for a feature map.
        device: Where to put the parameter.
        dtype: Of the parameter.
    """

    def __init__(
        self,
        dim: int,
        layout: str = "NLC",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(layout)
        self.scale = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.scale)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return scaled_context_broadcast(x, self.scale, layout=self.layout, mask=mask)

    def extra_repr(self) -> str:
        return f"dim={self.scale.numel()}, {super().extra_repr()}"


class _GateBroadcast(_Broadcast):
    def __init__(self, layout: str = "NLC", class_token: bool = True) -> None:
        super().__init__(layout)
        self.class_token = class_token

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, class_token={self.class_token}"


class GatedContextBroadcast(_GateBroadcast):
    """CB_gate: the class token opens or closes channels of every token.

    Args:
        layout: `NLC` for tokens, `NHWC` or `NCHW` for a feature map.
        class_token: Whether the first token is a class token; without one the mean token gates.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return gated_context_broadcast(x, layout=self.layout, class_token=self.class_token, mask=mask)


class HybridContextBroadcast(_GateBroadcast):
    """CB_hybrid: the class token's gate, and the mean token.

    Args:
        layout: `NLC` for tokens, `NHWC` or `NCHW` for a feature map.
        class_token: Whether the first token is a class token; without one the mean token gates.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return hybrid_context_broadcast(x, layout=self.layout, class_token=self.class_token, mask=mask)


BROADCASTS = ("cb", "cb_s", "cb_gate", "cb_hybrid")


def create_broadcast(
    name: str,
    dim: int,
    *,
    layout: str = "NLC",
    class_token: bool = True,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """The module that papers and specs call `cb`, `cb_s`, `cb_gate` or `cb_hybrid`; each takes what it needs."""
    check_choice("broadcast", name, BROADCASTS)
    match name:
        case "cb":
            return ContextBroadcast(layout)
        case "cb_s":
            return ScaledContextBroadcast(dim, layout, device=device, dtype=dtype)
        case "cb_gate":
            return GatedContextBroadcast(layout, class_token)
    return HybridContextBroadcast(layout, class_token)


class ContextBroadcastMlp(Mlp):
    """timm's MLP with a broadcast at its end: after the second linear layer and dropout, before the residual sum.

    `fc1` and `fc2` keep their names, so the weights of a plain MLP load; CB_S alone adds one, `broadcast.scale`.

    Args:
        in_features: Channels of the input.
        hidden_features: Channels between the two layers; as the input if None.
        out_features: Channels of the output; as the input if None.
        broadcast: `cb`, `cb_s`, `cb_gate` or `cb_hybrid`.
        layout: Layout of the input; with `use_conv=True` it is `NCHW`.
        class_token: Whether the first token is a class token, for the two broadcasts that ask.
        device: Where to put the parameters.
        dtype: Of the parameters.
        **mlp_args: The other arguments of `timm.layers.Mlp`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        *,
        broadcast: str = "cb",
        layout: str = "NLC",
        class_token: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **mlp_args: Any,
    ) -> None:
        super().__init__(in_features, hidden_features, out_features, device=device, dtype=dtype, **mlp_args)
        self.broadcast = create_broadcast(
            broadcast,
            out_features or in_features,
            layout="NCHW" if mlp_args.get("use_conv") else layout,
            class_token=class_token,
            device=device,
            dtype=dtype,
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.broadcast(super().forward(x), mask)
