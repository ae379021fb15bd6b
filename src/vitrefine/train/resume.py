"""Whether a folder may be continued: with another model, data, recipe or seed it would be another run."""

from collections.abc import Iterator, Mapping
from typing import Any

from vitrefine.errors import UserError
from vitrefine.train.recipe import Recipe, load_recipe
from vitrefine.train.run import RECIPE, RunInfo

# Settings that leave the run the same one: its images, its updates. (`accumulate` draws augmentation anew.)
FREE = frozenset(
    {
        "accumulate",
        "compile",
        "test_epochs",
        "checkpoint_epochs",
        "checkpoint_steps",
        "keep_checkpoints",
        "log_every",
        "stall_epochs",
        "data.workers",
        "data.test_batch",
        "data.max_broken",
    }
)


def check_same(run: RunInfo, asked: Mapping[str, Any], recipe: Recipe) -> None:
    """Refuse to continue a run as another one.

    Args:
        run: The one in the folder.
        asked: What run.json would say of the new one: spec, fingerprint, data, seed, weights.
        recipe: The new one's.
    """
    differing = next(_differences(run, asked, recipe), None)
    if differing:
        raise UserError(f"{run.folder} holds another run: {differing}; use what it had, or another --out")


def _differences(run: RunInfo, asked: Mapping[str, Any], recipe: Recipe) -> Iterator[str]:
    words = {"spec": "its model", "seed": "its seed", "weights": "where it started"}
    for key, word in words.items():
        if run.about.get(key) != asked[key]:
            yield f"{word} is {run.about.get(key)}, not {asked[key]}"
    if run.about["fingerprint"] != asked["fingerprint"]:
        same = " as it was then" if run.data == asked["data"] else ""
        yield f"its data is {run.data}{same}, not {asked['data']}"
    then, now = (deciding(r.model_dump(mode="json")) for r in (load_recipe(run.folder / RECIPE), recipe))
    for key in sorted(then.keys() | now.keys()):
        if then.get(key) != now.get(key):
            yield f"its recipe says {key}={_show(then.get(key))}, not {_show(now.get(key))}"


def deciding(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of a recipe's settings those that decide what is computed, flat: `optim.lr`."""
    return {key: value for key, value in _flat(settings) if key not in FREE}


def _flat(group: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in group.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _show(value: Any) -> str:
    return "null" if value is None else str(value)
