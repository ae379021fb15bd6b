"""The end of a run: the model, and what it achieves."""

from vitrefine.data.dataset import DataSet
from vitrefine.data.pillow import INTERPOLATION, TEST_CROP_RATIO
from vitrefine.surgery.checkpoint import save
from vitrefine.surgery.create import create
from vitrefine.train.evaluation import Evaluation
from vitrefine.train.job import Result
from vitrefine.train.memory import peak_memory
from vitrefine.train.processes import on_main
from vitrefine.train.run import MODEL, write_result
from vitrefine.train.setup import Setup


def finish(setup: Setup, data: DataSet, tested: Evaluation) -> Result:
    """Write model.safetensors and result.json."""
    job, recipe, progress = setup.job, setup.recipe, setup.state.progress
    weights, memory = setup.state.weights(), peak_memory(setup.accelerator)
    images = progress.timed_updates * recipe.batch
    result = Result(
        top1=tested.top1,
        top5=tested.top5,
        test_loss=tested.loss,
        test_images=len(tested.right),
        images_per_s=round(images / max(progress.training_seconds, 1e-9), 1),
        peak_memory_mib=memory,
        seconds=round(progress.seconds, 3),
        epochs=recipe.epochs,
        params=setup.params,
        macs=setup.macs,
        correct=tested.bitmap,
    )

    def write() -> None:
        model = create(setup.fit.spec)  # unwrapped, and as its spec says: without what is for training only
        model.load_state_dict(weights)
        images = {"input_size": [data.channels, *setup.fit.size], "mean": list(data.mean), "std": list(data.std)}
        # Whatever the model's library does with its images, these were resized and cropped as follows.
        images |= {"crop_pct": recipe.data.crop_ratio or (1.0 if data.size else TEST_CROP_RATIO)}
        images |= {"crop_mode": "center", "interpolation": "bilinear" if data.size else INTERPOLATION}
        save(model, job.folder / MODEL, input_config=images, classes=data.classes)
        write_result(job.folder, result)

    on_main(setup.accelerator, write)
    return result
