"""Compiles our Triton kernel for two GPUs that need not be here; one line for each. Run by test_gpu_kernels.py."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from autoplan.strategies.techniques.loss_kernels_gpu import _compiled_row_kernel

numbers: dict[str, Any] = {"stride": "i32", "vocabulary": "i32", "width": "i32", "ignored": "i32", "BLOCK": "constexpr"}
for dtype in ("*bf16", "*fp32"):
    for capability in (80, 90):
        signature = {"logits": dtype, "classes": "*i64", "losses": "*fp32"} | numbers
        source = ASTSource(_compiled_row_kernel(), signature, constexprs={"BLOCK": 4096})
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
        ptx, wide = compiled.asm["ptx"], "ld.global.v4" if dtype == "*fp32" else "ld.global.v4.b32"
        print(dtype, capability, len(compiled.asm["cubin"]) > 0, "bar.sync" in ptx, wide in ptx)
