"""What the kernels of one call of relative attention share: tensors, sizes, constants and tiles."""

import math

import torch
from torch import Tensor

from vitrefine.ops.kernels.precision import product_precision
from vitrefine.ops.kernels.shapes import padded, rows_contiguous

LOG2_E = 1.4426950408889634


def _strips(table: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """(H, 2h-1, w, w): for each displacement of rows, the biases of columns of queries, last first, and of keys."""
    return (table.flip(-1).float() * LOG2_E).to(dtype).unfold(-1, width, 1).contiguous()


class Call:
    """One call, forward or backward.

    Args:
        q, k, v: (B, H, N, d).
        table: (H, 2h-1, 2w-1).
        width: Of the map.
        scale: Factor of the scores.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, width: int, scale: float) -> None:
        q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
        self.batch, self.heads, self.n_tokens, self.dim = q.shape
        self.q, self.dtype, self.width = q, q.dtype, width
        self.inputs = (q, k, v, _strips(table, width, q.dtype))
        self.strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
        self.sizes = (self.heads, self.n_tokens, width, self.dim, scale * LOG2_E)
        self.constants = {
            "DIM": padded(self.dim),
            "RUN": math.gcd(width, 8),  # so many biases at a time are read as one, where a run of keys shares a row
            "PRECISION": product_precision(q.dtype),
        }

    def tile(self, kernel: str) -> dict[str, int]:
        """Rows and keys of a program, and launch options of the kernel."""
        if kernel == "grad_table":
            rows, keys, stages = 32, 32, 1 if self.dtype == torch.float32 and self.dim > 64 else 3
        elif self.dtype == torch.float32 or self.dim > 64:
            rows, keys, stages = (32, 64, 2) if kernel == "grad_keys" else (64, 32, 2)
        else:
            rows, keys, stages = 64, 64, (2 if kernel == "grad_keys" else 3)
        return {"ROWS": rows, "KEYS": keys, "num_warps": 2 if kernel == "grad_table" else 4, "num_stages": stages}
