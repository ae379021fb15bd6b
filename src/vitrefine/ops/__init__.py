"""Functions: the reference of each is the specification, other implementations are tested against it."""

from vitrefine.ops.attention_statistics import AttentionStatistics, attention_statistics
from vitrefine.ops.context_broadcast import (
    context_broadcast,
    gated_context_broadcast,
    hybrid_context_broadcast,
    mean_token,
    scaled_context_broadcast,
)
from vitrefine.ops.deformable_merge import deformable_merge
from vitrefine.ops.local_attention import local_attention
from vitrefine.ops.refined_attention import Mix, refined_attention, refined_attention_and_maps, refined_maps
from vitrefine.ops.relative_attention import relative_attention
from vitrefine.ops.token_statistics import centred_gram, mean_cosine

__all__ = [
    "AttentionStatistics",
    "Mix",
    "attention_statistics",
    "centred_gram",
    "context_broadcast",
    "deformable_merge",
    "gated_context_broadcast",
    "hybrid_context_broadcast",
    "local_attention",
    "mean_cosine",
    "mean_token",
    "refined_attention",
    "refined_attention_and_maps",
    "refined_maps",
    "relative_attention",
    "scaled_context_broadcast",
]
