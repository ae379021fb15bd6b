"""Padding: what a model gives for real tokens does not depend on how many others fill the batch up."""

import threading
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    ElectraConfig,
    ElectraModel,
    RobertaConfig,
    RobertaModel,
    ViltConfig,
    ViltModel,
)

from vitrefine.errors import UserError
from vitrefine.surgery.graft import strip
from vitrefine.surgery.operate import apply
from vitrefine.surgery.padding import NotesPadding, Padding, hide_padded_queries, real_queries, real_tokens

LENGTH = 9
TEXT = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
FAMILIES: dict[str, tuple[type[nn.Module], type]] = {
    "bert": (BertModel, BertConfig),
    "roberta": (RobertaModel, RobertaConfig),
    "electra": (ElectraModel, ElectraConfig),
}
SPECS = [
    "cb(layers=all)",
    "cb(layers=all,position=front)",
    "cb(layers=all,position=mid)",
    "cb(layers=all,block=both)",
    "cb_s",
    "cb_gate(layers=all)",
    "cb_hybrid(layers=all)",
    "se(reduction=4)",
    "refiner",
    "refiner(constraint='row+col')",
    "refiner(share=1)",
    "dla",
    "uniform_head",
    "uniform_head(mode=append)",
    "uniform_head(mode=widen)+refiner+cb_s+se(reduction=4)",
]


def stir(model: nn.Module) -> nn.Module:
    """Double precision, and weights far enough from their start for everything to act."""
    torch.manual_seed(1)
    model.double().eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


def text_model(family: str = "bert", kind: str = "sdpa", spec: str = "") -> Any:
    torch.manual_seed(0)
    model_class, config_class = FAMILIES[family]
    model = model_class(config_class(**TEXT, attn_implementation=kind))
    if spec:
        apply(model, spec)
    return stir(model)


def padded(model: Any, extra: int, *, left: bool = False) -> Tensor:
    """What a model gives for the real tokens of texts with so many other tokens after or before them."""
    random = torch.Generator().manual_seed(2)
    tokens = torch.randint(5, 50, (2, LENGTH), generator=random)
    others = torch.randint(5, 50, (2, extra), generator=random)
    order = slice(None, None, -1 if left else 1)
    inputs = {
        "input_ids": torch.cat([tokens, others][order], dim=1),
        "attention_mask": torch.cat([torch.ones_like(tokens), torch.zeros_like(others)][order], dim=1),
        "position_ids": torch.cat([torch.arange(LENGTH), torch.full((extra,), 30)][order]).expand(2, -1),
    }
    last = model(**inputs).last_hidden_state
    return last[:, extra:] if left else last[:, :LENGTH]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_padding_changes_nothing(kind: str, spec: str) -> None:
    model = text_model("bert", kind, spec)
    expected = padded(model, 0)
    for extra in (1, 4):
        torch.testing.assert_close(padded(model, extra), expected, rtol=0, atol=1e-12)
        if "gate" not in spec and "hybrid" not in spec:  # for these the first token has to be the class token
            torch.testing.assert_close(padded(model, extra, left=True), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("spec", ["cb(layers=all)", "cb_s", "refiner", "uniform_head"])
@pytest.mark.parametrize("family", ["roberta", "electra"])
def test_padding_changes_nothing_in_other_families(family: str, spec: str) -> None:
    model = text_model(family, spec=spec)
    torch.testing.assert_close(padded(model, 4), padded(model, 0), rtol=0, atol=1e-12)


def test_without_the_mask_padding_does_change_something() -> None:
    model = text_model(spec="cb(layers=all)")
    for module in model.modules():
        if isinstance(module, NotesPadding):
            module.mask_argument = ("attention_mask", 99)  # it is given by position, and never found now
    assert (padded(model, 4) - padded(model, 0)).abs().max() > 1e-3


@pytest.mark.parametrize("spec", ["cb_s", "se(reduction=4)", "refiner", "uniform_head(mode=widen)"])
def test_vilt_joins_text_and_image(spec: str) -> None:
    """Between text and image there is at least one token of padding: neighbours stay neighbours."""
    torch.manual_seed(0)
    model = ViltModel(ViltConfig(**TEXT, image_size=32, patch_size=8))
    apply(model, spec)
    stir(model)
    random = torch.Generator().manual_seed(2)
    tokens, others = (torch.randint(5, 50, (2, n), generator=random) for n in (LENGTH, 6))
    patches = torch.randn(2, 16, 32, dtype=torch.float64, generator=random)
    patch_mask = torch.tensor([[1] * 16, [1] * 12 + [0] * 4])
    results = []
    for extra in (1, 6):
        output = model(
            input_ids=torch.cat([tokens, others[:, :extra]], dim=1),
            attention_mask=torch.cat([torch.ones_like(tokens), torch.zeros_like(others[:, :extra])], dim=1),
            image_embeds=patches if extra == 1 else patches + (1 - patch_mask)[..., None],
            pixel_mask=patch_mask,
        ).last_hidden_state
        text, image = output[:, :LENGTH], output[:, LENGTH + extra :]
        results.append(torch.cat([text[0], image[0], text[1], image[1, :12]]))
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def test_images_of_different_sizes_in_one_batch() -> None:
    """timm's NaFlexVit pads its patches, and tells its blocks by `attn_mask`."""
    torch.manual_seed(0)
    model = timm.create_model("naflexvit_base_patch16_gap", embed_dim=32, depth=2, num_heads=4, num_classes=5)
    apply(model, "cb(layers=all)")
    stir(model)
    random = torch.Generator().manual_seed(2)
    patches = torch.randn(1, 8, 16 * 16 * 3, dtype=torch.float64, generator=random)
    coordinates = torch.tensor([[[i, j] for i in range(2) for j in range(4)]])
    valid = torch.ones(1, 8, dtype=torch.bool)
    expected = model({"patches": patches, "patch_coord": coordinates, "patch_valid": valid})
    filled = {
        "patches": torch.cat([patches, torch.randn(1, 3, 768, dtype=torch.float64, generator=random)], dim=1),
        "patch_coord": torch.cat([coordinates, torch.zeros(1, 3, 2, dtype=torch.long)], dim=1),
        "patch_valid": torch.cat([valid, torch.zeros(1, 3, dtype=torch.bool)], dim=1),
    }
    torch.testing.assert_close(model(filled), expected, rtol=0, atol=1e-12)


def test_nothing_is_left_behind() -> None:
    model = text_model(spec="cb(layers=all)+se(reduction=4)")
    layers = [module for module in model.modules() if isinstance(module, NotesPadding)]
    assert len(layers) == 3  # one for both modifications
    padded(model, 4)
    assert all(layer.noted_padding.real is None for layer in layers)
    with pytest.raises(RuntimeError):
        layers[0](torch.randn(1, 3, 5, dtype=torch.float64), torch.ones(1, 3))
    assert layers[0].noted_padding.real is None
    strip(model)
    assert not any(isinstance(module, NotesPadding) for module in model.modules())


def test_threads_know_of_their_own_padding() -> None:
    model = text_model(spec="cb(layers=all)")
    expected = padded(model, 4)
    other = threading.Thread(target=padded, args=(model, 4), kwargs={"left": True})
    met, finished = threading.Event(), threading.Event()

    def meet_in_the_first_layer(*args: Any) -> None:
        if threading.current_thread() is other:
            met.set()
            finished.wait(60)
        else:
            other.start()
            met.wait(60)

    model.encoder.layer[0].attention.register_forward_hook(meet_in_the_first_layer)
    output = padded(model, 4)
    finished.set()
    other.join()
    torch.testing.assert_close(output, expected, rtol=0, atol=0)


def test_a_mask_is_of_use_to_its_own_tokens_only() -> None:
    padding = Padding()
    padding.real = torch.tensor([[True, True, False]])
    assert padding.mask_for(torch.empty(4, 3, 8)) is padding.real
    assert padding.mask_for(torch.empty(4, 5, 8)) is None
    assert padding.mask_for(torch.empty(4, 3, 8, 8)) is None
    padding.real = torch.ones(2, 3)
    assert padding.mask_for(torch.empty(4, 3, 8)) is None
    assert Padding().mask_for(torch.empty(4, 3, 8)) is None


def test_masks_of_every_form() -> None:
    real = torch.tensor([[True, True, True], [True, False, True]])
    pairs = real[:, None, None, :].expand(2, 4, 3, 3)
    additive = torch.zeros(2, 1, 1, 3).masked_fill(~real[:, None, None, :], -torch.inf)
    for mask in (real, real.long(), real.float(), pairs, pairs[:, :1, :1], pairs[:, 0], additive):
        assert torch.equal(real_tokens(mask), real)
    causal = torch.ones(3, 3).tril().bool()
    assert torch.equal(real_tokens(causal, "attn_mask"), torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(UserError, match="sdpa"):
        real_tokens(object())


def test_padding_has_rows_of_zeros() -> None:
    real = torch.tensor([[True, True, True], [True, False, True]])
    visible = real[:, None, None, :]
    assert torch.equal(real_queries(visible), real[:, None, :, None])
    expected = real[:, None, None, :] & real[:, None, :, None]
    assert torch.equal(hide_padded_queries(visible), expected)
    additive = torch.zeros(2, 1, 1, 3).masked_fill(~visible, -torch.inf)
    assert torch.equal(hide_padded_queries(additive) == 0, expected)
    assert torch.equal(hide_padded_queries(torch.ones(3, 3).tril().bool()), torch.ones(3, 3).tril().bool())
