"""What is shown of a run while it goes: its latest loss, accuracy and speed, in words."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitrefine.train.job import Line


class Figures:
    """The latest of each that lines of the log have told."""

    def __init__(self) -> None:
        self._latest: dict[str, str] = {}

    def learn(self, line: "Line") -> None:
        """From a line of a step, or of an epoch, which need not have been tested."""
        loss = line["loss"] if line["kind"] == "step" else line["train_loss"]
        self._latest |= {"loss": f"loss {loss:.3f}", "speed": f"{line['images_per_s']:,.0f} images/s"}
        if "top1" in line:
            self._latest["accuracy"] = f"test {line['top1']:.2f} %"

    def __str__(self) -> str:
        return "  ".join(self._latest[name] for name in ("loss", "accuracy", "speed") if name in self._latest)
