"""A state of weights in shards (FSDP2, two gloo processes) is the state of the whole, and continues as that."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from vitrefine.train.muon import Muon
from vitrefine.train.state import Progress, State


class Accelerator:
    """The little that a state needs of Accelerate's, which takes FSDP2 on GPUs only."""

    scaler = None
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.num_processes = dist.get_world_size() if dist.is_initialized() else 1


def make(kind: str, sharded: bool) -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).double()
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        for part in model:
            if isinstance(part, nn.Linear):
                fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    decayed, rest = [[p for p in model.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr_scale": 0.5}]
    optimizer = (Muon if kind == "muon" else torch.optim.AdamW)(groups, lr=1e-2)
    schedule = CosineLRScheduler(optimizer, t_initial=10, t_in_epochs=False)
    return State(Accelerator(), model, optimizer, schedule, None, torch.zeros(2), Progress())


def go(state: State, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        state.progress.step += 1
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(state.progress.step))
        loss = state.model(x).square().mean()
        loss.backward()
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.schedule.step_update(state.progress.step)
        losses.append(loss.item())
    return losses


def both(kind: str, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    state = make(kind, sharded=True)
    state.restore(torch.load(f"{folder}/alone", weights_only=True))
    losses = go(state, 3)
    snapshot = state.snapshot()
    if rank == 0:
        torch.save(snapshot, f"{folder}/both")
        torch.save(losses, f"{folder}/losses")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "rtol"), [("adamw", 1e-12), ("muon", 2e-3)]
)  # Muon iterates in bfloat16, of three digits
def test_alone_then_sharded_then_alone(kind, rtol, tmp_path):
    state = make(kind, sharded=False)
    go(state, 3)
    torch.save(state.snapshot(), tmp_path / "alone")
    expected = go(state, 6)
    # Processes that run this file: one that multiprocessing made would have to import it, which is in no package.
    commands = [[sys.executable, __file__, kind, str(rank), str(tmp_path)] for rank in range(2)]
    processes = [subprocess.Popen(command) for command in commands]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    again = make(kind, sharded=False)
    saved = torch.load(tmp_path / "both", weights_only=True)
    assert len(saved["generators"]) == 2
    again.restore(saved)
    assert again.progress.step == 6
    losses = [*torch.load(tmp_path / "losses", weights_only=True), *go(again, 3)]
    torch.testing.assert_close(losses, expected, rtol=rtol, atol=0)


if __name__ == "__main__":
    both(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    os._exit(0)  # gloo's threads, which weights in shards keep alive, may abort a Python that shuts down
