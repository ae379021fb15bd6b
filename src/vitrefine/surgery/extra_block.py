"""`+extra_block`: one more MSA or MLP at the end of a model (CB, Figure 3: which of the two does it miss more?).

    x + f(LN(x)),  f = MSA: 4C² weights,  or  f = MLP of ratio 2: 4C² weights

It becomes a child of the last block, whose output passes through it. Its last layer starts at zero, and so does what it
adds.
"""

import inspect
import math
from typing import Any, Literal

from timm.layers import Attention, Mlp
from torch import Tensor, nn

from vitrefine.errors import UserError
from vitrefine.surgery.broadcast import factory_arguments
from vitrefine.surgery.flow import Flow, follow
from vitrefine.surgery.graft import Change, Graft, graft, lineage
from vitrefine.surgery.maps import layout_of, tokens_first
from vitrefine.surgery.newcomer import Newcomer
from vitrefine.surgery.padding import MASK_ARGUMENTS, real_tokens
from vitrefine.surgery.registry import modification
from vitrefine.surgery.survey import Survey, refuse_causal, survey

HEAD_WIDTH = 64  # where the model has no attention whose heads could be counted


class ExtraBlock(Newcomer):
    """A residual block that changes nothing until it has learned to."""

    def __init__(self, dim: int, *, layout: str, **factory: Any) -> None:
        super().__init__()
        self.layout = layout
        self.norm = nn.LayerNorm(dim, eps=1e-6, **factory)

    def added(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """What is added to the tokens, (B, N, C), in their normalised form."""
        raise NotImplementedError

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2) if self.layout == "NCHW" else x.flatten(1, -2)
        added = self.added(self.norm(tokens), mask)
        return x + (added.transpose(1, 2) if self.layout == "NCHW" else added).reshape(x.shape)


class ExtraAttention(ExtraBlock):
    """Every token attends to every token."""

    def __init__(self, dim: int, num_heads: int, *, layout: str, **factory: Any) -> None:
        super().__init__(dim, layout=layout, **factory)
        self.attn = Attention(dim, num_heads, qkv_bias=True, **factory)
        nn.init.zeros_(self.attn.proj.weight)
        nn.init.zeros_(self.attn.proj.bias)

    def added(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        return self.attn(tokens, attn_mask=mask)


class ExtraMlp(ExtraBlock):
    """As many weights in an MLP."""

    def __init__(self, dim: int, *, layout: str, **factory: Any) -> None:
        super().__init__(dim, layout=layout, **factory)
        self.mlp = Mlp(dim, 2 * dim, **factory)
        for parameter in self.mlp.fc2.parameters():
            nn.init.zeros_(parameter)

    def added(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        return self.mlp(tokens)


class WithExtraBlock(Graft):
    """A block whose output passes through `extra`."""

    extra: ExtraBlock
    extra_mask: tuple[str, int] | None  # the name of its mask argument, and the position

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        mask = self._mask(args, kwargs)
        if isinstance(output, Tensor):
            return self.extra(output, mask)
        return type(output)((self.extra(output[0], mask), *output[1:]))

    def _mask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """What the block's own attention may not see, the extra one may not either: (B, 1 or heads, 1 or N, N)."""
        if self.extra_mask is None:
            return None
        name, position = self.extra_mask
        mask = kwargs[name] if name in kwargs else args[position] if len(args) > position else None
        if mask is None or mask.ndim == 4:
            return mask
        return real_tokens(mask, name)[:, None, None] if mask.ndim == 2 else mask[:, None]


def _mask_argument(block: nn.Module) -> tuple[str, int] | None:
    arguments = list(inspect.signature(lineage(type(block))[-1].forward).parameters)  # type: ignore[attr-defined]
    return next(((name, arguments.index(name) - 1) for name in MASK_ARGUMENTS if name in arguments), None)


def _last_block(found: Survey, flow: Flow, model: nn.Module) -> str:
    """The module in a list of modules that holds the model's last sum of more than a class token."""
    kind = type(model).__name__
    sums = [meeting for meeting in flow.meetings if meeting.tokens > 1]
    if not sums:
        raise UserError(f"{kind} has no residual block after which another could come")
    owner = sums[-1].owner
    around = [owner.rsplit(".", cut)[0] for cut in range(owner.count(".") + 1)]
    parents = {name: model.get_submodule(name.rpartition(".")[0]) for name in around}
    name = next((n for n in around if isinstance(parents[n], nn.ModuleList | nn.Sequential)), owner)
    if math.prod(found.visits[name].output) != math.prod(sums[-1].shape):
        raise UserError(
            f"the last block of {kind}, {name}, gives more than one map, and none after which to put another"
        )
    return name


@modification(summary="one more MSA or MLP block at the end of the model (CB, Figure 3)")
def extra_block(model: nn.Module, *, kind: Literal["msa", "mlp"] = "msa") -> list[Change]:
    """Add a residual block that starts with nothing to add.

    Args:
        kind: attention with the heads of the model's last one, over the whole map, or an MLP of the same size
    """
    found, flow = survey(model), follow(model)
    if kind == "msa":
        refuse_causal(found, model)
    name = _last_block(found, flow, model)
    block, shape = model.get_submodule(name), found.visits[name].output
    if kind == "msa" and tokens_first(shape):
        raise UserError(
            f"{name} has its tokens before the batch, so that attention would be across images; "
            "it has to work on (batch, tokens, channels)"
        )
    layout = layout_of(shape, flow.image, block)
    dim = shape[1 if layout == "NCHW" else -1]
    heads = math.gcd(dim, found.attentions[-1].heads if found.attentions else dim // HEAD_WIDTH)
    arguments = {"layout": layout, **factory_arguments(model, name)}
    extra = ExtraAttention(dim, heads, **arguments) if kind == "msa" else ExtraMlp(dim, **arguments)
    graft(model, block, WithExtraBlock, extra=extra, extra_mask=_mask_argument(block))
    what = f"MSA ({heads} head{'s' * (heads > 1)})" if kind == "msa" else "MLP (ratio 2)"
    return [Change(name, f"{lineage(type(block))[-1].__name__}: an {what} after it, {dim} channels")]
