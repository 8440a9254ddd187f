"""Compile what the dispatchers would launch, for a GPU this machine need not have.

Inside `recorded` meta tensors walk the real launch code, so schedules and constants are the shipped ones. `build`
compiles the recorded call and disassembles it with the tools that Triton ships.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from zerowaste_vae.engine.kernels.by_triton import entry_of, swizzled
from zerowaste_vae.engine.kernels.descriptor import Descriptor
from zerowaste_vae.engine.kernels.launching import function, recording, source_of
from zerowaste_vae.engine.kernels.prebuilt.keys import Key, takes, type_of
from zerowaste_vae.engine.kernels.targets import capabilities, triton_version

_TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int8: "i8",
    torch.uint8: "u8", torch.float8_e4m3fn: "fp8e4nv", torch.int32: "i32",
}  # fmt: skip


@contextlib.contextmanager
def recorded(*kernels: str):
    """Record the launches of these kernels, of all without a name, as (Triton's function, arguments, constants)."""
    calls: list[tuple] = []
    with recording(capabilities("recorded", 90, triton_version())) as launched:
        yield calls
    calls += [(function(one.kernel), one.arguments, one.constants) for one in launched
              if not kernels or one.kernel in kernels]  # fmt: skip


def _spell(value, gluon):
    if isinstance(value, Descriptor) and gluon:
        layout = swizzled(value.block_shape, value.base.element_size())
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)},{layout!r}>"
    if isinstance(value, Descriptor):
        return f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>".replace(" ", "")
    if isinstance(value, torch.Tensor):
        return "*" + _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"


def _tool(name: str) -> str:
    root = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return str(root / name)


def compiled(call, sm: int):
    """Return Triton's result for one recorded call on sm_<sm>."""
    kernel, args, kwargs = call
    names = "num_warps", "num_stages", "maxnreg"
    options = {k: kwargs[k] for k in names if k in kwargs}
    constants = {k: v for k, v in kwargs.items() if k not in names}
    names = kernel.arg_names
    signature, attrs = {}, {}
    for i, (name, value) in enumerate(zip(names, args, strict=False)):
        signature[name] = _spell(value, kernel.is_gluon())
        divisible = isinstance(value, int) and value % 16 == 0 and not kernel.params[i].do_not_specialize
        if (isinstance(value, torch.Tensor)) or divisible:
            attrs[(i,)] = [["tt.divisibility", 16]]
    for name in constants:
        signature[name] = "constexpr"
    source = source_of(kernel, signature, constants, attrs)
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def build(call, sm: int) -> dict:
    """Compile one recorded call for sm_<sm>: {sass: opcodes seen, local: bytes, shared: bytes, registers, and whether
    later launches go through the driver}."""
    made = compiled(call, sm)
    numbers = [p for p, a in zip(call[0].params, call[1], strict=False) if type(a) is int]
    entry = entry_of(made, takes(Key("", (), tuple(map(type_of, call[1])))))
    direct = entry is not None and all(p.do_not_specialize for p in numbers)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(made.asm["cubin"])
        # Without its analysis of data flow (-ndf) it takes 0.76 s a kernel; cuobjdump -sass takes 1.07.
        disassemble = [_tool("nvdisasm"), "-c", "-ndf", path]
        sass = subprocess.run(disassemble, capture_output=True, text=True, check=True).stdout
        usage = subprocess.run([_tool("cuobjdump"), "-res-usage", path], capture_output=True, text=True, check=True)
    text = usage.stdout + usage.stderr
    registers, stack = (int(re.search(key + r":(\d+)", text).group(1)) for key in ("REG", "STACK"))
    local = int(re.search(r"LOCAL:(\d+)", text).group(1))
    opcodes = sorted(set(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", sass, re.M)))
    spills = sum(op.split(".")[0] in ("LDL", "STL") for op in opcodes)
    return {"sass": opcodes, "local": max(local, stack) if spills else local, "stack": stack,
            "shared": made.metadata.shared, "registers": registers, "direct": direct}
