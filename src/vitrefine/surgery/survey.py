"""Finding where a model attends, where its MLPs are and how its tokens are laid out, by watching it run once.

A copy without storage runs on the meta device, so this costs milliseconds and no family is known by name: an
attention is the innermost module in whose forward a softmax over keys (or a fused attention) happens.
"""

import math
from dataclasses import dataclass

from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.surgery.heads import head_axes
from vitrefine.surgery.inputs import BATCH
from vitrefine.surgery.mlps import MlpSite, Visits, find_mlps
from vitrefine.surgery.rehearsal import rehearse
from vitrefine.surgery.watch import AttentionSite, Visit, Watch


@dataclass
class Survey:
    """What a model does, in the order in which it does it."""

    attentions: list[AttentionSite]
    mlps: list[MlpSite]
    visits: Visits
    mixes_tokens: bool  # by attention of any kind, by an MLP across tokens or by recurrence


def survey(model: nn.Module, inputs: dict[str, Tensor] | None = None) -> Survey:
    """Watch one forward pass of a copy of the model; the model itself is neither run nor changed.

    Args:
        model: Any PyTorch model.
        inputs: Arguments of its forward by name ("" for the first); found from its configuration if None.
    """
    watch = rehearse(model, Watch, inputs)
    sites = list(watch.attentions.values())
    _find_heads(sites, watch.visits)
    for site in sites:
        site.odd = _oddity(site, watch.visits[site.name])
    return Survey(sites, list(find_mlps(watch.visits)), watch.visits, any(v.mixes for v in watch.visits.values()))


def refuse_causal(found: Survey, model: nn.Module) -> None:
    """Refuse to let tokens see those after them, in a model that is made to continue what it is given."""
    if any(getattr(found.visits[site.name].module, "is_causal", None) is True for site in found.attentions):
        raise UserError(
            f"in {type(model).__name__} a token sees only those before it, and this would show it those after it; "
            "expansion, talking_heads and uniform_head do not"
        )


def _find_heads(sites: list[AttentionSite], visits: Visits) -> None:
    """Fill in each site's heads; where windows are as many as heads, others of its kind tell which is which."""
    readings, kinds = [], []
    for site in sites:
        visit = visits[site.name]
        readings.append(head_axes(visit.module, site.maps[0], visit.inputs[0] if visit.inputs else BATCH))
        kinds.append((type(visit.module), len(site.maps[0])))
    sure = {kind: found[0][0] for kind, found in zip(kinds, readings, strict=True) if len(found) == 1}
    for site, kind, found in zip(sites, kinds, readings, strict=True):
        site.axis, site.heads = next((reading for reading in found if reading[0] == sure.get(kind)), found[0])


def _oddity(site: AttentionSite, visit: Visit) -> str:
    *lead, rows, columns = site.maps[0]
    if not site.from_products:
        return "its weights are no products of queries and keys"
    if site.axis.axis is None and not site.axis.folded and len(site.maps) > 1:
        return "it computes its heads one after another, so no maps are there to be mixed"
    if rows == columns and len(visit.inputs) >= 3:
        batch, *rest = visit.inputs
        widths = {rest[0], rest[-1]} if len(rest) == 3 else {rest[-1]}  # an image has its channels first or last
        # One row for each channel of each image, and not by accident one for each token too.
        if any(math.prod(lead) * rows == batch * width and math.prod(rest) != rows * width for width in widths):
            return "its maps relate channels, not tokens"
    return ""
