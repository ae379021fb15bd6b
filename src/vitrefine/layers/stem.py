"""Patch embeddings: the Refiner's convolutional stem, and the plain linear one."""

from typing import Any

import torch
from torch import Tensor, nn

from vitrefine.errors import UserError


class ConvStem(nn.Module):
    """7×7/2 → 32, 3×3 → 64, 3×3 → 128, each with batch norm and ReLU, then one convolution a patch; gives NCHW."""

    def __init__(
        self,
        in_chans: int,
        dim: int,
        patch_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if patch_size < 2 or patch_size % 2:
            raise UserError(f"the convolutional stem halves an image first: patch_size={patch_size} has to be even")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        layers: list[nn.Module] = []
        for width_in, width, kernel_size, stride in ((in_chans, 32, 7, 2), (32, 64, 3, 1), (64, 128, 3, 1)):
            layers += [
                nn.Conv2d(width_in, width, kernel_size, stride, kernel_size // 2, bias=False, **factory),
                nn.BatchNorm2d(width, **factory),
                nn.ReLU(inplace=True),
            ]
        self.convs = nn.Sequential(*layers)
        self.proj = nn.Conv2d(128, dim, patch_size // 2, patch_size // 2, **factory)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda:  # where convolutions in half precision run with channels innermost, and copy what is not
            x = x.contiguous(memory_format=torch.channels_last)
        return self.proj(self.convs(x))


class LinearStem(nn.Module):
    """One linear map a patch; gives NCHW."""

    def __init__(
        self,
        in_chans: int,
        dim: int,
        patch_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, patch_size, patch_size, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)
