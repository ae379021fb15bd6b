"""Deformable merging, kernel = stride = 2, at LIT-S's three shapes: `python benchmarks/deformable_merge.py`.

Columns: forward eager / as a graph / forward+backward eager / as a graph, in ms.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import RESULTS, measure, write
from torch import Tensor
from torchvision.ops import deform_conv2d

from vitrefine.ops.deformable_merge import deformable_merge, sample_points
from vitrefine.ops.kernels.deformable_merge_op import deformable_merge_triton

SHAPES = ((96, 56, 192), (192, 28, 384), (384, 14, 768))


def by_torchvision(x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return deform_conv2d(x.permute(0, 3, 1, 2), offset, weight, bias, stride=2).permute(0, 2, 3, 1)


def by_grid_sample(x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    batch, height, width, _ = x.shape
    rows, columns = (p.unflatten(1, (2, 2)).permute(0, 3, 1, 4, 2) for p in sample_points(offset, 2))
    grid = torch.stack([(2 * columns + 1) / width - 1, (2 * rows + 1) / height - 1], -1).to(x.dtype)
    taps = F.grid_sample(x.permute(0, 3, 1, 2), grid.reshape(batch, height, width, 2), align_corners=False)
    return F.conv2d(taps, weight, bias, stride=2).permute(0, 2, 3, 1)


def plain(x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(x.permute(0, 3, 1, 2), weight, bias, stride=2).permute(0, 2, 3, 1) + 0 * offset.sum()


def by_reference(x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return deformable_merge(x, offset, weight, bias, impl="reference")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = []
    for channels, size, out in SHAPES:
        case = f"B{options.batch} {channels}ch {size}x{size} to {out}"
        contenders = {
            "plain 2x2 convolution": (plain, torch.bfloat16),
            "torchvision": (by_torchvision, torch.float32),
            "grid_sample + conv": (by_grid_sample, torch.bfloat16),
            "reference": (by_reference, torch.bfloat16),
            "reference, compiled": (torch.compile(by_reference, dynamic=False), torch.bfloat16),
            "triton": (deformable_merge_triton, torch.bfloat16),
            "triton, float32": (deformable_merge_triton, torch.float32),
        }
        for name, (merge, dtype) in contenders.items():
            torch.manual_seed(0)
            drawn = (
                torch.randn(options.batch, size, size, channels),
                0.5 * torch.randn(options.batch, 8, size // 2, size // 2),
                0.05 * torch.randn(out, channels, 2, 2),
                torch.randn(out),
            )
            inputs = [t.to("cuda", dtype).requires_grad_() for t in drawn]
            upstream = torch.randn(options.batch, size // 2, size // 2, out).to("cuda", dtype)
            rows += measure(case, name, lambda merge=merge, inputs=inputs: merge(*inputs), inputs, upstream)
    write("deformable_merge", rows, options.out)


if __name__ == "__main__":
    main()
