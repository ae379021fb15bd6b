"""The time that surgery itself takes on a ViT-B: a promise of under a second for each modification.

`python benchmarks/surgery_overhead.py`: `vit_base_patch16_224`, and `swin_base_patch4_window7_224` for those that need
a pyramid. A survey of the model (one forward pass without storage) is most of it. Beside wall time stands processor
time, which a busy machine hardly changes.
"""

import argparse
import csv
import platform
import statistics
import time
from pathlib import Path

import timm
import torch

from vitrefine.errors import UserError
from vitrefine.surgery.graft import strip
from vitrefine.surgery.operate import apply
from vitrefine.surgery.registry import names
from vitrefine.surgery.survey import survey

RESULTS = Path(__file__).parent / "results"
FLAT, PYRAMID = "vit_base_patch16_224", "swin_base_patch4_window7_224"


def seconds(model: torch.nn.Module, modification: str, repeats: int) -> tuple[list[float], list[float], int]:
    """Wall and processor times of each repeat, and the number of places that are changed."""
    walls, processors, changes = [], [], 0
    for _ in range(repeats):
        wall, processor = time.perf_counter(), time.process_time()
        changes = len(apply(model, modification).changes) if modification != "survey" else len(survey(model).visits)
        walls.append(time.perf_counter() - wall)
        processors.append(time.process_time() - processor)
        strip(model)
    return walls, processors, changes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    models = {name: timm.create_model(name) for name in (FLAT, PYRAMID)}
    rows = []
    for modification in ["survey", *names()]:
        name = FLAT
        try:
            walls, processors, changes = seconds(models[name], modification, repeats)
        except UserError:
            name = PYRAMID
            walls, processors, changes = seconds(models[name], modification, repeats)
        row = {
            "modification": modification,
            "model": name,
            "changes": changes,
            "wall_p50_s": f"{statistics.median(walls):.3f}",
            "wall_p90_s": f"{statistics.quantiles(walls, n=10)[-1]:.3f}",
            "processor_p50_s": f"{statistics.median(processors):.3f}",
            "under_one_second": max(walls) < 1,
            "repeats": repeats,
            "processor": f"{platform.machine()}, {torch.get_num_threads()} threads",
            "versions": f"torch {torch.__version__}, timm {timm.__version__}, Python {platform.python_version()}",
        }
        print(", ".join(f"{key} {value}" for key, value in list(row.items())[:7]))
        rows.append(row)
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "surgery_overhead.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
