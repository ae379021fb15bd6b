"""Images that a model can take."""

from vitrefine.errors import UserError


def image_size(size: int | tuple[int, int], step: int) -> tuple[int, int]:
    """Height and width of the images a model is made for, each a multiple of `step`."""
    height, width = (size, size) if isinstance(size, int) else size
    check_size(height, width, step)
    return height, width


def check_size(height: int, width: int, step: int) -> None:
    """Refuse an image whose sides are not multiples of `step`, naming sizes that are."""
    if height % step or width % step or not height or not width:
        near = sorted({max(step, side // step * step) for side in (height, height + step)})
        raise UserError(
            f"an image of {height}x{width} does not fit: each side must be a multiple of {step}, "
            f"{' or '.join(map(str, near))} for instance"
        )
