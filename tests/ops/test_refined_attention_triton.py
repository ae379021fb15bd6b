"""The Triton kernels of refined attention against the specification in float64, on the GPU or in Triton's interpreter.

The interpreter must be chosen before Triton is imported, and other tests may have imported it: without a GPU this file
therefore runs itself, at small sizes, in a process of its own. The interpreter cannot multiply bfloat16.
"""

import pytest
import torch
from kernels_here import DEVICE, ON_GPU, RUN, TOLERANCE, on_gpu, runs_interpreter, runs_kernels

from vitrefine.errors import UserError
from vitrefine.layers.refiner import Refiner
from vitrefine.ops.refined_attention import Mix, aggregate, refined_attention, refined_maps

pytest.importorskip("triton")
STEPS = 20 if ON_GPU else 3
pytestmark = pytest.mark.usefixtures("poisoned")

if RUN:
    from vitrefine.ops.kernels import refined_attention_and_maps_triton, refined_attention_triton
    from vitrefine.ops.kernels import refined_attention_pack as together
    from vitrefine.ops.kernels import refined_attention_plan as plan


@runs_interpreter
def test_in_the_interpreter(interpret):
    interpret(__file__)


def draw(shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_()


def make(batch, heads, queries, keys, dim, size, dtype, *, ratio=2, reduction=True):
    hidden = heads * ratio
    q, k, v = (draw((batch, heads, n, dim), dtype) for n in (queries, keys, keys))
    mix = Mix(
        draw((hidden, heads)),
        draw((hidden, size, size)) if size > 1 else None,
        draw((heads, hidden)) if reduction else None,
    )
    return [q, k, v], mix


def error(result, truth):
    assert result.shape == truth.shape
    return ((result.double() - truth).norm() / truth.norm()).item()


def check(qkv, mix, *, mask=None):
    """Output and every gradient, against the specification in float64."""
    leaves = [*qkv, *(w for w in mix if w is not None)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact_mask = mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.requires_grad_()
        exact_mask = mask.detach().double().requires_grad_()
        leaves, exact = [*leaves, mask], [*exact, exact_mask]
    weights = iter(exact[3:])
    exact_mix = Mix(*(None if w is None else next(weights) for w in mix))
    truth = refined_attention(*exact[:3], exact_mix, attn_mask=exact_mask, impl="reference")
    grad = torch.randn_like(truth)
    out = refined_attention_triton(*qkv, mix.fold(), attn_mask=mask)
    tolerance = TOLERANCE[qkv[0].dtype]
    assert error(out, truth) < tolerance
    grads = torch.autograd.grad(out, leaves, grad.to(out.dtype))
    for result, expected in zip(grads, torch.autograd.grad(truth, exact, grad.to(out.dtype).double()), strict=True):
        assert error(result, expected) < tolerance


def key_mask(batch, heads, queries, keys):
    return torch.rand(batch, 1, 1, keys, device=DEVICE) > 0.3


def bias(batch, heads, queries, keys):
    return torch.randn(1, heads, queries, keys, device=DEVICE)


def hiding_bias(batch, heads, queries, keys):
    mask = torch.randn(batch, 1, queries, keys, device=DEVICE)
    return mask.masked_fill(torch.rand_like(mask) > 0.7, float("-inf"))


@runs_kernels
@pytest.mark.parametrize(
    ("shape", "dtype", "mask"),
    [
        ((2, 3, 19, 19, 16, 3), torch.float32, None),
        ((1, 2, 17, 35, 24, 3), torch.float16, None),
        ((2, 2, 18, 21, 16, 5), torch.float32, key_mask),
        ((1, 2, 21, 17, 16, 1), torch.float32, bias),
        ((2, 2, 17, 18, 16, 2), torch.float32, hiding_bias),
    ],
)
def test_matches_the_specification(shape, dtype, mask):
    qkv, mix = make(*shape, dtype)
    check(qkv, mix, mask=mask and mask(*shape[:4]))


@runs_kernels
@pytest.mark.parametrize("reduction", [True, False])
def test_few_heads_of_several_images_together(monkeypatch, reduction):
    """Seven images of three maps make two of fifteen, of six maps four of twelve; the last is not full."""
    monkeypatch.setattr(together, "MULTIPROCESSORS", 1)
    shape = (7, 3, 17, 18, 16, 3)
    qkv, mix = make(*shape, torch.float32, reduction=reduction)
    check(qkv, mix)
    check(qkv, mix, mask=hiding_bias(1, 1, *shape[2:4]))


@runs_kernels
def test_images_are_taken_together_where_they_fill_the_gpu():
    assert together.images_together(512, 3, 65) == 5
    assert together.images_together(128, 6, 197) == 2
    assert together.images_together(128, 12, 197) == together.images_together(1, 3, 9000) == 1
    assert together.images_together(8, 3, 65) == 1
    assert together.images_together(64, 20, 197) == 1


@runs_kernels
def test_maps_that_outnumber_the_value_heads():
    shape = (1, 2, 17, 19, 16, 3)
    qkv, mix = make(*shape, torch.float32, reduction=False)
    check(qkv, mix, mask=hiding_bias(1, 1, *shape[2:4]))


@runs_kernels
@pytest.mark.parametrize("images", [1, 0.8])
def test_chunks_of_images_and_of_rows(monkeypatch, images):
    shape = (2, 2, 21, 18, 16, 3)
    room = int(images * 3 * 24 * 20 * 64)  # an image of 24×20 pixels, border included, in three buffers
    monkeypatch.setattr(plan, "LEAST_BYTES", room)
    monkeypatch.setattr(plan, "MOST_BYTES", room)
    qkv, mix = make(*shape, torch.float32)
    check(qkv, mix, mask=bias(*shape[:4]))


@runs_kernels
def test_strided_inputs_and_a_hidden_row():
    qkv = torch.randn(1, 17, 3, 2, 16, device=DEVICE).requires_grad_()
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    mask = torch.ones(17, 17, dtype=torch.bool, device=DEVICE)
    mask[4] = False
    mix = make(1, 2, 1, 1, 16, 3, torch.float32)[1]
    out = refined_attention_triton(q, k, v, mix.fold(), attn_mask=mask)
    truth = refined_attention(q, k, v, mix, attn_mask=mask, impl="reference")
    assert (out[:, :, 4] == 0).all()
    assert error(out, truth.double()) < 1e-5
    grad = torch.randn_like(out)
    (result,) = torch.autograd.grad(out, qkv, grad)
    (expected,) = torch.autograd.grad(truth, qkv, grad)
    assert error(result, expected.double()) < 1e-5


@runs_kernels
def test_dropout_is_seeded_and_the_same_backward():
    (q, k, v), mix = make(1, 2, 19, 17, 16, 3, torch.float32)
    mix = mix.fold().detach().requires_grad_()
    torch.manual_seed(3)
    out = refined_attention_triton(q, k, v, mix, dropout_p=0.3)
    torch.manual_seed(3)
    assert torch.equal(out, refined_attention_triton(q, k, v, mix, dropout_p=0.3))
    assert not torch.equal(out, refined_attention_triton(q, k, v, mix, dropout_p=0.3))
    grad = torch.randn_like(out)
    dv, dmix = torch.autograd.grad(out, [v, mix], grad)
    # The output is linear in the values and in the mix, whatever was dropped.
    torch.testing.assert_close((dv * v).sum(), (out * grad).sum(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close((dmix * mix).sum(), (out * grad).sum(), rtol=1e-4, atol=1e-4)


def check_shared(qkv, mix, dtype, *, mask=None):
    """A block that keeps its maps and one that uses them again, against the specification in float64."""
    other = torch.randn_like(qkv[2]).requires_grad_()
    leaves = [*qkv, other, mix.expand, mix.local, mix.reduce]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact_maps = refined_maps(*exact[:2], Mix(*exact[4:]), attn_mask=mask, impl="reference")
    truth = torch.stack([exact_maps @ exact[2], exact_maps @ exact[3]])
    out, maps = refined_attention_and_maps_triton(*qkv, mix.fold(), attn_mask=mask)
    tolerance = TOLERANCE[dtype]
    assert maps.stride(-2) % 16 == 0
    assert error(maps, exact_maps) < tolerance
    result = torch.stack([out, aggregate(maps, other)])
    assert error(result, truth) < tolerance
    grad = torch.randn_like(result)
    grads = torch.autograd.grad(result, leaves, grad)
    for ours, expected in zip(grads, torch.autograd.grad(truth, exact, grad.double()), strict=True):
        assert error(ours, expected) < tolerance


@runs_kernels
@pytest.mark.parametrize(("images", "mask"), [(2, None), (2, hiding_bias), (9, None)])
def test_maps_that_later_blocks_share(monkeypatch, images, mask):
    monkeypatch.setattr(together, "MULTIPROCESSORS", 1)
    shape = (images, 2, 19, 18, 16, 3)
    qkv, mix = make(*shape, torch.float32)
    check_shared(qkv, mix, torch.float32, mask=mask and mask(*shape[:4]))


@runs_kernels
def test_maps_alone_have_a_gradient_and_are_whole_under_dropout():
    (q, k, v), mix = make(1, 2, 17, 17, 16, 3, torch.float32)
    out, maps = refined_attention_and_maps_triton(q, k, v, mix.fold(), dropout_p=0.4)
    exact = refined_maps(q, k, mix, impl="reference")
    assert error(maps, exact.double()) < 1e-5
    assert error(out, (exact @ v).double()) > 0.1
    grad = torch.randn_like(exact)
    ours, expected = (torch.autograd.grad(m, [q, k, mix.local], grad, retain_graph=True) for m in (maps, exact))
    for a, b in zip(ours, expected, strict=True):
        assert error(a, b.double()) < 1e-5
    dv, dlocal = torch.autograd.grad(out, [v, mix.local], out)
    # The output is linear in both, whatever was dropped.
    torch.testing.assert_close((dv * v).sum(), out.square().sum(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close((dlocal * mix.local).sum(), out.square().sum(), rtol=1e-4, atol=1e-4)


@runs_kernels
def test_same_bits_twice():
    (q, k, v), mix = make(1, 2, 16, 17, 16, 3, torch.float32)
    leaves = [q, k, v, mix.local]
    grad = torch.randn(1, 2, 16, 16, device=DEVICE)
    results = []
    for _ in range(2):
        out = refined_attention_triton(q, k, v, mix.fold())
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@runs_kernels
def test_training_follows_the_same_loss_curve():
    """A layer that learns: the same data, weights and optimiser, the kernels or the specification."""
    tokens, heads, dim = 17, 2, 16
    x, target = torch.randn(2, 1, tokens, heads * dim, device=DEVICE)

    def curve(impl):
        torch.manual_seed(1)
        project = torch.nn.Linear(heads * dim, 3 * heads * dim).to(DEVICE)
        mix = Refiner(heads, expansion=2, kernel_size=3, device=DEVICE)
        optimiser = torch.optim.AdamW([*project.parameters(), *mix.parameters()], lr=0.02)
        losses = []
        for _ in range(STEPS):
            q, k, v = project(x).unflatten(-1, (3, heads, dim)).permute(2, 0, 3, 1, 4)
            out = refined_attention(q, k, v, mix.mix(), impl=impl)
            loss = (out.transpose(1, 2).flatten(2) - target).square().mean()
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            losses.append(loss.item())
        return torch.tensor(losses)

    ours, expected = curve("triton"), curve("reference")
    torch.testing.assert_close(ours, expected, rtol=1e-2, atol=0)
    assert ours[-1] < 0.98 * ours[0]


class Attend(torch.nn.Module):
    def forward(self, q, k, v, mix):
        return refined_attention_triton(q, k, v, mix)


@runs_kernels
def test_compiles_and_exports_as_one_graph():
    (q, k, v), mix = make(1, 2, 17, 17, 16, 3, torch.float32)
    inputs = [q, k, v, mix.fold().detach().requires_grad_()]
    expected = Attend()(*inputs)
    grad = torch.randn_like(expected)
    out = torch.compile(Attend(), fullgraph=True, backend="inductor" if ON_GPU else "aot_eager")(*inputs)
    assert torch.equal(out, expected)
    pairs = zip(torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    exported = torch.export.export(Attend(), tuple(t.detach() for t in inputs))
    assert torch.equal(exported.module()(*(t.detach() for t in inputs)), expected)


@runs_kernels
@pytest.mark.parametrize("keep", [False, True])
def test_operators_are_registered_soundly(keep):
    """Shapes and strides that a compiler is told beforehand, of q, k and v as a layer hands them over."""
    q, k, v = torch.randn(1, 5, 3, 2, 16, device=DEVICE).permute(2, 0, 3, 1, 4)
    mix = torch.randn(2, 2, 3, 3, device=DEVICE)
    forward = (q, k, v, mix, None, None, None, 0.0, 0.25, keep)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.vitrefine.refined_attention.default, forward, test_utils=tests)
    out, lse, packed, kept = torch.ops.vitrefine.refined_attention(*forward)
    grad_kept = torch.randn_like(kept) if keep else None
    backward = (torch.randn_like(out), q, k, v, mix, None, None, None, lse, packed, kept, grad_kept, 0.0, 0.25, False)
    torch.library.opcheck(torch.ops.vitrefine.refined_attention_backward.default, backward, test_utils=tests)


@runs_kernels
def test_says_what_it_cannot_do():
    with pytest.raises(UserError, match="no room for 33 maps"):
        refined_attention_triton(*(torch.zeros(1, 33, 4, 16),) * 3, torch.zeros(33, 33, 3, 3))


@on_gpu
@pytest.mark.parametrize(
    ("shape", "mask"),
    [
        ((4, 12, 197, 197, 32, 3), None),
        ((2, 12, 577, 577, 32, 3), None),
        ((2, 16, 785, 785, 32, 3), None),
        ((1, 6, 1025, 1025, 64, 3), None),
        ((3, 12, 197, 197, 64, 5), key_mask),
        ((2, 8, 99, 131, 48, 3), bias),
        ((2, 3, 64, 64, 80, 1), hiding_bias),
        ((2, 32, 50, 50, 32, 3), None),
        ((1, 20, 65, 33, 48, 5), key_mask),
        ((1, 7, 65, 33, 96, 5), None),
        ((2, 4, 128, 128, 128, 3), bias),
        ((2, 12, 197, 197, 16, 3), hiding_bias),
        ((512, 3, 65, 65, 64, 3), None),  # several images together
        ((63, 6, 197, 197, 64, 3), None),
    ],
)
def test_real_sizes_in_bfloat16(shape, mask):
    qkv, mix = make(*shape, torch.bfloat16)
    check(qkv, mix, mask=mask and mask(*shape[:4]))


@on_gpu
@pytest.mark.parametrize("tokens", [197, 577])
def test_shared_maps_in_bfloat16(tokens):
    qkv, mix = make(3, 12, tokens, tokens, 32, 3, torch.bfloat16)
    check_shared(qkv, mix, torch.bfloat16)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 12, 197, 197, 32, 3), (1, 6, 99, 50, 64, 5), (1, 17, 40, 40, 32, 3)])
def test_real_sizes(shape, dtype):
    qkv, mix = make(*shape, dtype)
    check(qkv, mix)


@on_gpu
def test_tensor_cores_in_float32(monkeypatch):
    monkeypatch.setitem(TOLERANCE, torch.float32, 1e-3)
    torch.set_float32_matmul_precision("high")
    try:
        qkv, mix = make(2, 12, 197, 197, 32, 3, torch.float32)
        check(qkv, mix)
    finally:
        torch.set_float32_matmul_precision("highest")


@on_gpu
def test_same_bits_twice_at_real_size():
    (q, k, v), mix = make(16, 12, 197, 197, 32, 3, torch.bfloat16)
    grad = torch.randn_like(q)
    results = []
    for _ in range(2):
        out = refined_attention_triton(q, k, v, mix.fold())
        results.append([out, *torch.autograd.grad(out, [q, k, v, mix.local], grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
