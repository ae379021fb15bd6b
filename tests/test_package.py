"""What `import vitrefine` promises: it is light, and timm knows our models after it, whichever came first."""

import subprocess
import sys

import pytest

import vitrefine


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_needs_no_torch():
    assert run("import sys, vitrefine; print('torch' in sys.modules or 'timm' in sys.modules)").strip() == "False"


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


def test_every_public_name_is_there():
    code = "import vitrefine; print(sorted(n for n in vitrefine.__all__ if not callable(getattr(vitrefine, n))))"
    assert run(code).strip() == "[]"


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        vitrefine.nonsense  # noqa: B018
