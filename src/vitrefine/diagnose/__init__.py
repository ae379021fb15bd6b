"""See what a model attends to: capture, measures and `diagnose`."""

from vitrefine.diagnose.attention import attention_entropy, attention_map, attention_rollout
from vitrefine.diagnose.broadcast import broadcast_scales
from vitrefine.diagnose.capture import capture
from vitrefine.diagnose.cka import MinibatchCka, linear_cka
from vitrefine.diagnose.diagnosis import Diagnosis, diagnose
from vitrefine.diagnose.features import capture_features
from vitrefine.diagnose.kernels import kernel_spectra
from vitrefine.diagnose.matrices import attention_matrices
from vitrefine.diagnose.measures import (
    head_similarity,
    relative_distance,
    row_entropy,
    softmax_gradient,
    token_similarity,
)
from vitrefine.diagnose.offsets import capture_offsets, sampling_points

__all__ = [
    "Diagnosis",
    "MinibatchCka",
    "attention_entropy",
    "attention_map",
    "attention_matrices",
    "attention_rollout",
    "broadcast_scales",
    "capture",
    "capture_features",
    "capture_offsets",
    "diagnose",
    "head_similarity",
    "kernel_spectra",
    "linear_cka",
    "relative_distance",
    "row_entropy",
    "sampling_points",
    "softmax_gradient",
    "token_similarity",
]
