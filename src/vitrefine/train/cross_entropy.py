"""Cross-entropy with targets that are shares of classes, as smoothing, mixup and CutMix make them."""

import torch
import torch.nn.functional as F
from torch import Tensor


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all but the last dimension of −Σ_c target_c log softmax(logits)_c."""
    return F.cross_entropy(at_least_single(logits).flatten(0, -2), targets.flatten(0, -2))


def binary_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Each class by itself: mean over images and classes."""
    return F.binary_cross_entropy_with_logits(at_least_single(logits), targets)


def at_least_single(logits: Tensor) -> Tensor:
    """Half precision made single, in which exponentials and their sums are exact enough."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
