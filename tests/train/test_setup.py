"""What a run is made ready with."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from vitrefine.surgery.create import create
from vitrefine.train.recipe import load_recipe
from vitrefine.train.setup import _leaves_parameters_out, is_compiled, is_graphed, numerics


@pytest.mark.parametrize(
    ("device", "processes", "settings", "compiled", "graphed"),
    [
        ("cuda", 1, [], True, True),
        ("cuda", 2, [], True, False),
        ("cuda", 1, ["accumulate=2"], True, False),
        ("cuda", 1, ["compile=true"], True, False),
        ("cuda", 1, ["compile=false"], False, False),
        ("cpu", 1, [], False, False),
        ("cpu", 1, ["compile=true"], True, False),
    ],
)
def test_graphs_where_one_gpu_makes_one_step_an_update(device, processes, settings, compiled, graphed):
    recipe = load_recipe("cifar", settings)
    accelerator = SimpleNamespace(device=torch.device(device), num_processes=processes)
    assert (is_compiled(recipe, accelerator.device), is_graphed(recipe, accelerator)) == (compiled, graphed)


def test_no_graphs_in_other_threads():
    accelerator = SimpleNamespace(device=torch.device("cuda"), num_processes=1)
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(is_graphed, load_recipe("cifar"), accelerator).result()


def test_settings_of_pytorch_are_put_back():
    torch.set_deterministic_debug_mode("warn")
    try:
        with numerics(load_recipe("cifar", ["deterministic=true"]), SimpleNamespace(mixed_precision="bf16")):
            assert (torch.get_deterministic_debug_mode(), torch.get_float32_matmul_precision()) == (2, "high")
        assert (torch.get_deterministic_debug_mode(), torch.get_float32_matmul_precision()) == (1, "highest")
    finally:
        torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize(("modification", "some_idle"), [("", False), ("+refiner", False), ("+refiner(share=1)", True)])
def test_parameters_without_a_part_in_the_output_are_found(modification, some_idle):
    model = create(f"eva02_base_patch14_448(img_size=32,patch_size=8,depth=2,embed_dim=24,num_heads=3){modification}")
    assert _leaves_parameters_out(model, SimpleNamespace(size=(32, 32)), 3) == some_idle
