"""Trains in processes of its own, forked from one that has imported everything: real processes that start at once.

Called with a JSON list of stages, done one after the other; prints a JSON list of what became of each. A stage:

    folder, overrides, spec, seed, resume     of the job
    world       processes; 1 if left out
    double      compute in double precision
    kill_at     step at whose line of the log the first process is killed with SIGKILL
    kill_delay  seconds between that line and the kill
    kill_in     "checkpoint": it is killed while it writes the second one
    term_at     step at whose line of the log the last process gets SIGTERM
    file_limit  bytes that a file may have
    limit_at    step from which on that holds; from the start if left out
"""

import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import sklearn.datasets  # noqa: F401  (here, so that no child has to import it)
import torch

from vitrefine.errors import UserError
from vitrefine.train import checkpoint, setup
from vitrefine.train.engine import Job, train
from vitrefine.train.job import Silent
from vitrefine.train.recipe import load_recipe

SPEC = "vit_tiny_patch16_224(img_size=32,patch_size=8,depth=2,embed_dim=24,num_heads=3)"
QUICK = Path(__file__).with_name("quick.yaml")


class Accident(Silent):
    """Does at a step what the stage says."""

    def __init__(self, stage: dict[str, Any], report: Path) -> None:
        self.stage, self.report = stage, report

    def on_note(self, sentence: str) -> None:
        with self.report.open("a") as file:
            file.write(f"{sentence}\n")

    def on_step(self, line: dict[str, Any]) -> None:
        if line["step"] == self.stage.get("kill_at"):
            threading.Timer(self.stage.get("kill_delay", 0), os.kill, (os.getpid(), signal.SIGKILL)).start()
        if line["step"] == self.stage.get("limit_at"):
            limit_files(self.stage["file_limit"])
        if line["step"] == self.stage.get("term_at"):
            os.kill(int(os.environ["LAST_PID"]) if "LAST_PID" in os.environ else os.getpid(), signal.SIGTERM)


def limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def die_while_writing() -> None:
    writing, files = checkpoint._Sink.write, set()

    def write(sink: Any, content: Any) -> int:
        done = writing(sink, content)
        files.add(sink.file.name)
        if len(files) == 2 and sink.file.tell() > 20_000:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    checkpoint._Sink.write = write  # type: ignore[method-assign]


def compute_in_double_precision() -> None:
    build = setup.build_model

    def build_double(*args: Any) -> Any:
        model, started = build(*args)
        model.double().register_forward_pre_hook(lambda module, inputs: (inputs[0].double(),))
        return model, started

    setup.build_model = build_double


def child(stage: dict[str, Any], rank: int, port: int, report: Path) -> None:
    torch.set_num_threads(1)
    world = stage.get("world", 1)
    if world > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if "file_limit" in stage and "limit_at" not in stage:
        limit_files(stage["file_limit"])
    if stage.get("double"):
        compute_in_double_precision()
    if stage.get("kill_in") == "checkpoint":
        die_while_writing()
    recipe = load_recipe(QUICK, stage.get("overrides", []))
    job = Job(
        stage.get("spec", SPEC),
        stage.get("data", "digits"),
        recipe,
        str(QUICK),
        Path(stage["folder"]),
        seed=stage.get("seed", 0),
        resume=stage.get("resume", False),
        weights=stage.get("weights"),
        track=tuple(stage.get("track", ())),
    )
    try:
        train(job, watch=Accident(stage, report))
    except UserError as error:
        report.open("a").write(f"error: {error}\n")
        os._exit(2)
    except SystemExit as stopped:
        os._exit(int(stopped.code or 0))
    except KeyboardInterrupt:
        os._exit(130)
    if world > 1:
        torch.distributed.destroy_process_group()
    os._exit(0)


def run(stage: dict[str, Any]) -> dict[str, Any]:
    report = Path(f"{stage['folder']}.report")
    report.unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids: list[int] = []
    # The last one first, so that the first one knows whom to send a signal to.
    for rank in reversed(range(stage.get("world", 1))):
        pid = os.fork()
        if pid == 0:
            try:
                if pids:
                    os.environ["LAST_PID"] = str(pids[0])
                child(stage, rank, port, report)
            finally:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        pids.append(pid)
    began = time.perf_counter()
    codes = []
    for pid in reversed(pids):
        _, status = os.waitpid(pid, 0)
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1] == -signal.SIGKILL:
            for other in pids:
                if other != pid and len(codes) < len(pids):
                    os.kill(other, signal.SIGKILL)
    said = report.read_text().splitlines() if report.exists() else []
    return {"codes": codes, "said": said, "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    print(json.dumps([run(stage) for stage in json.loads(sys.argv[1])]))
