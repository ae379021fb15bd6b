"""What models return, by library and by how they are trained."""

from typing import Any

from torch import Tensor

from vitrefine.errors import UserError


def logits_of(output: Any) -> Tensor:
    """The logits of the image's classes (B, classes) in whatever a model returned."""
    found = getattr(output, "logits", output)  # transformers names them
    found = found[0] if isinstance(found, tuple | list) else found  # others come after: of patches, of distillation
    if not isinstance(found, Tensor) or found.ndim != 2:
        what = f"a tensor of {found.ndim} dimensions" if isinstance(found, Tensor) else type(found).__name__
        raise UserError(f"a model must give logits (images, classes) to be trained, but this one gives {what}")
    return found
