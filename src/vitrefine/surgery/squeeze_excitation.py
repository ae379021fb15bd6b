"""`+se`: squeeze-and-excitation over tokens at the end of the MLP, to compare broadcasting with (CB, Table 3)."""

from typing import Any

from torch import Tensor, nn

from vitrefine.layers.squeeze_excitation import TokenSqueezeExcitation
from vitrefine.surgery.broadcast import factory_arguments, mlp_places
from vitrefine.surgery.graft import Change, Graft, graft, lineage
from vitrefine.surgery.padding import Padding, padding_around
from vitrefine.surgery.registry import modification
from vitrefine.surgery.selection import Layers, resolve_layers
from vitrefine.surgery.survey import refuse_causal, survey


class ExcitedAfter(Graft):
    """A module whose output passes through `excitation`."""

    excitation: nn.Module
    excitation_padding: Padding | None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x = super().forward(*args, **kwargs)
        return self.excitation(x, None if self.excitation_padding is None else self.excitation_padding.mask_for(x))


@modification(summary="scale channels by what the mean token says, at the end of the MLP (squeeze-and-excitation)")
def se(model: nn.Module, *, reduction: int = 16, layers: Layers = "all") -> list[Change]:
    """Let the mean token scale the channels of every token; outputs change at once.

    Args:
        reduction: how many times fewer channels lie between the two linear layers
        layers: the blocks that are changed
    """
    found = survey(model)
    refuse_causal(found, model)
    places = mlp_places(found, model, "end")
    changes = []
    for place in (places[i] for i in resolve_layers(layers, len(places))):
        module = model.get_submodule(place.module)
        part = TokenSqueezeExcitation(place.dim, reduction, place.layout, **factory_arguments(model, place.module))
        padding = padding_around(model, place.module)
        what = f"{lineage(type(module))[-1].__name__}: squeeze-excitation at its end, {part.fc1.out_features} channels"
        graft(model, module, ExcitedAfter, excitation=part, excitation_padding=padding)
        changes.append(Change(place.module, what))
    return changes
