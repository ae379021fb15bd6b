"""Pictures in a page: photographs in grey, and over them in one colour where a model looks; each a data URI."""

import base64
import io

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

_SMOOTH = 48  # pixels of a map's side, at least
_GLOW = (255, 138, 0)  # over grey it is seen by everyone
_OPAQUE = 0.82


def grey_photo(image: Tensor) -> Image.Image:
    """An image (C, H, W) of values in 0..1, in grey, so that the one colour over it is where the model looks."""
    grey = (image.mean(dim=0).clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(grey.cpu().numpy())


def overlay(heat: Tensor) -> str:
    """A map (h, w) of values in 0..1 as a glow, the more opaque the greater."""
    # Browsers and printers each enlarge few pixels in their own way; many look alike everywhere.
    heat = F.interpolate(heat[None, None], scale_factor=-(-_SMOOTH // min(heat.shape)), mode="bilinear")[0, 0]
    pixels = torch.empty(*heat.shape, 4, dtype=torch.uint8)
    pixels[..., :3] = torch.tensor(_GLOW, dtype=torch.uint8)
    pixels[..., 3] = (heat.clamp(0, 1) * 255 * _OPAQUE).round().to(torch.uint8)
    return data_uri(Image.fromarray(pixels.numpy()), "PNG")


def data_uri(image: Image.Image, kind: str) -> str:
    """A picture as a PNG or JPEG that needs no file."""
    file = io.BytesIO()
    image.save(file, format=kind, optimize=True)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
