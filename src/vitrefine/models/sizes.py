"""Images that a model can take."""

import math

from vitrefine.errors import UserError


def image_size(size: int | tuple[int, int], step: int) -> tuple[int, int]:
    """Height and width of the images a model is made for, each a multiple of `step`."""
    sides = tuple(size) if isinstance(size, tuple | list) else (size, size)
    if len(sides) != 2 or not all(isinstance(side, int) for side in sides):
        raise UserError(f"img_size={size} is no size of images; give one whole number, or height and width")
    check_size(*sides, step)
    return sides


def check_size(height: int, width: int, step: int) -> None:
    """Refuse an image whose sides are not multiples of `step`, naming sizes that are."""
    sides = (height, width)
    if any(side < 1 or side % step for side in sides):
        near = (tuple(max(step, (side + more) // step * step) for side in sides) for more in (0, step - 1))
        shown = dict.fromkeys(f"{down}x{across}" for down, across in near)
        raise UserError(
            f"an image of {height}x{width} does not fit: each side must be a multiple of {step}, "
            f"as in {' or '.join(shown)}"
        )


def square_side(positions: int) -> int:
    """The side of the square map that so many learned positions were made for."""
    side = math.isqrt(max(0, positions))
    if side == 0 or side * side != positions:
        raise UserError(
            f"weights with {positions} positions were made for images that are not square, and load only into a model "
            "of the same img_size; make it for that size, and then set_input_size"
        )
    return side
