"""From a kernel's key to the PTX that ships: Triton's own passes up to its LLVM code or PTX, without a GPU.

Set C is lowered for sm_120 (bulk copies, mma.sync) and its LLVM code then turned into PTX for sm_90, which every
driver compiles for sm_90 and later.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TRITON_DISABLE_LINE_INFO", "1")

import triton
from triton._C.libtriton import ir, llvm
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST as ELEMENTS
from triton.compiler import make_backend
from zerowaste_vae.engine import families  # noqa: F401  their operators are known once they are imported
from zerowaste_vae.engine.kernels.launching import function, source_of
from zerowaste_vae.engine.kernels.prebuilt.keys import Key, aligned, takes

#: The Triton that sets are made with.
VERSION = "3.6.0"


#: Products of fp8 that are summed in fp16 need it, whatever the form: r570 is the first driver to read it.
FAST_FP8 = "8.7"


class Form(NamedTuple):
    """sm: what Triton lowers for. target, version: what the PTX says, and drivers must read."""

    sm: int
    target: str
    version: str


FORMS = {
    "A": Form(80, "sm_80", "8.5"),
    "C": Form(120, "sm_90", "8.5"),
    "B": Form(89, "sm_89", "8.5"),
    "D": Form(120, "sm_120a", "8.7"),
}


#: Set -> the compute capabilities whose ptxas has to take its kernels.
CARDS = {"A": (80, 86, 89, 120), "B": (89, 120), "C": (90, 120), "D": (120,)}
#: Those of them that are asked while kernels are built.
ASKED = {"A": (86, 120), "B": (89, 120), "C": (120,), "D": (120,)}


class Lowered(NamedTuple):
    """ptx: text. shared: bytes. warps. maps: (swizzle, element type, element bytes, box) of each tensor map, as
    cuTensorMapEncodeTiled takes them; Triton's own number for bf16 is another."""

    ptx: str
    shared: int
    warps: int
    maps: tuple[tuple[int, int, int, tuple[int, ...]], ...]


class Assembled(NamedTuple):
    """The result of ptxas: a thread's registers and the bytes that it spills (stored and loaded), or why it refused."""

    registers: int
    spilled: int
    refused: str = ""


class LoweringError(Exception):
    """A kernel cannot be shipped; the text says why."""


def lowered(key: Key, name: str) -> Lowered:
    """Compile one kernel for a set, "A" to "D". Raises LoweringError."""
    form, made, meta = FORMS[name], {}, {}
    try:
        for stage, module, known in _stages(key, form):
            made[stage], meta = module, known
    except Exception as error:  # whatever Triton raises
        raise LoweringError(f"{type(error).__name__}: {str(error)[:300]}") from error
    text = _for_sm_90(str(made["llir"])) if name == "C" else str(made["ptx"])
    found = re.search(r"\.visible \.entry (\w+)\((.*?)\)", text, re.S)
    if found is None or found[1] != key.kernel.rpartition(".")[2]:
        raise LoweringError(f"its entry is {found and found[1]}")
    if _taken(found[2]) != takes(key):
        raise LoweringError(f"it takes {_taken(found[2])}")
    if meta["global_scratch_size"] or meta["profile_scratch_size"] or meta["num_ctas"] != 1:
        raise LoweringError("it needs scratch memory or clusters")
    maps = tuple((m["swizzle"], ELEMENTS[m["elem_type"]], m["elem_size"], tuple(m["block_size"]))
                 for m in meta.get("tensordesc_meta") or ())  # fmt: skip
    return Lowered(_unspilled(_plain(text, form), name, meta["num_warps"]), meta["shared"], meta["num_warps"], maps)


def source(key: Key, name: str) -> str:
    """Return a digest of all that a kernel's PTX follows from: its source with what that calls, and how it is lowered.
    It costs nothing, where `code` takes part of a compilation."""
    made = VERSION, FORMS[name], str(key), function(key.kernel).cache_key, Path(__file__).read_text(encoding="utf-8")
    return sha256(repr(made).encode()).hexdigest()


def code(key: Key, name: str) -> str:
    """Return a digest of a kernel's code as Triton first has it, where names of variables and comments do not count."""
    _, module, _ = next(_stages(key, FORMS[name]))
    return sha256(module.str_nodebug().encode()).hexdigest()[:16]


def _stages(key: Key, form: Form) -> Iterator[tuple[str, object, dict]]:
    """Each of Triton's stages up to PTX: its name, what it made, and what is known of the kernel by then."""
    kernel, constants = function(key.kernel), dict(key.constants)
    asked = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    names = [name for name in kernel.arg_names if name not in constants]
    spelt = [f"tensordesc<{one[4:]}>" if one.startswith("map:") else one for one in key.types]
    signature = {**dict(zip(names, spelt, strict=True)), **dict.fromkeys(constants, "constexpr")}
    attributes = {(kernel.arg_names.index(names[i]),): [["tt.divisibility", 16]] for i in aligned(key)}
    source, target = source_of(kernel, signature, constants, attributes), GPUTarget("cuda", form.sm, 32)
    backend = make_backend(target)
    options = backend.parse_options({**asked, "ptx_version": int(form.version.replace(".", ""))})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    stages: dict = {}
    backend.add_stages(stages, options, source.language)
    meta = {"target": target, **options.__dict__}
    last = "llir" if form.target == "sm_90" else "ptx"
    for stage, make in stages.items():
        module = make(module, meta)
        yield stage, module, meta
        if stage == last:
            return


def _for_sm_90(code: str) -> str:
    llvm.init_targets()
    text = llvm.translate_to_asm(code, "nvptx64-nvidia-cuda", "sm_90", "+ptx85", ["nvptx-mad-wide-opt"], True, False)
    return re.sub(r"\.target sm_\w+", ".target sm_90", text)


def _taken(parameters: str) -> tuple[str, ...]:
    """Kinds of an entry's parameters, as `takes` names them."""
    kinds = {".u32": "i32", ".f32": "fp32", ".b8": "map"}
    found = []
    for line in filter(None, map(str.strip, parameters.split("\n"))):
        words = line.split()
        kind = next(word for word in words if word in (".u64", *kinds))
        found.append(kinds.get(kind) or ("pointer" if ".ptr" in words else "i64"))
    return (*found[:-2], "scratch", "scratch")


def _plain(text: str, form: Form) -> str:
    """Without comments and empty lines, and with the least version that serves."""
    lines = (line.partition("//")[0].strip() for line in text.splitlines())
    text = "\n".join(line for line in lines if line) + "\n"
    version = FAST_FP8 if ".f16.e4m3.e4m3.f16" in text else form.version
    text = re.sub(r"\.version \d+\.\d+", f".version {version}", text, count=1)
    if f".target {form.target}\n" not in text:
        raise LoweringError(f"its target is {re.search('[.]target .*', text)[0]}, not {form.target}")
    return text


def _unspilled(text: str, name: str, warps: int) -> str:
    """Return a kernel's text with a hint that it may take all registers, where ptxas spills although some are left (so
    that more blocks fit a processor)."""
    hinted = re.sub(r"^(\.reqntid .*)$", rf"\1\n.maxnreg {min(255, 2048 // warps)}", text, count=1, flags=re.M)
    for sm in ASKED[name]:
        usual = assembled(text, sm)
        if usual.spilled and assembled(hinted, sm).spilled < usual.spilled:
            return hinted
    return text


def assembled(text: str, sm: int) -> Assembled:
    """Assemble PTX for a compute capability with the ptxas that Triton brings."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin"
    tool /= "ptxas-blackwell" if sm >= 100 else "ptxas"
    target = f"sm_{sm}a" if ".target sm_120a" in text else f"sm_{sm}"
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text, encoding="utf-8")
        command = [str(tool), "-v", f"--gpu-name={target}", "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return Assembled(0, 0, f"ptxas for {target}: {done.stderr.strip().splitlines()[0]}")
    registers, spills = (map(int, re.findall(word, done.stderr)) for word in (r"Used (\d+) reg", r"(\d+) bytes spill"))
    return Assembled(max(registers, default=0), sum(spills))
