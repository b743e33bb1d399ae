"""Where Triton cannot be imported (macOS), the package imports and every op takes its plain twin."""

import os
import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = sys.modules["triton.language"] = None
import torch
import opake_kernels
from opake_kernels import launch
assert not launch.HAS_TRITON and not launch.INTERPRET
x, y = torch.randn(2, 3, 8, requires_grad=True), torch.zeros(2, 3, dtype=torch.int64)
loss = opake_kernels.opake_cross_entropy_loss(opake_kernels.opake_swiglu(x, x), y)
loss.backward()
per_example = torch.func.vmap(torch.func.grad(lambda x, y: opake_kernels.opake_cross_entropy_loss(x, y)))
print(float(loss.detach()) > 0, x.grad.shape == x.shape, tuple(per_example(x.detach(), y).shape))
"""


def test_import_and_twins():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True", "(2,", "3,", "8)"]
