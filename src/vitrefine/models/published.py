"""The sizes and costs that the papers print, to set ours beside.

One row a printed figure. The LIT paper counts a LIT without its classifier and cuts the decimals off; its Table 5
agrees with the whole model, decimals cut off; the other two papers round. MACs are rounded by all three.
"""

from dataclasses import dataclass
from typing import Literal

_REFINER = (
    "no one configuration has every FLOPs figure of the Refiner paper (98.0B at 448 contradicts those at 224 and 384); "
    "ours is the authors' code, which has these parameters"
)
_SMALL = "ViT-S has 22.05 M parameters, on the edge between 22.0 and 22.1"
_BASE = "ViT-B has 86.57 M parameters with its classifier and 85.80 M without; papers print 86M all the same"
_PVT = "PVT-S has 24.49 M parameters; its own paper prints 24.5, which LIT rounds once more"
_NORMS = "4.446 G here; a counter that adds two or more operations an element for layer norms rounds to 4.5"


@dataclass(frozen=True)
class Published:
    """Figures of one model at one size, as a paper prints them; None where it prints none."""

    model: str
    params: str
    macs: str | None
    source: str
    size: int = 224
    head: bool = True  # whether the paper's parameters include the classifier
    rounding: Literal["round", "truncate"] = "round"  # of the parameters
    note: str = ""  # why ours may differ


def _unit_and_decimals(text: str) -> tuple[float, int]:
    number, suffix = text[:-1], text[-1]
    return {"M": 1e6, "G": 1e9, "B": 1e9}[suffix], len(number.partition(".")[2])


def at_precision(count: int, like: str, rounding: str = "round") -> str:
    """Write a count with the unit and the decimals of a printed figure: 19_366_000 like "20M" is "19M".

    Args:
        count: The exact count.
        like: A printed figure: digits and one of M, G, B.
        rounding: `round`, or `truncate` to cut the decimals off.
    """
    unit, decimals = _unit_and_decimals(like)
    if rounding == "truncate":
        step = round(unit / 10**decimals)
        count -= count % step
    return f"{count / unit:.{decimals}f}{like[-1]}"


PUBLISHED = [
    Published("refined_vit_s", "25M", "7.2B", "Refiner Table 7", note=_REFINER),
    Published("refined_vit_s", "25M", "24.5B", "Refiner Table 7", size=384, note=_REFINER),
    Published("refined_vit_m", "55M", "13.5B", "Refiner Table 7", note=_REFINER),
    Published("refined_vit_m", "55M", "49.2B", "Refiner Table 7", size=384, note=_REFINER),
    Published("refined_vit_l", "81M", "19.1B", "Refiner Table 7", note=_REFINER),
    Published("refined_vit_l", "81M", "69.1B", "Refiner Table 7", size=384, note=_REFINER),
    Published("refined_vit_l", "81M", "98.0B", "Refiner Table 7", size=448, note=_REFINER),
    Published("refined_vit_base", "86M", None, "Refiner Table 10", note=_BASE),
    Published("cb_vit_ti", "5.7M", "1.3G", "CB Table 5"),
    Published("cb_vit_s", "22.0M", "4.6G", "CB Table 5", note=_SMALL),
    Published("cb_vit_b", "86.6M", "17.6G", "CB Table 5"),
    Published("cb_s_vit_ti", "5.7M", "1.3G", "CB Table 5"),
    Published("cb_s_vit_s", "22.0M", "4.6G", "CB Table 5", note=_SMALL),
    Published("cb_s_vit_b", "86.6M", "17.6G", "CB Table 5"),
    Published("localvit_ti", "5.9M", "1.3G", "LocalViT paper"),
    Published("lit_ti", "19M", "3.6G", "LIT Table 2", head=False, rounding="truncate"),
    Published("lit_s", "27M", "4.1G", "LIT Table 2", head=False, rounding="truncate"),
    Published("lit_m", "48M", "8.6G", "LIT Table 2", head=False, rounding="truncate"),
    Published("lit_b", "86M", "15.0G", "LIT Table 2", head=False, rounding="truncate"),
    Published("lit_ti_star", "19M", "3.6G", "LIT Table 3", head=False, rounding="truncate"),
    Published("lit_s_star", "27M", "4.1G", "LIT Table 3", head=False, rounding="truncate"),
    Published("pvt_small", "25M", "3.8G", "LIT Table 5", note=_PVT),
    Published("pvt_small_msa", "20M", "8.4G", "LIT Table 5", rounding="truncate"),
    Published("pvt_small_msa(attention=[0,1,1,1])", "20M", "4.5G", "LIT Table 5", rounding="truncate", note=_NORMS),
    Published("pvt_small_msa(attention=[0,0,1,1])", "19M", "3.6G", "LIT Table 5", rounding="truncate"),
    Published("pvt_small_msa(attention=[0,0,0,1])", "17M", "3.0G", "LIT Table 5", rounding="truncate"),
    Published("pvt_small_msa(attention=[0,0,0,0])", "14M", "2.8G", "LIT Table 5", rounding="truncate"),
]
