"""What a kernel asks of sizes and strides."""

from torch import Tensor


# Triton's own two functions are also its language's, and cost microseconds each outside of a kernel.
def cdiv(amount: int, by: int) -> int:
    """Quotient, rounded up."""
    return -(-amount // by)


def padded(amount: int) -> int:
    """The next power of two, 16 at least: what a matrix product takes."""
    return max(16, 1 << (amount - 1).bit_length())


def rows_contiguous(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it where neighbours along its last dimension lie apart."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
