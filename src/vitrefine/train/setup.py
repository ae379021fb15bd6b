"""A run made ready: device, precision, model, optimiser and loaders, built from a job."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import current_thread, main_thread

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, parse_flag_from_env
from timm.utils.model_ema import ModelEmaV3
from torch import nn

from vitrefine.data.dataset import DataSet, Loader, Place
from vitrefine.errors import UserError
from vitrefine.models.cost import measure
from vitrefine.models.meta import meta_copy
from vitrefine.surgery.watch import tensors_in
from vitrefine.train.build import build_model, check_runs, normalise_for
from vitrefine.train.fit import Fit
from vitrefine.train.job import Job
from vitrefine.train.objective import Objective, build_objective
from vitrefine.train.optimizer import build_optimizer
from vitrefine.train.recipe import Recipe
from vitrefine.train.schedule import build_schedule
from vitrefine.train.state import Progress, State

PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}  # as Accelerate calls them


@dataclass
class Setup:
    """What the loop works with."""

    job: Job
    fit: Fit
    state: State
    raw: nn.Module  # the model under whatever wraps it
    optimizer: AcceleratedOptimizer  # the state's, wrapped: it knows how gradients are scaled
    objective: Objective
    train_loader: Loader
    test_loader: Loader
    updates_per_epoch: int
    params: int
    macs: int | None

    @property
    def recipe(self) -> Recipe:
        return self.job.recipe

    @property
    def accelerator(self) -> Accelerator:
        return self.state.accelerator

    @property
    def sharded(self) -> bool:
        """Whether each process has but a part of the weights."""
        return self.accelerator.distributed_type == DistributedType.FSDP

    @property
    def tested(self) -> nn.Module:
        """The model that is tested. Unwrapped where it can be: processes that test need not wait for each other."""
        if self.state.ema is not None:
            return self.state.ema.module
        return self.state.model if self.sharded else self.raw


def start_accelerator(job: Job) -> Accelerator:
    """Accelerate for a job: its device and processes are those that this process was launched with."""
    # Accelerate joins processes without a GPU only if it is told that there is none.
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    device = PartialState(cpu=cpu).device
    precision = job.recipe.precision
    if precision == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        precision = "bf16" if fast else "fp32"
    if precision == "fp16" and device.type != "cuda":
        raise UserError("precision=fp16 needs a GPU; set precision=fp32")
    AcceleratorState._reset_state()  # an earlier run of this process may have had another precision
    return Accelerator(
        cpu=cpu,
        mixed_precision=PRECISIONS[precision],
        log_with=list(job.track) or None,
        project_dir=str(job.folder),
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
    )


@contextmanager
def numerics(recipe: Recipe, accelerator: Accelerator) -> Iterator[None]:
    """PyTorch's settings for a run, put back afterwards."""
    before = torch.get_deterministic_debug_mode(), torch.get_float32_matmul_precision()
    torch.use_deterministic_algorithms(recipe.deterministic)
    if accelerator.mixed_precision != "no":
        torch.set_float32_matmul_precision("high")  # what is left in single precision need not be exact then
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        torch.set_float32_matmul_precision(before[1])


def is_compiled(recipe: Recipe, device: torch.device) -> bool:
    """Whether the model is compiled."""
    return device.type == "cuda" if recipe.compile == "auto" else recipe.compile


def is_graphed(recipe: Recipe, accelerator: Accelerator) -> bool:
    """Whether steps are replayed as CUDA graphs, so that small models need not wait for the host.

    A graph's gradients are overwritten by its next step: they cannot be summed up over several, or be on their way to
    other processes meanwhile. PyTorch keeps them for each thread apart, and makes them in the main one alone.
    """
    alone = accelerator.num_processes == 1 and recipe.accumulate == 1 and current_thread() is main_thread()
    return recipe.compile == "auto" and accelerator.device.type == "cuda" and alone


def build_setup(job: Job, data: DataSet, fit: Fit, accelerator: Accelerator, say: Callable[[str], None]) -> Setup:
    """Build everything that a job needs."""
    recipe, device = job.recipe, accelerator.device
    raw, started = build_model(fit, recipe, job.seed, job.weights)
    if started:
        say(started)
        normalise_for(raw, data)
    params, macs = _cost(raw, fit, data.channels)
    raw.to(device).train()
    objective = build_objective(recipe, raw, len(data.classes), mean=data.mean, std=data.std, device=device).to(device)
    optimizer = build_optimizer(raw, recipe)
    ema = None
    if recipe.model.ema is not None:
        if accelerator.distributed_type == DistributedType.FSDP:
            raise UserError("a running mean of weights that are in shards is not kept; set model.ema=null, or use DDP")
        ema = ModelEmaV3(raw, decay=recipe.model.ema, use_warmup=True)
    if is_compiled(recipe, device):
        raw.compile(mode="reduce-overhead" if is_graphed(recipe, accelerator) else None)
    place = Place(recipe.per_process(accelerator.num_processes), *_seat(accelerator), device, job.seed)
    train_loader = data.train_loader(place, recipe.augment, recipe.data, fit.size)
    updates = len(train_loader) // recipe.accumulate
    schedule = build_schedule(optimizer, recipe, updates)
    if accelerator.ddp_handler is not None and accelerator.num_processes > 1:
        accelerator.ddp_handler.find_unused_parameters = _leaves_parameters_out(raw, fit, data.channels)
    model, wrapped = accelerator.prepare(raw, optimizer)
    state = State(accelerator, model, wrapped.optimizer, schedule, ema, torch.zeros(2, device=device), Progress())
    test_loader = data.test_loader(place, recipe.data, fit.size)
    return Setup(job, fit, state, raw, wrapped, objective, train_loader, test_loader, updates, params, macs)


def _leaves_parameters_out(model: nn.Module, fit: Fit, channels: int) -> bool:
    """Whether some parameters have no part in the output: DDP would wait for their gradients.

    The queries and keys of a block that shares the maps of another are such, and the mask tokens of transformers.
    """
    twin = meta_copy(model).train()
    for shadow, parameter in zip(twin.parameters(), model.parameters(), strict=True):
        shadow.requires_grad_(parameter.requires_grad)
    try:
        output = twin(torch.empty(2, channels, *fit.size, device="meta"))
        torch.stack([tensor.sum() for tensor in tensors_in(output) if tensor.requires_grad]).sum().backward()
    except RuntimeError:  # its path depends on values: DDP has to look for itself
        return True
    return any(parameter.grad is None for parameter in twin.parameters() if parameter.requires_grad)


def _seat(accelerator: Accelerator) -> tuple[int, int]:
    return accelerator.process_index, accelerator.num_processes


def _cost(model: nn.Module, fit: Fit, channels: int) -> tuple[int, int | None]:
    try:
        cost = measure(model, fit.size, channels)
    except Exception as error:  # a few models run on values only
        check_runs(model, fit, channels)
        logging.getLogger(__name__).info("%s", error)
        return sum(parameter.numel() for parameter in model.parameters()), None
    return cost.params, cost.macs
