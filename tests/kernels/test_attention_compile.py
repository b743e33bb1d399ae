"""Our attention kernels compile for sm_90, without a GPU, in every tile that is used, and fit its shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

# the interpreter is chosen when Triton is imported, so the compiler runs in a process of its own
SCRIPT = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from opake_kernels.attention.tiled import TILES
from opake_kernels.attention.tiles import attention_forward_kernel
from opake_kernels.attention.tiles_backward import keys_kernel, queries_kernel

KERNELS = {"forward": attention_forward_kernel, "queries": queries_kernel, "keys": keys_kernel}
FLOATS = {"STAT": "*fp32", "DELTA": "*fp32", "SINKS": "*fp32", "scale": "fp32", "softcap": "fp32"}
OPTIONS = json.loads(sys.argv[1])
for (name, size, wide), tile in TILES.items():
    kernel, entry = KERNELS[name], "*fp32" if wide else "*bf16"
    fixed = {"D": size, "DV": size, "BD": size, "BV": size, "GROUP": 2, "PRECISE": wide}
    fixed |= {"BM": tile.queries, "BN": tile.keys, **OPTIONS}
    if name == "forward":
        fixed["HAS_SINKS"] = True
    if not OPTIONS["MASK"]:
        fixed["M"] = None
    signature = {}
    for argument in kernel.arg_names:
        number = re.fullmatch(r"T|S|ahead|window|heads|batch|[a-z]+_[a-z]", argument)
        signature[argument] = FLOATS.get(argument, "i32" if number else "*i1" if argument == "M" else entry)
        if argument in fixed:
            signature[argument] = "constexpr"
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    made = triton.compile(ASTSource(kernel, signature, fixed), target=GPUTarget("cuda", 90, 32), options=options)
    print(json.dumps([name, size, wide, made.metadata.shared]))
"""
FORMS = {
    "causal": {"CAUSAL": True, "WINDOW": False, "SOFTCAP": False, "MASK": 0},
    "everything": {"CAUSAL": True, "WINDOW": True, "SOFTCAP": True, "MASK": 1},
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them")
@pytest.mark.parametrize("form", FORMS)
def test_every_tile_compiles_for_sm_90(form: str) -> None:
    command = [sys.executable, "-c", SCRIPT, json.dumps(FORMS[form])]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(made) == 18
    # 227 KiB a block
    assert all(shared <= 232448 for *_, shared in made), made
