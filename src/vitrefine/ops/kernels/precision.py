"""How exact the products of a kernel are."""

import torch


def product_precision(dtype: torch.dtype) -> str:
    """float32 products follow PyTorch's own switch for tensor-float-32; other types have no choice.

    Where it is allowed, each product is three of them: several factors are multiplied in a row (maps, mix, values), and
    the truncation of tensor cores in one product each adds up to 0.25 %.
    """
    return "tf32x3" if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"
