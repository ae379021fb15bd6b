"""Our models in timm's registry as soon as timm is there, without importing timm (and PyTorch) to wait for it.

`import vitrefine` has to be light, for the command line's help, and yet `timm.create_model("lit_ti")` has to work
after it. So registration happens now if timm was imported before, and right after its import otherwise.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _AfterTimm(MetaPathFinder):
    """Lets timm be imported as usual, then imports our models."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "timm":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenModels(spec.loader)
        return spec


class _ThenModels(Loader):
    def __init__(self, timm: Loader) -> None:
        self.timm = timm

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.timm.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = self.timm
        self.timm.exec_module(module)
        importlib.import_module("vitrefine.models")


def register_with_timm() -> None:
    """Register now, or when timm is imported."""
    if "timm" in sys.modules:
        importlib.import_module("vitrefine.models")
    else:
        sys.meta_path.insert(0, _AfterTimm())
