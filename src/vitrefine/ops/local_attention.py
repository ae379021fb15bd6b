"""DLA alone, without mixing of heads, as plain attention over convolved values (Refiner, Section 3.3, exact).

Convolving a map by w (k×k, p = ⌊(k−1)/2⌋, zeros outside) and then multiplying it by V is, rearranged,

    O(i) = Σ_a Σ_j P(i + a − p, j) V_a(j),   V_a(j) = Σ_b w[a, b] V(j − b + p)

so one attention reads the k convolved values V_a side by side, and rows of its output, shifted, add up to O. No N×N
map exists. Where the kernel slides over the image of the keys instead (`grid`), rows do not mix, and one attention
over values convolved as images is all.

A masked key must stay exactly zero in a refined map. Its value is therefore zeroed before the convolution; that serves
any mask that is the same for all queries. A mask that differs between queries hides pairs which no value can hide:
it is refused, as is dropout of the refined maps, which this form never sees.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrefine.errors import UserError
from vitrefine.ops.refined_attention import visible_pairs


def _convolve(values: Tensor, kernel: Tensor, padding: tuple[int, ...]) -> Tensor:
    """Each head's values, (B, H, …, d), cross-correlated along the dimensions before the last by its own kernel."""
    batch, heads, *_, width = values.shape
    channels = values.movedim(-1, 1).flatten(0, 1)  # (B·d, H, …): channels of a head share its kernel
    convolve = F.conv1d if channels.ndim == 3 else F.conv2d
    out = convolve(F.pad(channels, padding), kernel, groups=heads)
    return out.unflatten(0, (batch, width)).unflatten(2, (heads, -1)).movedim(1, -1)  # (B, H, kernels, …, d)


def _visible_keys(attn_mask: Tensor) -> Tensor:
    """(…, 1, N) of a mask that is the same for all queries."""
    if attn_mask.shape[-2] != 1:
        raise UserError(
            "local attention through SDPA takes a mask over keys, (…, 1, N), not one that differs between queries; "
            "use impl='collapsed'"
        )
    return visible_pairs(attn_mask)


def local_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    local: Tensor,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    grid: tuple[int, int] | None = None,
) -> Tensor:
    """`refined_attention` of `Mix(local=local)`, in memory linear in the number of tokens.

    Args:
        q: Queries, (B, H, Nq, d).
        k: Keys, (B, H, N, d).
        v: Values, (B, H, N, d).
        local: One kernel a head, (H, k, k).
        attn_mask: Boolean (True: visible) or additive, broadcastable to (B, H, 1, N): the same for all queries.
        scale: Factor of the scores; d^-½ if None.
        grid: Height and width of the image whose patches are the last keys: the kernel then slides over that image.

    Returns:
        (B, H, Nq, d).
    """
    if local.shape[0] != v.shape[1]:
        raise UserError(
            f"local attention needs one kernel a head, not {local.shape[0]} kernels for {v.shape[1]} heads; "
            "use impl='collapsed' where maps outnumber heads"
        )
    if attn_mask is not None:
        attn_mask = torch.atleast_2d(attn_mask)
        visible = _visible_keys(attn_mask)
        v = v.masked_fill(~visible.mT, 0)
        # Where every key is hidden all values are zero: any finite scores give the zero that is wanted.
        attn_mask = torch.where(visible, 0.0 if attn_mask.dtype == torch.bool else attn_mask, -torch.inf).to(q.dtype)
        attn_mask = attn_mask.masked_fill(~visible.any(-1, keepdim=True), 0)
    size, n_queries, width = local.shape[-1], q.shape[2], v.shape[3]
    before = (size - 1) // 2
    after = size - 1 - before
    # The transposed convolution: values are read at j − b + p, so kernels turn round and the padding changes sides.
    turned = local.flip(-1) if grid is None else local.flip(-2, -1)
    if grid is not None:
        aside, images = v.split([v.shape[2] - grid[0] * grid[1], grid[0] * grid[1]], dim=2)
        images = _convolve(images.unflatten(2, grid), turned[:, None], (after, before, after, before))
        v = torch.cat([aside, images.squeeze(2).flatten(2, 3)], dim=2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=scale)
    wide = _convolve(v, turned.flatten(0, 1)[:, None], (after, before))  # (B, H, k, N, d)
    wide = wide.permute(0, 1, 3, 2, 4).flatten(3)
    read = F.scaled_dot_product_attention(q, k, wide, attn_mask=attn_mask, scale=scale)
    read = F.pad(read.unflatten(-1, (size, width)), (0, 0, 0, 0, before, after))
    return torch.stack([read[:, :, a : a + n_queries, a] for a in range(size)]).sum(0)
