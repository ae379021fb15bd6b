"""Whether kernels run here, and what tests of them share. Decorators need it, so that fixtures would not do."""

import pytest
import torch

from vitrefine.ops.choice import INTERPRETED

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
RUN = ON_GPU or INTERPRETED

on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
runs_kernels = pytest.mark.skipif(not RUN, reason="run by test_in_the_interpreter")
runs_interpreter = pytest.mark.skipif(RUN, reason="the tests below run as they are")


def relative_error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm()).item()
