"""Models of Hugging Face and torchvision, small and random: what surgery promises holds for each of them."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torchvision.models import SwinTransformer, VisionTransformer

from vitrefine.errors import UserError
from vitrefine.surgery.graft import strip
from vitrefine.surgery.operate import apply

VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
TEXT = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
}
SWIN = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", VISION),
    "deit": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", VISION),
    "swin": ("SwinForImageClassification", "SwinConfig", SWIN),
    "bert": ("BertForSequenceClassification", "BertConfig", TEXT),
    "roberta": ("RobertaModel", "RobertaConfig", TEXT),
    "electra": ("ElectraModel", "ElectraConfig", {**TEXT, "embedding_size": 16}),
    "vilt": ("ViltModel", "ViltConfig", {**VISION, **TEXT}),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", VISION),
}
TORCHVISION: dict[str, Callable[[], nn.Module]] = {
    "torchvision-vit": lambda: VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=5),
    "torchvision-swin": lambda: SwinTransformer([4, 4], 16, [2, 2], [2, 4], [4, 4], num_classes=5),
}
# transformers computes ViLT's attention in one way only.
MODELS = [
    *(f"{name}-{kind}" for name in HUGGING_FACE for kind in ("sdpa", "eager") if (name, kind) != ("vilt", "sdpa")),
    *TORCHVISION,
]
EQUAL = ["cb_s", "refiner", "dla", "expansion", "talking_heads", "uniform_head(mode=append)"]
DIFFERENT = ["cb", "cb_gate", "cb_hybrid", "uniform_head", "uniform_head(mode=widen)", "se(reduction=2)"]
ALL_AT_ONCE = "uniform_head(mode=widen)+refiner+cb_s+se(reduction=2)"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from more, and where others compute too they lose minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def create(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name in TORCHVISION:
        model = TORCHVISION[name]()
    else:
        family, _, kind = name.partition("-")
        model_class, config_class, options = HUGGING_FACE[family]
        config = getattr(transformers, config_class)(**options, attn_implementation=kind)
        model = getattr(transformers, model_class)(config)
    for parameter in model.parameters():  # libraries start so small that every attention is nearly uniform
        parameter.data += torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.1)
    return model.eval()


def given(name: str) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    random = torch.Generator().manual_seed(1)
    image = torch.randn(2, 3, 32, 32, generator=random)
    if name in TORCHVISION:
        return (image,), {}
    if name.startswith(("vit-", "deit-", "swin-", "clip-")):
        return (), {"pixel_values": image}
    tokens = {"input_ids": torch.randint(2, 50, (2, 9), generator=random)}
    tokens["attention_mask"] = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    if not name.startswith("vilt"):
        return (), tokens
    # As patches, for ViLT itself cuts an image up in an order that it draws at random.
    patches = torch.randn(2, 16, 32, generator=random)
    return (), {**tokens, "image_embeds": patches, "pixel_mask": torch.ones(2, 16, dtype=torch.long)}


def result(output: Any, kwargs: dict[str, Tensor]) -> Tensor:
    """Logits; or the last hidden states of tokens that are no padding, for no model promises anything of padding."""
    if isinstance(output, Tensor):
        return output
    if "logits" in output:
        return output["logits"]
    last = output["last_hidden_state"]
    real = torch.ones(last.shape[:2], dtype=torch.bool)
    if "attention_mask" in kwargs:
        real[:, : kwargs["attention_mask"].shape[1]] = kwargs["attention_mask"].bool()
    return last[real]


def outputs(model: Callable[..., Any], name: str) -> Tensor:
    args, kwargs = given(name)
    return result(model(*args, **kwargs), kwargs)


def error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def stir(model: nn.Module, names: set[str]) -> None:
    """Moves the new parameters off their start, where some have no gradient yet because others are zero."""
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.data += 0.1 * torch.randn_like(parameter)


@pytest.mark.parametrize("spec", EQUAL)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_starts_as_the_original(name: str, spec: str) -> None:
    model = create(name)
    before = outputs(model, name)
    report = apply(model, spec)
    assert report.new_parameters > 0
    assert error(outputs(model, name), before) < 1e-5


@pytest.mark.parametrize("spec", DIFFERENT)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_changes_outputs_at_once(name: str, spec: str) -> None:
    model = create(name)
    before = outputs(model, name)
    apply(model, spec)
    assert error(outputs(model, name), before) > 1e-4


@pytest.mark.parametrize("spec", [*EQUAL, *DIFFERENT])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_every_new_parameter_and_names_stay(name: str, spec: str) -> None:
    model = create(name)
    original = {key: value.clone() for key, value in model.state_dict().items()}
    apply(model, spec)
    new = dict(model.named_parameters()).keys() - original.keys()
    assert bool(new) != (spec in ("cb", "cb_gate", "cb_hybrid", "uniform_head"))
    stir(model, new)
    outputs(model, name).square().sum().backward()
    unreached = [key for key, p in model.named_parameters() if key in new and (p.grad is None or not p.grad.any())]
    assert not unreached
    keys = model.load_state_dict(original, strict=not new)
    assert set(keys.missing_keys) == model.state_dict().keys() - original.keys()
    assert not keys.unexpected_keys


@pytest.mark.parametrize("spec", [*EQUAL, *DIFFERENT, ALL_AT_ONCE])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_copies_and_comes_off(name: str, spec: str) -> None:
    model = create(name)
    before, parts = outputs(model, name), {key: type(module) for key, module in model.named_modules()}
    state = {key: value.clone() for key, value in model.state_dict().items()}
    apply(model, spec)
    stir(model, dict(model.named_parameters()).keys() - state.keys())
    changed = outputs(model, name)
    twin = copy.deepcopy(model)
    strip(model)
    assert torch.equal(outputs(twin, name), changed)
    assert torch.equal(outputs(model, name), before)
    assert {key: type(module) for key, module in model.named_modules()} == parts
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def compiles_and_exports(name: str, spec: str) -> None:
    model = create(name)
    before = set(model.state_dict())
    apply(model, spec)
    stir(model, set(model.state_dict()) - before)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = outputs(model, name)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert error(outputs(compiled, name), expected) < 1e-5
        exported = torch.export.export(model, *given(name)).module()
        assert error(outputs(exported, name), expected) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_compiles_and_exports(name: str) -> None:
    compiles_and_exports(name, ALL_AT_ONCE)


@pytest.mark.full
@pytest.mark.parametrize("spec", [*EQUAL, *DIFFERENT])
@pytest.mark.parametrize("name", MODELS)
def test_compiles_and_exports_each(name: str, spec: str) -> None:
    compiles_and_exports(name, spec)


def test_vilt_itself_can_be_neither_compiled_nor_exported_from_pixels() -> None:
    """The reason is its own: how many patches it keeps depends on the values of a mask."""
    model, (_, inputs) = create("vilt-eager"), given("vilt-eager")
    pixels = {"input_ids": inputs["input_ids"], "pixel_values": torch.randn(2, 3, 32, 32)}
    with pytest.raises(Exception, match="data-dependent"):
        torch.export.export(model, (), pixels)
    apply(model, ALL_AT_ONCE)
    assert model(**pixels).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("name", [name for name in MODELS if name not in TORCHVISION])
def test_activation_checkpointing_changes_no_gradient(name: str) -> None:
    model: Any = create(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout"):
        if hasattr(model.config, key):
            setattr(model.config, key, 0.0)
    apply(model, ALL_AT_ONCE)
    model.train()
    gradients = []
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable()
            assert model.is_gradient_checkpointing
        model.zero_grad()
        torch.manual_seed(3)
        outputs(model, name).square().sum().backward()
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, msg=key)


@pytest.mark.parametrize("name", ["vit-eager", "bert-eager", "clip-eager"])
@torch.no_grad()
def test_the_maps_that_a_model_gives_out_are_the_changed_ones(name: str) -> None:
    model = create(name)
    apply(model, "uniform_head")
    args, kwargs = given(name)
    maps = model(*args, **kwargs, output_attentions=True).attentions
    assert len(maps) == 2
    visible = kwargs.get("attention_mask", torch.ones(2, maps[0].shape[-1]))
    uniform = (visible / visible.sum(dim=1, keepdim=True))[:, None, :].expand_as(maps[0][:, -1])
    torch.testing.assert_close(maps[1][:, -1], uniform)
    assert error(maps[1][:, 0], uniform) > 0.1


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["bert-sdpa", "swin-eager", "torchvision-vit"])
def test_new_parts_have_the_type_of_the_old(name: str, dtype: torch.dtype) -> None:
    model = create(name).to(dtype)
    apply(model, ALL_AT_ONCE)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}


@pytest.mark.parametrize("name", ["vit-sdpa", "bert-sdpa", "clip-sdpa", "torchvision-swin"])
def test_a_model_without_storage_can_be_changed(name: str) -> None:
    real = create(name)
    with torch.device("meta"):
        shadow = create(name)
        reports = [apply(model, ALL_AT_ONCE) for model in (shadow, real)]
    assert reports[0] == reports[1]
    assert all(parameter.is_meta for parameter in shadow.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_autocast(name: str) -> None:
    model = create(name)
    apply(model, ALL_AT_ONCE)
    with torch.autocast("cpu", torch.bfloat16):
        loss = outputs(model, name).float().square().mean()
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


CAUSAL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", TEXT),
    "bert": ("BertLMHeadModel", "BertConfig", {**TEXT, "is_decoder": True}),
}
AFTER = ["cb", "cb_s(block=attention)", "cb_hybrid", "se(reduction=2)", "refiner", "dla", "extra_block"]
BEFORE = ["refiner(kernel_size=1,share=1)", "talking_heads", "uniform_head(mode=widen)", "extra_block(kind=mlp)"]


def causal(name: str) -> nn.Module:
    model_class, config_class, options = CAUSAL[name]
    torch.manual_seed(0)
    return getattr(transformers, model_class)(getattr(transformers, config_class)(**options)).eval()


@pytest.mark.parametrize("spec", AFTER)
@pytest.mark.parametrize("name", CAUSAL)
def test_what_would_show_tokens_those_after_them_is_refused(name: str, spec: str) -> None:
    with pytest.raises(UserError, match="a token sees only those before it"):
        apply(causal(name), spec)


@pytest.mark.parametrize("spec", BEFORE)
@pytest.mark.parametrize("name", CAUSAL)
@torch.no_grad()
def test_tokens_see_none_after_them(name: str, spec: str) -> None:
    model = causal(name)
    apply(model, spec)
    stir(model, {name for name, _ in model.named_parameters()})
    text = torch.arange(9)[None]
    other = text.clone()
    other[0, -1] = 20
    one, two = model(input_ids=text)["logits"], model(input_ids=other)["logits"]
    assert torch.equal(one[:, :-1], two[:, :-1])
    assert not torch.equal(one[:, -1], two[:, -1])


def test_a_model_that_takes_more_than_one_text_says_so() -> None:
    config = transformers.T5Config(d_model=32, num_layers=2, num_heads=2, vocab_size=50, d_ff=64)
    with pytest.raises(UserError, match=r"^T5Model does not run on input_ids alone \(.*; change the part"):
        apply(transformers.T5Model(config), "talking_heads")
