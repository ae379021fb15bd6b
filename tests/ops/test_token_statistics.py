"""Mean cosines and grams: the specification against loops, the kernels against the specification in float64.

Without a GPU the kernels run in Triton's interpreter, in a process of their own (see test_deformable_merge_triton).
"""

import pytest
import torch
import torch.nn.functional as F
from kernels_here import DEVICE, on_gpu, runs_interpreter, runs_kernels

from vitrefine.errors import UserError
from vitrefine.ops.token_statistics import centred_gram, mean_cosine

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@runs_interpreter
def test_in_the_interpreter(interpret):
    interpret(__file__, "-k", "kernel")


def tokens(batch, count, channels, dtype=torch.float32):
    """With much in common, as tokens have, and one that is zero."""
    torch.manual_seed(0)
    found = torch.randn(batch, count, channels) + 3 * torch.randn(count, channels)
    found[0, 0] = 0
    return found.to(DEVICE, dtype)


def test_mean_cosine_against_a_loop():
    given = tokens(2, 5, 3, torch.float64)
    for image, found in zip(given, mean_cosine(given), strict=True):
        pairs = [F.cosine_similarity(image[i], image[j], dim=0) for i in range(5) for j in range(5) if i != j]
        torch.testing.assert_close(found, torch.stack(pairs).mean())


def test_centred_gram_by_hand():
    found = centred_gram(torch.tensor([[1.0, 0.0], [3.0, 2.0]]))
    assert found.tolist() == [[2.0, -2.0], [-2.0, 2.0]]
    assert found.dtype == torch.float64


def test_implementations_must_exist():
    with pytest.raises(UserError, match="no implementation 'fast'"):
        mean_cosine(tokens(1, 2, 3), impl="fast")


def test_kernel_refuses_what_it_cannot_do():
    with pytest.raises(UserError, match="float64"):
        mean_cosine(tokens(1, 2, 3, torch.float64), impl="triton")
    with pytest.raises(UserError, match="at most 128 images"):
        centred_gram(torch.ones(129, 2), impl="triton")


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 9, 24), (20, 33, 40), (2, 1, 5)])
def test_kernel_follows_the_specification(shape, dtype):
    given = tokens(*shape, dtype)
    exact = given.double()
    close = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(mean_cosine(given, impl="triton").double(), mean_cosine(exact), **close)
    gram = centred_gram(exact)
    torch.testing.assert_close(centred_gram(given, impl="triton"), gram, rtol=0, atol=3e-5 * gram.abs().max().item())


@runs_kernels
def test_kernel_takes_channels_that_are_far_apart():
    given = tokens(3, 24, 9).mT
    torch.testing.assert_close(mean_cosine(given, impl="triton"), mean_cosine(given, impl="reference"))
    torch.testing.assert_close(
        centred_gram(given, impl="triton"), centred_gram(given, impl="reference"), rtol=1e-5, atol=1e-4
    )


@runs_kernels
def test_kernel_gives_the_same_bits_twice():
    given = tokens(5, 40, 32)
    for measure in (mean_cosine, centred_gram):
        assert measure(given, impl="triton").equal(measure(given, impl="triton"))


@runs_kernels
def test_kernel_operators_are_registered_soundly():
    import vitrefine.ops.kernels.token_statistics  # noqa: F401  registers the operators

    torch.library.opcheck(torch.ops.vitrefine.mean_cosine.default, (tokens(2, 3, 4),))
    torch.library.opcheck(torch.ops.vitrefine.centred_gram.default, (tokens(2, 3, 4).flatten(1),))


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [32, 128])
def test_kernel_at_model_shapes(batch, dtype):
    test_kernel_follows_the_specification((batch, 197, 384), dtype)
