"""The tokens of some blocks of a plain ViT, arranged as timm's `forward_intermediates` gives them."""

from typing import Any

from torch import Tensor

from vitrefine.errors import check_choice

Intermediates = list[Any] | tuple[Tensor, list[Any]] | dict[str, Any]


def check_format(output_fmt: str) -> None:
    """Refuse a format that tokens cannot be given in."""
    check_choice("format of features", output_fmt, ("NCHW", "NLC"))


def arrange(
    outputs: list[Tensor],
    final: Tensor | None,
    grid: tuple[int, int],
    prefix_tokens: int,
    *,
    return_prefix_tokens: bool,
    output_fmt: str,
    output_dict: bool,
) -> Intermediates:
    """What `forward_intermediates` returns.

    Args:
        outputs: Tokens after the blocks asked for, (B, N, C).
        final: Tokens after all blocks and the last norm; None where only intermediates are wanted.
        grid: Height and width of the map of patches.
        prefix_tokens: How many tokens come before those of patches.
        return_prefix_tokens: Whether those are wanted as well.
        output_fmt: `NCHW` or `NLC`.
        output_dict: Whether everything comes by timm's names.
    """
    prefixes = [tokens[:, :prefix_tokens] for tokens in outputs]
    intermediates: list[Any] = [tokens[:, prefix_tokens:] for tokens in outputs]
    if output_fmt == "NCHW":
        intermediates = [tokens.transpose(1, 2).unflatten(2, grid).contiguous() for tokens in intermediates]
    with_prefixes = return_prefix_tokens and prefix_tokens > 0
    if output_dict:
        named: dict[str, Any] = {"image_intermediates": intermediates}
        if with_prefixes:
            named["image_intermediates_prefix"] = prefixes
        return named if final is None else {**named, "image_features": final}
    if with_prefixes:
        intermediates = list(zip(intermediates, prefixes, strict=True))
    return intermediates if final is None else (final, intermediates)
