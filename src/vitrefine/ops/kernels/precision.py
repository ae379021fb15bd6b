"""How exact the products of a kernel are."""

import torch


def product_precision(dtype: torch.dtype) -> str:
    """float32 products follow PyTorch's own switch for tensor-float-32; other types have no choice."""
    return "tf32" if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"
