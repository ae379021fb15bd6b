"""What tests of several modifications share."""

from collections.abc import Callable

import pytest
import timm
import torch

from vitrefine.errors import UserError
from vitrefine.surgery.operate import apply


@pytest.fixture(scope="session")
def refused() -> Callable[[str, str, str], None]:
    """Check that one of timm's models refuses a modification for a reason, and stays as it was."""

    def check(base: str, spec: str, reason: str) -> None:
        with torch.device("meta"):
            model = timm.create_model(base)
        before = list(model.state_dict())
        with pytest.raises(UserError, match=reason):
            apply(model, spec)
        assert list(model.state_dict()) == before

    return check
