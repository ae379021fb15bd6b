"""Mix-token, the cut-and-paste of token labelling (LV-ViT, used by the Refiner's advanced recipe).

A random box of patches is swapped between each image and the one opposite in the batch, after the patch embedding;
the logits of the patches are swapped back, so that every patch keeps its own label. Boxes are tensors and are
applied by masks, so that nothing waits for the device and the model compiles whole.
"""

import torch
from torch import Tensor


def random_box(grid: tuple[int, int], *, device: torch.device | str | None = None) -> Tensor:
    """A box (top, left, bottom, right) in patches whose area share is uniform in [0, 1] before it is clipped."""
    side = torch.tensor(grid, device=device)
    cut = (side * torch.rand((), device=device).sqrt()).long()
    centre = (torch.rand(2, device=device) * side).long()
    top_left = (centre - cut // 2).clamp(min=0)
    bottom_right = torch.minimum(centre + cut // 2, side)
    return torch.cat([top_left, bottom_right])


def mix_tokens(patches: Tensor, box: Tensor) -> Tensor:
    """Take the patches (B, h, w, C) inside the box from the image opposite in the batch."""
    row = torch.arange(patches.shape[1], device=box.device)
    column = torch.arange(patches.shape[2], device=box.device)
    inside = ((row >= box[0]) & (row < box[2]))[:, None] & ((column >= box[1]) & (column < box[3]))
    return torch.where(inside[None, :, :, None], patches.flip(0), patches)


unmix_tokens = mix_tokens  # swapping twice restores the order
