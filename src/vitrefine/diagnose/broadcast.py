"""How much of the mean token CB_S learned to add, depth by depth (CB, Section 3.3 and Figure 8).

ratio   |λ|_0.1 / |λ|_0.9 of the scales Λ of a block: near one, all channels want it alike
mean    of λ: how much uniform attention counts
"""

import torch
from timm.utils.model import unwrap_model
from torch import Tensor, nn

from vitrefine.diagnose.profile import Profile, single
from vitrefine.layers.context_broadcast import ScaledContextBroadcast

LOW, HIGH = 0.1, 0.9


def scale_ratio(scale: Tensor) -> Tensor:
    """The 10th over the 90th percentile of |λ|; NaN before anything was learned."""
    low, high = torch.quantile(scale.detach().abs().double(), scale.new_tensor([LOW, HIGH]).double())
    return low / high


def broadcast_scales(model: nn.Module) -> tuple[Profile, Profile] | None:
    """Ratio and mean of the scales of every CB_S in a model; None where there is none."""
    inner = unwrap_model(model)
    found = {name: m.scale for name, m in inner.named_modules() if isinstance(m, ScaledContextBroadcast)}
    if not found:
        return None
    ratio = single(
        "broadcast_ratio",
        "scales of CB_S: 10th over 90th percentile",
        "",
        list(found),
        [scale_ratio(scale)[None] for scale in found.values()],
    )
    means = [scale.detach().double() for scale in found.values()]
    return ratio, single("broadcast_mean", "scales of CB_S", "λ", list(found), means)
