"""Refined attention: the softmax maps are mixed across heads and convolved before they aggregate values.

Refiner (Zhou et al.), Sections 3.2-3.4. With A the H softmax maps of a layer:

    expansion   Ã = E A            E (H', H)       r = H'/H times more maps
    DLA         Ã* = w ⊛ Ã         w (H', k, k)    one k×k kernel a map, over (query, key), zero padded
    reduction   A* = R Ã*          R (H, H')       back to H maps

Nothing between the three is non-linear, so they fold into one dense convolution of the H maps,
M[g,h,a,b] = Σ_m R[g,m] w_m[a,b] E[m,h], and the H'-map tensors need never exist (`impl="collapsed"`).
`impl="reference"` applies the three one after the other: it is the specification.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrefine.errors import UserError, check_choice
from vitrefine.ops.aligned_maps import has_gaps
from vitrefine.ops.choice import (
    AMPERE,
    HALF,
    HOPPER,
    demand_gpu,
    exported_for_any,
    no_autocast,
    runs_kernels,
    say_once,
)

IMPLEMENTATIONS = ("auto", "reference", "collapsed", "sdpa", "triton")
SEE_MAPS = ("auto", "reference", "collapsed", "triton")  # those that have the maps to hand out

# Where which implementation is the fastest on an H200: benchmarks/refined_attention.py.
FEWEST_PAIRS = 1 << 20  # with fewer entries in all maps together, launching the kernels takes longer than the work
WIDEST_LOCAL = 384  # keys; above, DLA alone is faster through plain attention


class Mix(NamedTuple):
    """The weights of a refinement; a step that is None is left out."""

    expand: Tensor | None = None  # (H', H)
    local: Tensor | None = None  # (H', k, k)
    reduce: Tensor | None = None  # (H, H')

    def out_maps(self, heads: int) -> int:
        """The number of refined maps out of so many heads."""
        last = next((w for w in (self.reduce, self.local, self.expand) if w is not None), None)
        return heads if last is None else last.shape[0]

    def fold(self) -> Tensor:
        """The one (G, H, k, k) kernel that does all three steps."""
        some = next((w for w in (self.expand, self.local, self.reduce) if w is not None), None)
        if some is None:
            raise UserError("this refinement has no step: give it an expansion, a local kernel or a reduction")
        hidden = self.expand.shape[0] if self.expand is not None else some.shape[-1 if self.local is None else 0]
        reduce, expand = (
            torch.eye(hidden, dtype=some.dtype, device=some.device) if weight is None else weight
            for weight in (self.reduce, self.expand)
        )
        local = some.new_ones(hidden, 1, 1) if self.local is None else self.local
        with no_autocast(some):  # small, and what it loses every map would feel
            taps = reduce[:, :, None] * local.flatten(1)  # then a product, in fewer kernels than an einsum takes
            return torch.bmm(expand.T.expand(len(taps), -1, -1), taps).unflatten(-1, local.shape[1:])


def convolve_maps(maps: Tensor, kernel: Tensor, *, groups: int = 1, grid: tuple[int, int] | None = None) -> Tensor:
    """Convolve (B, H, N, N) maps, keeping their size.

    Without `grid` the kernel slides over (query, key). With it, each row's last h·w keys are laid out as the image
    they came from and the kernel slides over that image (Refiner Table 4, "spatial"); the class token and other
    keys before them stay as they are, so they are the caller's to mix.
    """
    size = kernel.shape[-1]
    before = (size - 1) // 2  # an even kernel takes the smaller half of the padding on the left and top
    padding = (before, size - 1 - before, before, size - 1 - before)
    if grid is None:
        if groups == 1 and maps.device.type == "cpu":  # where dense convolutions run fastest with heads innermost
            # `contiguous(memory_format=…)` would say the same, but not to `torch.func.vmap`.
            maps, kernel = (x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) for x in (maps, kernel))
        return F.conv2d(F.pad(maps, padding), kernel, groups=groups)
    batch, heads, queries, _ = maps.shape
    images = maps.transpose(1, 2).reshape(batch * queries, heads, *grid)
    images = F.conv2d(F.pad(images, padding), kernel, groups=groups)
    return images.reshape(batch, queries, kernel.shape[0], grid[0] * grid[1]).transpose(1, 2)


def mix_heads(maps: Tensor, weight: Tensor | None) -> Tensor:
    """Linear map across heads: (G, H) applied to (B, H, N, N)."""
    return maps if weight is None else torch.einsum("gh,bhij->bgij", weight, maps)


def _split_keys(maps: Tensor, grid: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """Keys that are not on the grid (class, register tokens), and keys that are."""
    on_grid = maps.shape[-1] if grid is None else grid[0] * grid[1]
    return maps.split([maps.shape[-1] - on_grid, on_grid], dim=-1)


def refine_maps(maps: Tensor, mix: Mix, *, grid: tuple[int, int] | None = None) -> Tensor:
    """The specification: expansion, DLA and reduction, one after the other."""
    maps = mix_heads(maps, mix.expand)
    if mix.local is not None:
        aside, maps = _split_keys(maps, grid)
        maps = convolve_maps(maps, mix.local[:, None], groups=mix.local.shape[0], grid=grid)
        maps = torch.cat([aside, maps], dim=-1)
    return mix_heads(maps, mix.reduce)


def refine_maps_collapsed(maps: Tensor, mix: Mix, *, grid: tuple[int, int] | None = None) -> Tensor:
    """The same function with the weights folded first: one convolution, no tensor of H' maps."""
    if mix.expand is None and mix.reduce is None:
        return refine_maps(maps, mix, grid=grid)  # a pure DLA has nothing to fold
    if mix.local is None:
        return mix_heads(maps, mix.fold()[..., 0, 0])
    aside, maps = _split_keys(maps, grid)
    maps = convolve_maps(maps, mix.fold(), grid=grid)
    if not aside.shape[-1]:
        return maps
    head_mix = mix._replace(local=None).fold()[..., 0, 0]
    return torch.cat([mix_heads(aside, head_mix), maps], dim=-1)


_REFINE: dict[str, Callable[..., Tensor]] = {
    "reference": refine_maps,
    "collapsed": refine_maps_collapsed,
    "auto": refine_maps_collapsed,
}


def visible_pairs(attn_mask: Tensor) -> Tensor:
    """Which (query, key) pairs a mask lets through.

    A boolean mask says so itself. An additive one may hold a bias too, and libraries write -inf, the lowest finite
    number or -100 for "masked": an entry so far below the best of its row that the softmax leaves e^-60 of it is.
    """
    if attn_mask.dtype == torch.bool:
        return attn_mask
    return attn_mask > attn_mask.amax(dim=-1, keepdim=True) - 60


def attention_maps(q: Tensor, k: Tensor, *, attn_mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """softmax(q kᵀ · scale + mask): (B, H, Nq, Nk). A row with every key masked is all zero, not NaN."""
    scores = (q * (q.shape[-1] ** -0.5 if scale is None else scale)) @ k.transpose(-2, -1)
    if attn_mask is None:
        return scores.softmax(dim=-1)
    visible = visible_pairs(attn_mask)
    biased = scores if attn_mask.dtype == torch.bool else scores + attn_mask  # which may be of a wider type
    biased = biased.masked_fill(~visible, torch.finfo(biased.dtype).min)
    return biased.softmax(dim=-1).masked_fill(~visible, 0).to(scores.dtype)


def refined_maps(
    q: Tensor,
    k: Tensor,
    mix: Mix,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    grid: tuple[int, int] | None = None,
    impl: str = "auto",
) -> Tensor:
    """The (B, G, N, N) maps that multiply the values. A key that is masked stays exactly zero."""
    check_choice("implementation", impl, _REFINE)
    maps = _REFINE[impl](attention_maps(q, k, attn_mask=attn_mask, scale=scale), mix, grid=grid)
    if attn_mask is None:
        return maps
    visible = visible_pairs(attn_mask)
    if visible.ndim > 2 and visible.shape[-3] not in (1, maps.shape[1]):
        visible = visible.any(dim=-3, keepdim=True)  # maps outnumber the mask's heads: hide what every head hides
    return maps.masked_fill(~visible, 0)


def aggregate(maps: Tensor, v: Tensor, *, dropout_p: float = 0.0) -> Tensor:
    """maps @ v. Where maps outnumber value heads (no reduction), the r maps of a group read the same value head."""
    if maps.shape[1] != v.shape[1]:
        v = v.repeat_interleave(maps.shape[1] // v.shape[1], dim=1)
    if not dropout_p and _made_by_kernels(maps) and maps.dtype == v.dtype:
        from vitrefine.ops.kernels.aggregate_maps_op import MAX_DIM, aggregate_maps_triton

        if v.shape[-1] <= MAX_DIM:
            return aggregate_maps_triton(maps, v)
    return F.dropout(maps, dropout_p) @ v


def _made_by_kernels(maps: Tensor) -> bool:
    """Whether rows of maps start at whole vectors, with gaps, which only our kernels give them."""
    return runs_kernels(maps, AMPERE) and maps.dtype in HALF and has_gaps(maps)


def _choose(
    q: Tensor, v: Tensor, mix: Mix, *, attn_mask: Tensor | None, dropout_p: float, grid: tuple[int, int] | None
) -> str:
    """The implementation that `auto` stands for."""
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * v.shape[2]
    if not q.is_cuda or q.dtype not in HALF or v.dtype != q.dtype:
        return "collapsed"
    if exported_for_any(q.shape[0]) or pairs < FEWEST_PAIRS:  # the kernels pack as many images as a batch has
        return "collapsed"
    if grid is not None:
        say_once("refined attention that follows an image has no kernel of its own: it convolves whole maps")
        return "collapsed"
    if not runs_kernels(q, HOPPER):
        say_once(
            "refined attention has kernels for GPUs from Hopper on, with Triton installed: it convolves whole maps"
        )
        return "collapsed"
    from vitrefine.ops.kernels.refined_attention_op import supported

    alone = mix.expand is None and mix.reduce is None
    over_keys = attn_mask is None or (attn_mask.ndim > 1 and attn_mask.shape[-2] == 1)
    if alone and v.shape[2] > WIDEST_LOCAL and over_keys and not dropout_p:
        return "sdpa"
    maps, size = mix.out_maps(q.shape[1]), 1 if mix.local is None else mix.local.shape[-1]
    if not supported(max(q.shape[1], maps), size, q.shape[-1], q.dtype):
        say_once(
            f"refined attention has no kernel for {maps} maps, a {size}×{size} kernel and {q.shape[-1]} channels a "
            "head: it convolves whole maps"
        )
        return "collapsed"
    return "triton"


def refined_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix: Mix,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    grid: tuple[int, int] | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attention whose maps are refined by `mix`; otherwise as `F.scaled_dot_product_attention`.

    Args:
        q: Queries, (B, H, N, d).
        k: Keys, (B, H, N, d).
        v: Values, (B, H, N, d).
        mix: Weights of the refinement.
        attn_mask: Boolean (True: visible) or additive, broadcastable to (B, H, N, N).
        dropout_p: Dropout of the refined maps.
        scale: Factor of the scores; d^-½ if None.
        grid: Height and width of the image whose patches are the last keys: DLA then works on that image.
        impl: `reference`, `collapsed`, `sdpa` (DLA alone), `triton` (on a GPU), or `auto`: on a GPU from Hopper on, in
            half precision, without a grid and where the work is worth it, `triton`; DLA alone over many keys `sdpa`;
            else `collapsed`.

    Returns:
        (B, G, N, d), G the number of refined maps: H, or H' where there is no reduction.
    """
    check_choice("implementation", impl, IMPLEMENTATIONS)
    if impl == "auto":
        impl = _choose(q, v, mix, attn_mask=attn_mask, dropout_p=dropout_p, grid=grid)
    if impl == "triton":
        _check_kernels_apply(q, grid)
        from vitrefine.ops.kernels import refined_attention_triton

        return refined_attention_triton(q, k, v, mix.fold(), attn_mask=attn_mask, dropout_p=dropout_p, scale=scale)
    if impl == "sdpa":
        from vitrefine.ops.local_attention import local_attention

        if mix.local is None or mix.expand is not None or mix.reduce is not None or dropout_p:
            raise UserError("impl=sdpa convolves maps and does not mix heads or drop out: use impl=collapsed")
        return local_attention(q, k, v, mix.local, attn_mask=attn_mask, scale=scale, grid=grid)
    maps = refined_maps(q, k, mix, attn_mask=attn_mask, scale=scale, grid=grid, impl=impl)
    return aggregate(maps, v, dropout_p=dropout_p)


def refined_attention_and_maps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mix: Mix,
    *,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    grid: tuple[int, int] | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`refined_attention`, and the maps that it aggregated, before dropout: for blocks that use them again.

    Args:
        q, k, v, mix, attn_mask, dropout_p, scale, grid: As in `refined_attention`.
        impl: `reference`, `collapsed`, `triton` or `auto`.

    Returns:
        (B, G, N, d), and the maps (B, G, N, N).
    """
    check_choice("implementation", impl, SEE_MAPS)
    if impl == "auto":
        impl = _choose(q, v, mix, attn_mask=attn_mask, dropout_p=dropout_p, grid=grid)
        impl = "collapsed" if impl == "sdpa" else impl  # which never sees the maps
    if impl == "triton":
        _check_kernels_apply(q, grid)
        from vitrefine.ops.kernels import refined_attention_and_maps_triton

        return refined_attention_and_maps_triton(
            q, k, v, mix.fold(), attn_mask=attn_mask, dropout_p=dropout_p, scale=scale
        )
    maps = refined_maps(q, k, mix, attn_mask=attn_mask, scale=scale, grid=grid, impl=impl)
    return aggregate(maps, v, dropout_p=dropout_p), maps


def _check_kernels_apply(q: Tensor, grid: tuple[int, int] | None) -> None:
    demand_gpu(q, "collapsed")
    if grid is not None:
        raise UserError("the Triton kernel does not follow an image: use impl=collapsed where there is a grid")
