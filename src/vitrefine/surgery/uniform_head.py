"""`+uniform_head`: one head of each attention averages what it sees, with nothing to learn (CB, Table 1, A to C).

    replace   the last head becomes uniform: 1/n on each of the n keys that its query sees
    append    a uniform head beside the others, W_u mean_j V_u x_j, of one head's width d; W_u starts at zero
    widen     both, which gives back the 2·C·d weights that `replace` makes idle

The attention keeps its weights, so that those of the original load: the queries and keys of a replaced head are there
and idle, and the report counts them. `layers.UniformHeadAttention` is for training from scratch: there they are gone,
and `widen` gives their weights to the other heads.

Equal scores are a uniform map, so the last head's scores are made equal before the softmax, whatever follows it.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.ops.context_broadcast import mean_token
from vitrefine.ops.refined_attention import visible_pairs
from vitrefine.surgery.broadcast import factory_arguments
from vitrefine.surgery.graft import Change, Graft, graft, lineage
from vitrefine.surgery.heads import HeadAxis
from vitrefine.surgery.idle import last_head_weights
from vitrefine.surgery.maps import tokens_first
from vitrefine.surgery.multihead import explicit_multihead
from vitrefine.surgery.refine import Refined
from vitrefine.surgery.registry import modification
from vitrefine.surgery.selection import Layers, resolve_layers
from vitrefine.surgery.survey import Survey, survey
from vitrefine.surgery.tap import AttentionTap, is_softmax_over_keys
from vitrefine.surgery.watch import AttentionSite, Visit

Mode = Literal["replace", "widen", "append"]


class UniformBranch(nn.Module):
    """A uniform head of its own: W_u mean_j V_u x_j, zero at the start.

    Args:
        dim: Channels of the tokens.
        width: Of the head.
        out_dim: Channels of what it is added to.
        layout: Of the tokens: `NLC`, `NHWC` or `NCHW`.
        device: Where to put the parameters.
        dtype: Of the parameters.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        out_dim: int,
        layout: str = "NLC",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layout = layout
        self.value = nn.Linear(dim, width, bias=False, device=device, dtype=dtype)
        # A raw parameter, because models initialise every nn.Linear they find and this one has to start at zero.
        self.proj = nn.Parameter(torch.empty(out_dim, width, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.proj)

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:
        """What to add to the output of the attention.

        Args:
            x: Tokens, in `layout`.
            visible: Which keys each query sees, (B or 1, 1, N, N); None if each sees all.
        """
        if self.layout == "NLC" and visible is not None:
            seen = visible[:, 0].to(x.dtype)
            mean = (seen / seen.sum(dim=-1, keepdim=True).clamp(min=1)) @ self.value(x)
            return F.linear(mean, self.proj)
        mean = mean_token(x, layout=self.layout)
        if self.layout != "NCHW":
            return F.linear(self.value(mean), self.proj)
        return F.linear(self.value(mean.flatten(1)), self.proj)[..., None, None]


class UniformTap(AttentionTap):
    """Makes the last head uniform if `replaces`, and notes which keys each query sees."""

    def __init__(self, axis: HeadAxis, replaces: bool) -> None:
        super().__init__(self, axis)
        self.replaces = replaces
        self.visible: Tensor | None = None  # (B or 1, 1, queries, keys): what any head sees

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_softmax_over_keys(func, args, kwargs):
            scores = args[0] if args else kwargs.pop("input")
            args = (self.axis.join(self._even(self.axis.split(scores)), scores.shape), *args[1:])
        return super().__torch_function__(func, types, args, kwargs)

    def attend_maps(self, scores: Tensor, maps: Tensor) -> Tensor:
        """In the place of `maps`: themselves, for the scores that they come from were made equal."""
        return maps

    def _even(self, scores: Tensor) -> Tensor:
        """(B, heads, queries, keys) scores or masks, the last head's all equal where a key may be seen."""
        self.visible = visible_pairs(scores).any(dim=1, keepdim=True)
        if not self.replaces:
            return scores
        last = self.visible
        if scores.dtype != torch.bool:
            last = torch.zeros_like(scores[:, -1:]).masked_fill(~self.visible, torch.finfo(scores.dtype).min)
        return torch.cat([scores[:, :-1], last], dim=1)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, dropout_p: float, scale: float | None
    ) -> Tensor:
        """In the place of `F.scaled_dot_product_attention`: a query of zeros finds all keys equal."""
        if attn_mask is not None:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
            if attn_mask.dtype == torch.bool and attn_mask.shape[1] == 1:
                self.visible = attn_mask
            else:
                attn_mask = self._even(attn_mask.expand(-1, q.shape[1], -1, -1))
        if self.replaces:
            q = torch.cat([q[:, :-1], torch.zeros_like(q[:, -1:])], dim=1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, scale=scale)


class UniformHead(Graft):
    """Attention whose last head is uniform, or that has a uniform one beside its own, or both."""

    uniform_axis: HeadAxis
    uniform_last: bool
    uniform_branch: UniformBranch | None
    idle_parameters: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tap = UniformTap(self.uniform_axis, self.uniform_last)
        with tap:
            output = super().forward(*args, **kwargs)
        if self.uniform_branch is None:
            return output
        given = [*args, *kwargs.values()]
        x = given[1] if isinstance(self, nn.MultiheadAttention) else given[0]  # of PyTorch's query, key and value: keys
        first = output if isinstance(output, Tensor) else output[0]
        added = first + self.uniform_branch(x, _fitting(tap.visible, x, first))
        return added if isinstance(output, Tensor) else type(output)((added, *output[1:]))


def _fitting(visible: Tensor | None, x: Tensor, output: Tensor) -> Tensor | None:
    """Which of the tokens x each output sees; None where the attention has regrouped its tokens, as into windows."""
    if visible is None or x.ndim != 3 or visible.shape[-1] != x.shape[1]:
        return None
    fits = visible.shape[0] in (1, x.shape[0]) and visible.shape[-2] in (1, output.shape[1])
    return visible if fits else None


def idle_parameters(model: nn.Module) -> int:
    """How many of a model's parameters have no effect, because the head they belonged to is uniform now."""
    return sum(module.idle_parameters for module in model.modules() if isinstance(module, UniformHead))


def _layout(visit: Visit) -> str | None:
    """How an attention's input lies, and its output after it; None where nothing can be added to them."""
    given, gave = visit.inputs, visit.output
    if len(given) != len(gave) or tokens_first(given):
        return None
    if len(given) == 3:
        return "NLC"
    for module in visit.module.modules():
        if isinstance(module, nn.Linear) and module.in_features == given[-1]:
            return "NHWC"
        if isinstance(module, nn.Conv2d) and module.in_channels == given[1]:
            return "NCHW"
    return None


def _hindrance(site: AttentionSite, visit: Visit, mode: Mode) -> str:
    """Why a uniform head cannot be had there; empty if it can."""
    if site.odd:
        return site.odd
    if mode != "append" and site.heads == 1:
        return f"it has a single head, and mode={mode} would leave none that attends; mode=append adds one"
    if mode != "replace" and _layout(visit) is None:
        return f"its output has another form than its input, so mode={mode} has nothing to add to; use mode=replace"
    return ""


def _branch(model: nn.Module, site: AttentionSite, visit: Visit) -> UniformBranch:
    layout = _layout(visit)
    assert layout is not None, "a site without a layout is hindered"
    channel = 1 if layout == "NCHW" else -1
    dim, out_dim = visit.inputs[channel], visit.output[channel]
    return UniformBranch(dim, max(1, dim // site.heads), out_dim, layout, **factory_arguments(model, site.name))


def _sites(found: Survey, model: nn.Module, mode: Mode) -> tuple[list[AttentionSite], str]:
    """The attentions that can have a uniform head, and in words which are left aside."""
    kind = type(model).__name__
    if not found.attentions:
        raise UserError(f"{kind} has no attention: no softmax over keys happens in its forward pass")
    hindered: dict[str, int] = {}
    sites = []
    for site in found.attentions:
        visit = found.visits[site.name]
        if why := _hindrance(site, visit, mode):
            reason = f"{lineage(type(visit.module))[-1].__name__}: {why}"
            hindered[reason] = hindered.get(reason, 0) + 1
        else:
            sites.append(site)
    if not sites:
        raise UserError(f"no attention of {kind} can have a uniform head ({'; '.join(hindered)})")
    return sites, "; ".join(
        f"{count} left as {'they were' if count > 1 else 'it was'}, {reason}" for reason, count in hindered.items()
    )


@modification(summary="let one head of each attention average all that it sees (uniform head)")
def uniform_head(model: nn.Module, *, mode: Mode = "replace", layers: Layers = "all") -> list[Change]:
    """Replace a head by a uniform one, add one, or both.

    Args:
        mode: replace the last head, whose queries and keys stay in the model but idle, so that outputs change at
            once; append one, which starts at zero; or widen, which does both
        layers: the attentions that are changed
    """
    found = survey(model)
    sites, left = _sites(found, model, mode)
    changes = []
    for site in (sites[i] for i in resolve_layers(layers, len(sites))):
        module = model.get_submodule(site.name)
        if isinstance(module, Refined):
            raise UserError(f"{site.name} is refined already; a uniform head comes first: +uniform_head+refiner")
        idle = 0 if mode == "append" else last_head_weights(module, site.heads)
        branch = None if mode == "replace" else _branch(model, site, found.visits[site.name])
        explicit_multihead(model, module)
        graft(
            model,
            module,
            UniformHead,
            uniform_axis=site.axis,
            uniform_last=mode != "append",
            uniform_branch=branch,
            idle_parameters=idle,
        )
        what = [] if mode == "append" else [f"head {site.heads} of {site.heads} uniform, {idle:,} parameters idle"]
        what += [] if branch is None else [f"a uniform head of width {branch.value.out_features} added"]
        changes.append(Change(site.name, f"{lineage(type(module))[-1].__name__}: {', '.join(what)}"))
    if idle := idle_parameters(model):
        total = sum(p.numel() for p in model.parameters())
        changes.append(Change("", f"{idle:,} parameters idle, {total - idle:,} of {total:,} act"))
    return [*changes, *([Change("", left)] if left else [])]
