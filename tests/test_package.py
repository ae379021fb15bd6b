"""What `import vitrefine` promises: timm knows our models after it, and the command line does not wait for PyTorch."""

import os
import subprocess
import sys

import pytest

import vitrefine


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_line_waits_for_torch():
    code = "import sys; sys.argv = ['vitrefine']; import vitrefine.cli; print({'torch', 'timm'} & set(sys.modules))"
    assert run(code).strip() == "set()"


def test_any_layer_can_be_the_first_import():
    """Layers import timm, models import layers: neither may need the other half-made."""
    code = (
        "from vitrefine.layers.context_broadcast import ContextBroadcast; import timm; print(timm.is_model('lit_ti'))"
    )
    assert run(code).strip() == "True"


@pytest.mark.parametrize(
    "imports",
    [
        "import vitrefine, timm",
        "import timm, vitrefine",
        "import vitrefine; from timm.models import create_model; import timm",
    ],
)
def test_timm_creates_our_models(imports):
    code = (
        f"{imports}; import torch; torch.set_default_device('meta'); print(type(timm.create_model('lit_ti')).__name__)"
    )
    assert run(code).strip() == "PyramidTransformer"


def test_timm_creates_our_models_in_a_package_that_is_run(tmp_path):
    """`python -m package.module` imports the package before it knows the module."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("import vitrefine")
    (tmp_path / "package" / "module.py").write_text("import timm; print(timm.is_model('lit_ti'))")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "package.module"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path})
    assert done.stdout == "True\n"


def test_every_public_name_is_there():
    code = "import vitrefine; print(sorted(n for n in vitrefine.__all__ if not callable(getattr(vitrefine, n))))"
    assert run(code).strip() == "[]"


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        vitrefine.nonsense  # noqa: B018
