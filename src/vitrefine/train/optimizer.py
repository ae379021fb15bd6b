"""The optimiser of a recipe, timm's but for Muon, with parameters in groups.

Weight decay leaves alone what is no matrix, as timm does: biases, norms and scales. The Λ of CB_S is one of these: it
says how much of the mean is broadcast, and starts at zero, where decay would hold it. The kernels of a refiner are
convolutions and decay as such, as with its authors. Tokens and position embeddings are left alone by name, for models
of libraries other than timm do not say which of theirs are to be.
"""

from typing import Any

import torch
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from vitrefine.errors import UserError
from vitrefine.layers.token_merging import offset_param_groups
from vitrefine.train.muon import Muon
from vitrefine.train.recipe import Recipe

UNDECAYED = frozenset(
    {
        "cls_token",
        "class_token",
        "class_embedding",
        "dist_token",
        "distillation_token",
        "mask_token",
        "register_tokens",
        "pos_embed",
        "pos_embedding",
        "position_embedding",
        "position_embeddings",
        "relative_position_bias_table",
    }
)
FUSED = ("adam", "adamw", "sgd")  # PyTorch has these in one kernel


def parameter_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Parameters by weight decay, by layer where the recipe has layers learn at different rates, and offsets apart."""
    optim = recipe.optim
    own: Any = getattr(model, "no_weight_decay", set)
    names = (name for name, _ in model.named_parameters())
    left_alone = {name for name in names if name.removesuffix(".weight").rpartition(".")[2] in UNDECAYED} | set(own())
    if optim.layer_decay is None:
        groups = param_groups_weight_decay(model, optim.weight_decay, no_weight_decay_list=left_alone)
    elif not hasattr(model, "group_matcher"):
        raise UserError(
            f"optim.layer_decay needs a model that tells its layers apart, as timm's do and {type(model).__name__} "
            "does not; make it null"
        )
    else:
        groups = param_groups_layer_decay(
            model, optim.weight_decay, no_weight_decay_list=left_alone, layer_decay=optim.layer_decay
        )
    return offset_param_groups(model, lr_scale=optim.offset_lr_ratio, param_groups=groups)


def build_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The optimiser for a model that is on its device, and not wrapped yet."""
    optim = recipe.optim
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"{type(model).__name__} has no parameter that could learn")
    arguments = optim.arguments()
    if optim.name in FUSED:
        arguments["fused"] = True
    arguments |= {"lr": recipe.lr, "weight_decay": optim.weight_decay}
    groups = parameter_groups(model, recipe)
    if optim.name == "muon":
        return Muon(groups, **arguments)
    try:
        return create_optimizer_v2(groups, optim.name, **arguments)
    except Exception as error:  # some are of other packages, or need a GPU
        raise UserError(f"the optimiser {optim.name} cannot be made here ({error}); set optim.name=adamw") from error
