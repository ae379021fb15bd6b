"""Sentences name the layers that they are about, counted from 1, and only what is there."""

import math
from dataclasses import replace

import pytest
import torch

from vitrefine.diagnose.profile import Layer, Profile, Summary
from vitrefine.diagnose.similarity import SimilarityMatrix
from vitrefine.diagnose.words import contrasts, findings, spans

BOUND = math.log(197)


def profile(key: str, means: list[float], bound: float | None = None) -> Profile:
    layers = (Layer(f"blocks.{i}", Summary(m, m, m, m), (Summary(m, m, m, m),) * 2, bound) for i, m in enumerate(means))
    return Profile(key, key, "", tuple(layers))


def entropy(*shares: float) -> dict[str, Profile]:
    return {"entropy": profile("entropy", [share * BOUND for share in shares], BOUND)}


def test_spans() -> None:
    assert spans([8, 9, 10, 11, 12]) == "8–12"
    assert spans([1, 4, 5, 6]) == "1, 4–6"
    assert spans([3]) == "3"


def test_layers_are_counted_in_the_model() -> None:
    """Of a pyramid, only the last layers see the whole image."""
    far = replace(profile("distance", [0.2, 0.6]), places=(13, 15))
    assert findings({"distance": far}) == [
        "attention reaches 0.20 of the image's sides in layer 14 and 0.60 in layer 16"
    ]
    same = replace(profile("distance", [0.6, 0.6]), places=(14, 15))
    assert findings({"distance": same}) == ["attention reaches equally far in layers 15–16: 0.60 of the image's sides"]
    alone = {"distance": replace(profile("distance", [0.6]), places=(15,))}
    alone["class_entropy"] = replace(profile("class_entropy", [BOUND / 2], BOUND), places=(15,))
    assert findings(alone) == [
        "the class token's attention has 50\u00a0% of maximal entropy in layer 16",
        "attention reaches 0.60 of the image's sides in layer 16",
    ]
    narrow = replace(profile("class_entropy", [4.0, 2.0], BOUND), places=(13, 15))
    assert "narrows from layer 14 to the last: 76" in findings({"class_entropy": narrow})[0]
    sharp = {"entropy": replace(entropy(0.4, 0.95)["entropy"], places=(3, 5))}
    assert findings(sharp)[0].startswith("layer 6 is nearly uniform")


def test_uniform_layers_are_named() -> None:
    (sentence,) = findings(entropy(0.6, 0.7, 0.91, 0.93))
    assert sentence.startswith("layers 3–4 are nearly uniform: 92\u00a0% of maximal entropy; CB targets exactly this")
    (sentence,) = findings(entropy(0.6, 0.95))
    assert sentence.startswith("layer 2 is nearly uniform: 95")
    (sentence,) = findings(entropy(0.99, 0.95))
    assert sentence.startswith("all layers are nearly uniform")
    (sentence,) = findings(entropy(0.4, 0.6))
    assert "layer 1 attends sharply" in sentence
    assert "no layer is nearly uniform" in sentence
    (sentence,) = findings(entropy(0.7, 0.8))
    assert "the nearest is layer 2 with 80" in sentence


def test_what_is_no_number_means_nothing() -> None:
    fine, broken = entropy(0.5, 0.6), entropy(0.5, math.nan)
    sentence = "what blocks.1 computes is no number (NaN), so there is nothing to say of this model: "
    assert findings(broken) == [sentence + "its training diverged, or its numbers overflow"]
    assert len(findings({**fine, "token_similarity": profile("token_similarity", [math.nan])})) == 1
    for pair in ((fine, broken), (broken, fine)):
        (sentence,) = contrasts("A", "B", *pair)
        assert sentence.startswith("the two cannot be compared: what blocks.1 of ")


@pytest.mark.parametrize(
    ("key", "means", "said"),
    [
        ("head_similarity", [0.2, 0.95], "the heads of layer 2 do nearly the same"),
        ("head_similarity", [0.2, 0.4], "heads differ"),
        ("token_similarity", [0.1, 0.97], "tokens are smoothed into one: their mean cosine at the end is 0.97"),
        ("token_similarity", [0.1, 0.4], "tokens stay apart"),
        ("distance", [0.2, 0.6], "0.20 of the image's sides in layer 1 and 0.60 in layer 2"),
        ("distance", [0.6, 0.6], "equally far in all layers"),
        ("broadcast_mean", [0.0, 0.0], "learned nothing yet"),
        ("broadcast_mean", [0.01, 0.3], "+0.010 of the mean token in its first block and +0.300 in its last"),
        ("offset", [0.0, 0.0], "token merging is uniform"),
        ("offset", [0.5, 1.25], "by 0.50, 1.25 tokens"),
    ],
)
def test_sentences(key: str, means: list[float], said: str) -> None:
    (sentence,) = findings({key: profile(key, means)})
    assert said in sentence


def test_refinement() -> None:
    both = {key: profile(key, [0.8, 0.8 + change]) for key, change in (("head_similarity", 0), ("x", 0))}
    both["refined_head_similarity"] = profile("refined_head_similarity", [0.3, 0.5])
    assert "refinement makes heads more different: cosine 0.80 before, 0.40 after" in findings(both)


def test_features_that_settle() -> None:
    values = torch.eye(6)
    values[-1] = torch.tensor([0.1, 0.4, 0.92, 0.95, 0.99, 1.0])
    (sentence,) = findings({}, SimilarityMatrix(list("abcdef"), values))
    assert sentence == "features settle at block 2 of 5: from there on their CKA with the last is 0.9 or more"
    values[-1] = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.6, 1.0])
    (sentence,) = findings({}, SimilarityMatrix(list("abcdef"), values))
    assert sentence.startswith("features change up to the last block: those of block 2 have a CKA of 0.30")


def test_features_that_are_all_the_same() -> None:
    assert findings({}, SimilarityMatrix(list("abcdef"), torch.zeros(6, 6))) == []


def test_few_images_are_said_to_be_few() -> None:
    alike = SimilarityMatrix(list("abcdef"), torch.ones(6, 6))
    settled, warning = findings({}, alike, 8)
    assert settled.startswith("features settle")
    assert warning == (
        "8 images are few for CKA, which scatters widely, and for F, which is drawn towards 1; "
        "give 32 or more to rely on them"
    )
    assert findings({}, alike, 32) == [settled]
    assert findings({}, None, 3) == ["CKA and F are left out, for they need 4 images or more"]


def test_contrasts() -> None:
    first, second = entropy(0.9, 0.9), entropy(0.6, 0.8)
    first["distance"], second["distance"] = profile("distance", [0.5]), profile("distance", [0.6])
    found = contrasts("vit", "+cb", first, second)
    assert found[0].startswith("+cb attends more sharply than vit: entropy of attention 90\u00a0% → 70\u00a0%")
    assert found[1] == "+cb looks further than vit: distance 0.50 → 0.60"
    assert contrasts("vit", "+cb", first, first) == [
        "+cb attends much as vit does: nothing measured here differs by 0.02 or more"
    ]
