"""Attention in which one head is uniform: its map is 1/N everywhere, nothing to learn (CB, Table 1, A to C).

    head_h(x) = softmax(Q_h K_hᵀ/√w) V_h   for the learned heads
    head_u(x) = mean_j V_u x_j              for the uniform one: no queries, no keys

The paper gives a line and rounded parameter counts; with d = C/H, what we build, and ViT-S (22,050,664) with it:

    replace (A)  head H is uniform, its queries and keys are gone                    21,459,304   paper 21 M
    widen (B)    as A, and the H−1 learned heads have queries and keys of width
                 w = round(C/(H−1)), which returns the 2·C·d weights taken away      22,059,904   paper 22 M
    append (C)   H learned heads and a uniform one of width d beside them            22,641,256   paper 29 M

29 M is out of reach of one more head of width d. A whole model one head wider reaches it, 448 channels and seven heads
of which one is uniform (`replace`): 29,164,712. So would a second set of projections, 4C(C+1) a block: 29,146,984.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrefine.errors import UserError, check_choice
from vitrefine.ops.refined_attention import visible_pairs

MODES = ("replace", "widen", "append")


class UniformHeadAttention(nn.Module):
    """Multi-head self-attention with one uniform head; (B, N, C) in and out.

    Weights are named as in timm's attention. Those of a plain one load: `append` keeps their shapes and starts
    output-equal to it (`uniform_proj` starts at zero), `replace` drops the last head's queries and keys while loading.
    `widen` changes the width of queries and keys, so it is for training from scratch.

    Args:
        dim: Channels C.
        num_heads: Heads H of the attention this one stands for.
        mode: `replace`, `widen` or `append`.
        qkv_bias: Whether queries, keys and values have a bias.
        attn_drop: Dropout of the learned maps; the uniform one is left whole.
        proj_drop: Dropout of the output.
        device: Where to put the parameters.
        dtype: Of the parameters.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mode: str = "replace",
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice("mode of a uniform head", mode, MODES)
        if dim % num_heads:
            raise UserError(f"{dim} channels do not divide into {num_heads} heads; choose a divisor of {dim}")
        if num_heads == 1 and mode != "append":
            raise UserError(f"mode {mode!r} would leave no learned head of one; choose 'append' or more heads")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_heads, self.mode = num_heads, mode
        self.head_dim = dim // num_heads
        self.learned_heads = num_heads if mode == "append" else num_heads - 1
        self.query_dim = round(dim / self.learned_heads) if mode == "widen" else self.head_dim
        self.qkv = nn.Linear(dim, 2 * self.learned_heads * self.query_dim + dim, bias=qkv_bias, **factory)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, **factory)
        if mode == "append":
            self.uniform_value = nn.Linear(dim, self.head_dim, bias=qkv_bias, **factory)
            # A raw parameter, because models initialise every nn.Linear they find and this one has to start at zero.
            self.uniform_proj = nn.Parameter(torch.empty(dim, self.head_dim, **factory))
        self.proj_drop = nn.Dropout(proj_drop)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.mode == "append":
            nn.init.zeros_(self.uniform_proj)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attend.

        Args:
            x: Tokens.
            attn_mask: Boolean (True: visible) or additive, broadcastable to (B, H, N, N). The uniform head averages
                the keys that a query sees in any head.
            is_causal: Whether a query sees only itself and what precedes it; `attn_mask` is then ignored, as in timm.
        """
        tokens = x.shape[1]
        if is_causal:
            attn_mask = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
        width = self.learned_heads * self.query_dim
        q, k, v = self.qkv(x).split([width, width, self.num_heads * self.head_dim], dim=-1)
        v = v.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        learned = F.scaled_dot_product_attention(
            q.unflatten(-1, (self.learned_heads, self.query_dim)).transpose(1, 2),
            k.unflatten(-1, (self.learned_heads, self.query_dim)).transpose(1, 2),
            v[:, : self.learned_heads],
            attn_mask=self._learned_mask(attn_mask),
            dropout_p=self.attn_drop.p if self.training else 0.0,
        )
        if self.mode == "append":
            uniform = _uniform_attention(self.uniform_value(x)[:, None], attn_mask)
            out = self.proj(learned.transpose(1, 2).flatten(2)) + F.linear(uniform[:, 0], self.uniform_proj)
        else:
            uniform = _uniform_attention(v[:, self.learned_heads :], attn_mask)
            out = self.proj(torch.cat([learned, uniform], dim=1).transpose(1, 2).flatten(2))
        return self.proj_drop(out)

    def _learned_mask(self, attn_mask: Tensor | None) -> Tensor | None:
        if attn_mask is None or attn_mask.ndim < 3:
            return attn_mask
        return attn_mask[..., : self.learned_heads, :, :]  # a mask that gives each head its own has one for head H

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        dim = self.qkv.in_features
        for name in (f"{prefix}qkv.weight", f"{prefix}qkv.bias"):
            if self.mode == "replace" and name in state_dict and state_dict[name].shape[0] == 3 * dim:
                q, k, v = state_dict[name].split(dim)
                state_dict[name] = torch.cat([q[: -self.head_dim], k[: -self.head_dim], v])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, mode={self.mode!r}, query_dim={self.query_dim}"


def _uniform_attention(v: Tensor, attn_mask: Tensor | None) -> Tensor:
    """The mean of the values a query may see, (B, 1, N, d); zero for a query that sees none."""
    if attn_mask is None:
        return v.mean(dim=2, keepdim=True).expand_as(v)
    visible = visible_pairs(attn_mask)
    if visible.ndim > 2:
        visible = visible.any(dim=-3, keepdim=True)
    weight = visible.expand(*visible.shape[:-1], v.shape[2]).to(v.dtype)
    return (weight / weight.sum(dim=-1, keepdim=True).clamp(min=1) @ v).expand_as(v)
