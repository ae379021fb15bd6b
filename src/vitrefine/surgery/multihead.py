"""`torch.nn.MultiheadAttention` with its attention in the open.

PyTorch computes it in one function that no tap can look into, or in a native kernel: this graft writes the same
computation out with the module's own weights.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.surgery.graft import Graft, graft


class ExplicitMultihead(Graft):
    """The forward of `nn.MultiheadAttention` by its equations."""

    explicit: bool

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """No: a `nn.TransformerEncoderLayer` that is told yes computes everything itself and never calls forward."""
        return False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        mha: Any = self
        if query.is_nested:
            raise UserError(
                "nested tensors cannot be split into heads; make nn.TransformerEncoder with enable_nested_tensor=False"
            )
        batch_axis = 0 if mha.batch_first else 1
        alone = query.ndim == 2  # one sequence and no batch
        if alone:
            query, key, value = (x.unsqueeze(batch_axis) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        if not mha.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        weights, biases = mha.in_proj_weight.chunk(3), [None] * 3
        if mha.in_proj_bias is not None:
            biases = mha.in_proj_bias.chunk(3)
        q, k, v = (
            F.linear(x, w, b).view(*x.shape[:2], mha.num_heads, -1).transpose(1, 2)
            for x, w, b in zip((query, key, value), weights, biases, strict=True)
        )
        mask = _joined(attn_mask, key_padding_mask, mha.num_heads, q.dtype)
        dropout_p = mha.dropout if mha.training else 0.0
        maps = None
        if need_weights:
            scores = q * mha.head_dim**-0.5 @ k.transpose(-2, -1)
            maps = F.dropout((scores if mask is None else scores + mask).softmax(dim=-1), dropout_p)
            x = maps @ v
            maps = maps.mean(dim=1) if average_attn_weights else maps
        else:
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p)
        x = mha.out_proj(x.transpose(1, 2).flatten(2))
        x = x if mha.batch_first else x.transpose(0, 1)
        return (x.squeeze(batch_axis), None if maps is None else maps[0]) if alone else (x, maps)


def _joined(attn_mask: Tensor | None, padding: Tensor | None, heads: int, dtype: torch.dtype) -> Tensor | None:
    """Both masks as one additive one; in this module a boolean True means masked."""
    total: Tensor | None = None
    for mask, shape in ((attn_mask, (-1, heads)), (padding, None)):
        if mask is None:
            continue
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
        if shape is None:
            mask = mask[:, None, None, :]
        elif mask.ndim == 3:
            mask = mask.unflatten(0, shape)
        total = mask if total is None else total + mask
    return total


def explicit_multihead(model: nn.Module, module: nn.Module) -> None:
    """Open the module up if it is one of PyTorch's; leave any other as it is."""
    if not isinstance(module, nn.MultiheadAttention) or isinstance(module, ExplicitMultihead):
        return
    if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
        raise UserError("nn.MultiheadAttention with separate widths, bias_kv or add_zero_attn cannot be changed")
    graft(model, module, ExplicitMultihead, explicit=True)
