"""Triton kernels. Importing this needs Triton; the ops above import it only when a kernel is asked for."""

from vitrefine.ops.kernels.refined_attention_op import (
    refined_attention_and_maps_triton,
    refined_attention_triton,
)

__all__ = ["refined_attention_and_maps_triton", "refined_attention_triton"]
