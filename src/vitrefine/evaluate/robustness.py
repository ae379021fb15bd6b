"""What is left of a model's accuracy when its images are changed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vitrefine.errors import UserError
from vitrefine.evaluate.attacks import FGSM, PGD
from vitrefine.evaluate.change import Change
from vitrefine.evaluate.noise import Blur, GaussianNoise, ShotNoise
from vitrefine.evaluate.occlusion import Occlusion
from vitrefine.evaluate.predictions import Examiner, Predictions
from vitrefine.statistics import Estimate, difference_over_images, over_images, over_seeds

REPEATS = 5


@dataclass(frozen=True)
class Trial:
    """A change of images that is tried, once or with several draws."""

    name: str
    label: str
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Outcome:
    """Accuracy under a change, and by how much that is less: in per cent and points, with 95 % intervals.

    They are over draws (Student's t; "seeds") where the change is random, and over images where it is not; the
    difference is paired, image by image.
    """

    name: str
    label: str
    accuracy: Estimate
    difference: Estimate


def usual_trials(seed: int = 0, repeats: int = REPEATS) -> list[Trial]:
    """The changes of the CB paper's Tables 8 and 9, and PGD."""
    if repeats < 1:
        raise UserError(f"--repeats is {repeats}; at least 1 is needed")

    def drawn(make: Callable[[int], Change]) -> tuple[Change, ...]:
        return tuple(make(draw) for draw in range(repeats))

    return [
        Trial("occlusion", "central half black", (Occlusion(),)),
        Trial("occlusion-mean", "central half of mean colour", (Occlusion(fill="mean"),)),
        Trial("fgsm-1", "FGSM, ε = 1/255", (FGSM(1),)),
        Trial("fgsm-8", "FGSM, ε = 8/255", (FGSM(8),)),
        Trial("pgd-1", "PGD, ε = 1/255, 10 steps", (PGD(1, seed=seed),)),
        Trial("shot-noise", "shot noise, 60 photons", drawn(lambda draw: ShotNoise(seed=seed, draw=draw))),
        Trial("noise-5", "Gaussian noise, σ = 5", drawn(lambda draw: GaussianNoise(5, seed, draw))),
        Trial("noise-10", "Gaussian noise, σ = 10", drawn(lambda draw: GaussianNoise(10, seed, draw))),
        Trial("blur-1", "Gaussian blur, σ = 1", (Blur(1),)),
        Trial("blur-2", "Gaussian blur, σ = 2", (Blur(2),)),
    ]


def measure_robustness(examiner: Examiner, clean: Predictions, trials: Sequence[Trial]) -> list[Outcome]:
    """Try changes.

    Args:
        examiner: Of the model and the images.
        clean: What the model predicts for images as they are.
        trials: The changes.
    """
    return [_tried(examiner, clean, trial) for trial in trials]


def _tried(examiner: Examiner, clean: Predictions, trial: Trial) -> Outcome:
    many = len(trial.changes)
    rights = []
    for number, change in enumerate(trial.changes, start=1):
        what = trial.label + (f", draw {number} of {many}" if many > 1 else "")
        rights.append(examiner.predict_again(clean, change, what=what).right)
    if many == 1:
        return Outcome(trial.name, trial.label, over_images(rights[0]), difference_over_images(clean.right, rights[0]))
    shares = [100 * float(right.mean()) for right in rights]
    unchanged = 100 * float(clean.right.mean())
    return Outcome(trial.name, trial.label, over_seeds(shares), over_seeds([share - unchanged for share in shares]))
