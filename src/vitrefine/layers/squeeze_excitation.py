"""Squeeze-and-excitation over tokens, to compare Context Broadcasting with (CB, Table 3; Hu et al., 2018).

    SE(x_i) = x_i ⊙ sigmoid(W_2 relu(W_1 mean_j x_j + b_1) + b_2)

timm has it for feature maps only, without masks; this one takes token sequences too.
"""

import torch
from torch import Tensor, nn

from vitrefine.errors import UserError, check_choice
from vitrefine.ops.context_broadcast import TOKEN_DIMS, mean_token


class TokenSqueezeExcitation(nn.Module):
    """The mean token, through two linear layers and a sigmoid, scales the channels of every token.

    A sigmoid stays below one, so no weights make this the identity: unlike CB_S, a model cannot start output-equal.

    Args:
        dim: Number of channels.
        reduction: How many times fewer channels lie between the two layers; the CB paper gives none, SE's is 16.
        layout: `NLC` for tokens, `NHWC` or `NCHW` for a feature map.
        device: Where to put the parameters.
        dtype: Of the parameters.
    """

    def __init__(
        self,
        dim: int,
        reduction: int = 16,
        layout: str = "NLC",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("layout", layout, TOKEN_DIMS)
        if not 1 <= reduction <= dim:
            raise UserError(f"squeeze-excitation cannot reduce {dim} channels {reduction} times; choose 1 to {dim}")
        self.layout = layout
        self.fc1 = nn.Linear(dim, dim // reduction, device=device, dtype=dtype)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(dim // reduction, dim, device=device, dtype=dtype)
        self.gate = nn.Sigmoid()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mean = mean_token(x, layout=self.layout, mask=mask)
        gate = self.gate(self.fc2(self.act(self.fc1(mean.flatten(1)))))
        return x * gate.reshape(mean.shape)

    def extra_repr(self) -> str:
        return f"layout={self.layout!r}"
