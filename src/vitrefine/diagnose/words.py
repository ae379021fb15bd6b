"""What the numbers of a diagnosis mean, in sentences that name the layers."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from vitrefine.diagnose.cka import LEAST_IMAGES
from vitrefine.diagnose.profile import Profile
from vitrefine.diagnose.similarity import SimilarityMatrix

NEARLY_UNIFORM = 0.9  # of the entropy of uniform attention
SHARP = 0.5
SMOOTHED = 0.9  # mean cosine of tokens
ALIKE = 0.9  # mean cosine of heads
SETTLED = 0.9  # CKA with the last block
ENOUGH_IMAGES = 32  # for CKA, whose standard deviation over draws was up to 0.06 then for DeiT-Ti, with 8 up to 0.27
ALL = "all layers"
PER_CENT = "\u00a0%"


def findings(
    profiles: Mapping[str, Profile], alike: SimilarityMatrix | None = None, images: int = ENOUGH_IMAGES
) -> list[str]:
    """Sentences on what the profiles and the similarity of blocks show; the most telling first.

    Args:
        profiles: By quantity.
        alike: CKA of blocks.
        images: That all this was measured on.
    """
    if nowhere := _no_number(profiles):
        return [
            f"what {nowhere} computes is no number (NaN), so there is nothing to say of this model: its training "
            "diverged, or its numbers overflow"
        ]
    makers = (_entropy, _class_entropy, _heads, _refined_heads, _smoothing, _distance, _broadcast, _offsets)
    sentences = [make(profiles) for make in makers]
    return [sentence for sentence in [*sentences[:6], _features(alike), _few(images), *sentences[6:]] if sentence]


def _no_number(profiles: Mapping[str, Profile]) -> str:
    """The first layer or block, if any, of which attention or tokens are NaN."""
    layers = [layer for key in ("entropy", "token_similarity") if key in profiles for layer in profiles[key].layers]
    return next((layer.name for layer in layers if math.isnan(layer.whole.mean)), "")


def spans(numbers: Sequence[int]) -> str:
    """Numbers in as few words as can be: `8–12`, `3`, `1, 4–6`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def layers(numbers: Sequence[int]) -> str:
    """`layer 3`, `layers 8–12`."""
    return f"layer{'s' * (len(numbers) > 1)} {spans(numbers)}"


def _all(profile: Profile) -> str:
    """All layers that a quantity was measured of; those of a model, where none is left out before the last."""
    numbers = profile.numbers
    return ALL if numbers == list(range(1, len(numbers) + 1)) else layers(numbers)


def percent(share: float) -> str:
    return f"{100 * share:.0f}{PER_CENT}"


def _entropy(profiles: Mapping[str, Profile]) -> str:
    profile = profiles.get("entropy")
    shares = profile.shares if profile else None
    if not profile or not shares:
        return ""
    by_layer = dict(zip(profile.numbers, shares, strict=True))
    even = [number for number, share in by_layer.items() if share >= NEARLY_UNIFORM]
    sharp = [number for number, share in by_layer.items() if share < SHARP]
    average = f"attention has {percent(fmean(shares))} of maximal entropy on average, {profile.mean:.2f} nats"
    if len(even) == len(shares) and _all(profile) == ALL:
        return f"{ALL} are nearly uniform: {average}; CB gives such attention for nothing"
    if even:
        those = fmean([by_layer[number] for number in even])
        verb = "are" if len(even) > 1 else "is"
        what = f"{layers(even)} {verb} nearly uniform: {percent(those)} of maximal entropy; CB targets exactly this"
        return f"{what} ({average})"
    if sharp:
        verb = "attend" if len(sharp) > 1 else "attends"
        return f"{average}; {layers(sharp)} {verb} sharply, below {percent(SHARP)}; no layer is nearly uniform"
    nearest = max(by_layer, key=by_layer.__getitem__)
    return f"{average}; no layer is nearly uniform, the nearest is layer {nearest} with {percent(by_layer[nearest])}"


def _class_entropy(profiles: Mapping[str, Profile]) -> str:
    profile = profiles.get("class_entropy")
    shares = profile.shares if profile else None
    if not profile or not shares:
        return ""
    if len(shares) == 1:
        return f"the class token's attention has {percent(*shares)} of maximal entropy in {layers(profile.numbers)}"
    first, last = shares[0], shares[-1]
    how = "narrows" if last < first - 0.05 else "widens" if last > first + 0.05 else "stays as wide as it was"
    start = "the first layer" if profile.numbers[0] == 1 else layers(profile.numbers[:1])
    return f"the class token's attention {how} from {start} to the last: {percent(first)} → {percent(last)}"


def _heads(profiles: Mapping[str, Profile]) -> str:
    profile = profiles.get("head_similarity")
    if not profile or all(len(layer.heads) < 2 for layer in profile.layers):
        return ""
    alike = [
        number
        for number, layer in zip(profile.numbers, profile.layers, strict=True)
        if len(layer.heads) > 1 and layer.whole.mean >= ALIKE
    ]
    if not alike:
        return f"heads differ: the maps of two heads of a layer have a cosine of {profile.mean:.2f} on average"
    return (
        f"the heads of {layers(alike)} do nearly the same, with a cosine of {ALIKE} or more between their maps; "
        "the Refiner's expansion aims at such heads"
    )


def _refined_heads(profiles: Mapping[str, Profile]) -> str:
    after, before = profiles.get("refined_head_similarity"), profiles.get("head_similarity")
    if not after or not before:
        return ""
    names = {layer.name for layer in after.layers}
    then = fmean([layer.whole.mean for layer in before.layers if layer.name in names])
    change = after.mean - then
    how = (
        "makes heads more different"
        if change < -0.01
        else "makes heads more alike"
        if change > 0.01
        else "leaves heads as they were"
    )
    return f"refinement {how}: cosine {then:.2f} before, {after.mean:.2f} after"


def _smoothing(profiles: Mapping[str, Profile]) -> str:
    profile = profiles.get("token_similarity")
    if not profile:
        return ""
    means = profile.means
    smooth = [i for i, value in enumerate(means) if value >= SMOOTHED]
    if smooth and smooth[-1] == len(means) - 1:
        return f"tokens are smoothed into one: their mean cosine at the end is {means[-1]:.2f}"
    return f"tokens stay apart: their mean cosine goes from {means[0]:.2f} to {means[-1]:.2f}, {max(means):.2f} at most"


def _distance(profiles: Mapping[str, Profile]) -> str:
    profile = profiles.get("distance")
    if not profile:
        return ""
    by_layer = dict(zip(profile.numbers, profile.means, strict=True))
    near, far = (end(by_layer, key=by_layer.__getitem__) for end in (min, max))
    if len(by_layer) == 1:
        return f"attention reaches {profile.mean:.2f} of the image's sides in layer {far}"
    if by_layer[far] - by_layer[near] < 0.01:
        return f"attention reaches equally far in {_all(profile)}: {by_layer[far]:.2f} of the image's sides"
    return (
        f"attention reaches {by_layer[near]:.2f} of the image's sides in layer {near} and {by_layer[far]:.2f} in "
        f"layer {far}"
    )


def _features(alike: SimilarityMatrix | None) -> str:
    if alike is None or len(alike.names) < 4:
        return ""
    towards = alike.values[-1].tolist()[1:]
    if towards[-1] == 0:  # even with itself: features are the same for all images
        return ""
    count = len(towards)
    done = next(i for i in range(count) if min(towards[i:]) >= SETTLED)
    if done >= count - 2:
        half = f"those of block {count // 2} have a CKA of {towards[count // 2 - 1]:.2f} with it"
        return f"features change up to the last block: {half}"
    return f"features settle at block {done + 1} of {count}: from there on their CKA with the last is {SETTLED} or more"


def _few(images: int) -> str:
    if images < LEAST_IMAGES:
        return f"CKA and F are left out, for they need {LEAST_IMAGES} images or more"
    if images < ENOUGH_IMAGES:
        return (
            f"{images} images are few for CKA, which scatters widely, and for F, which is drawn towards 1; "
            f"give {ENOUGH_IMAGES} or more to rely on them"
        )
    return ""


def _broadcast(profiles: Mapping[str, Profile]) -> str:
    profile = profiles.get("broadcast_mean")
    if not profile:
        return ""
    if all(layer.whole.low == layer.whole.high == 0 for layer in profile.layers):
        return "CB_S has learned nothing yet: all its scales are zero"
    first, last = profile.means[0], profile.means[-1]
    return f"CB_S adds {first:+.3f} of the mean token in its first block and {last:+.3f} in its last"


def _offsets(profiles: Mapping[str, Profile]) -> str:
    profile = profiles.get("offset")
    if not profile:
        return ""
    if not any(profile.means):
        return "token merging is uniform: all its offsets are zero"
    lengths = ", ".join(f"{value:.2f}" for value in profile.means)
    return f"token merging moves its taps by {lengths} tokens on average, merging by merging"


# What two models are compared by: a word for it, what more of it is called, what less is, and a change worth a word.
_CONTRASTS = {
    "entropy": ("entropy of attention", "spreads its attention more", "attends more sharply", 0.02),
    "class_entropy": ("entropy of the class token", "has a broader class token", "has a sharper class token", 0.02),
    "distance": ("distance", "looks further", "looks nearer", 0.02),
    "head_similarity": ("cosine of heads", "has heads that are more alike", "has heads that differ more", 0.02),
    "token_similarity": ("cosine of tokens", "smooths tokens more", "keeps tokens further apart", 0.02),
}


def contrasts(first: str, second: str, one: Mapping[str, Profile], other: Mapping[str, Profile]) -> list[str]:
    """How the second model differs from the first, in sentences; the largest difference first."""
    for name, profiles in ((first, one), (second, other)):
        if nowhere := _no_number(profiles):
            return [f"the two cannot be compared: what {nowhere} of {name} computes is no number (NaN)"]
    found = []
    for key, (what, more, less, least) in _CONTRASTS.items():
        if key not in one or key not in other:
            continue
        before, after = (
            fmean(profile.shares) if profile.shares else profile.mean for profile in (one[key], other[key])
        )
        if abs(after - before) >= least:
            show = percent if one[key].shares else "{:.2f}".format
            how = more if after > before else less
            found.append((abs(after - before), f"{second} {how} than {first}: {what} {show(before)} → {show(after)}"))
    sentences = [sentence for _, sentence in sorted(found, reverse=True)]
    return sentences or [f"{second} attends much as {first} does: nothing measured here differs by 0.02 or more"]
