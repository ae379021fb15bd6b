"""Parts that are new to a model: they are not in its checkpoints, and may stand where another part is looked for."""

from typing import Any

from torch import nn


class Newcomer(nn.Module):
    """Keeps its own weights when a checkpoint that is loaded, `strict=True` or not, has none at all for it."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if not any(key.startswith(prefix) for key in state_dict):
            state_dict.update(self.state_dict(prefix=prefix))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def inherit(old: nn.Module, new: nn.Module) -> nn.Module:
    """`new`, with what models may read off the module that it stands in for: its sizes and its switches."""
    for name, value in vars(old).items():
        items = value if isinstance(value, tuple) else (value,)
        plain = all(item is None or isinstance(item, bool | int | float | str) for item in items)
        if plain and not name.startswith("_") and not hasattr(new, name):
            setattr(new, name, value)
    return new
