"""Token labelling (LV-ViT; Refiner's advanced recipe): every patch has a label beside that of the image.

    loss = CE(class token, image's label) + weight · mean over patches of CE(patch, patch's label)

With mix-token a box of patches came from the opposite image of the batch, which the class token sees and the patches,
put back in their places, do not: the image's label is shared by area, and the labels of patches stay as they are.

Labels of patches are made on the fly. A teacher classifies each place of its feature map, and its probabilities are
resized to the patches; it sees the very crop that the student sees. (LV-ViT's authors stored the five likeliest classes
of each place of whole images beforehand, and cut crops out of that.) Without a teacher a patch has its image's label.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from vitrefine.train.cross_entropy import at_least_single, soft_cross_entropy
from vitrefine.train.teacher import Teacher


class TokenLabelLoss(nn.Module):
    """The loss of a model that returns (class token, patches, mix-token box) in training.

    Args:
        weight: Of the patches' loss.
        teacher: Who labels the patches; None for labels of the images.
    """

    def __init__(self, weight: float, teacher: Teacher | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.teacher = teacher

    def forward(self, output: tuple[Tensor, Tensor, Tensor], images: Tensor, targets: Tensor) -> Tensor:
        cls, patches, box = output
        count = patches.shape[1]
        if self.teacher is None:
            patch_targets = targets[:, None].expand(-1, count, -1)
        else:
            patch_targets = patch_labels(self.teacher.dense(images), images, count)
        inside = ((box[2] - box[0]) * (box[3] - box[1]) / count).to(targets.dtype)
        image_targets = (1 - inside) * targets + inside * targets.flip(0)
        return soft_cross_entropy(cls, image_targets) + self.weight * soft_cross_entropy(patches, patch_targets)


def patch_labels(dense: Tensor, images: Tensor, patches: int) -> Tensor:
    """Probabilities (B, patches, classes) out of logits (B, classes, h, w) on another grid.

    Args:
        dense: The teacher's logits.
        images: Whose shape says that of the grid of patches.
        patches: How many there are.
    """
    height = round((patches * images.shape[-2] / images.shape[-1]) ** 0.5)
    shares = at_least_single(dense).softmax(dim=1)
    return F.interpolate(shares, (height, patches // height), mode="bilinear").flatten(2).transpose(1, 2)
