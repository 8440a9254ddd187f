"""Assemble PTX on the CPU, keep the result, and count the products in it.

`ptxas` is Triton's or the one on the path; where neither is installed the driver's own compiler does it, on a machine
with a GPU. Assembled code is kept by its text, so that a machine that has it measures at once."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from ....kernels.prebuilt.driver import driver
from ...output.writing import replacing
from .text import RatioError, Repeated, repeated

#: Opcodes of what `mma.sync` becomes, the low 12 bits of an instruction: HMMA and IMMA.
_PRODUCTS = {0x23C, 0x237}
#: Bytes of an instruction, on every GPU since 2017.
_INSTRUCTION = 16
#: How far assembled products may be from what they should be, as a share.
_SHARE = 0.01
_TOOLS = "ptxas-blackwell", "ptxas"


@functools.cache
def ptxas() -> str | None:
    """Return the assembler's path: Triton's newest, else the one on the path; None where there is none."""
    found = importlib.util.find_spec("triton")
    for name in _TOOLS if found is not None and found.origin else ():
        own = Path(found.origin).parent / "backends" / "nvidia" / "bin" / (name + ".exe" * (sys.platform == "win32"))
        if own.is_file():
            return str(own)
    return shutil.which("ptxas")


def assembled(text: str, sm: int, device: int = 0, tool: str | None = None) -> bytes:
    """Return the machine code of a PTX text (a cubin).

    Args:
        text: of one kernel.
        sm: compute capability of the GPU that is to run it (90 for 9.0).
        device: whose driver assembles where there is no ptxas, as torch counts.
        tool: path of the assembler (None: that of `ptxas`).

    Raises: RatioError in the assembler's words; PrebuiltError in the driver's.
    """
    tool = tool or ptxas()
    return _by_ptxas(tool, text, sm) if tool else _by_driver(text, device)


def slowed(text: str, factors: Mapping[str, float], sm: int, name: str, folder: Path | None, device: int = 0,
           tool: str | None = None) -> bytes:  # fmt: skip
    """Return the machine code of a text with repeated products, counted; from the folder where it is kept.

    Args:
        text, sm, device, tool: as of `assembled`.
        factors: as of `repeated`.
        name: of the kernel, for errors.
        folder: of code that was made and counted before; None: none.

    Raises: RatioError where products are not as many times as many; and as `assembled`.
    """
    made = sha256(repr((text, sorted(factors.items()))).encode()).hexdigest()[:32]
    place = None if folder is None else folder / f"{made}.sm_{sm}.cubin"
    if place is not None and place.is_file():
        return place.read_bytes()
    more = repeated(text, factors, name)
    if more.before == more.after:
        code = assembled(text, sm, device, tool)
    else:
        plain = slowed(text, dict.fromkeys(factors, 1.0), sm, name, folder, device, tool)
        code = assembled(more.text, sm, device, tool)
        check(name, plain, code, more)
    if place is not None:
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place) as part:
            part.write_bytes(code)
    return code


def _by_ptxas(tool: str, text: str, sm: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text, encoding="ascii")
        done = subprocess.run([tool, f"-arch=sm_{sm}", str(source), "-o", str(made)], capture_output=True, text=True)
        if done.returncode:
            raise RatioError(f"ptxas refuses a kernel: {' '.join((done.stderr or done.stdout).split())[:400]}")
        return made.read_bytes()


def _by_driver(text: str, device: int) -> bytes:
    """Return what the driver's linker makes of a text for a device."""
    here, state, code, size = driver(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
    source = text.encode() + b"\0"
    with here.in_context(device):
        here.call("cuLinkCreate_v2", "the driver's linker", 0, None, None, ctypes.byref(state))
        try:
            here.call("cuLinkAddData_v2", "the driver refuses a kernel", state, 1, source, ctypes.c_size_t(len(source)),
                      b"kernel", 0, None, None)  # fmt: skip
            here.call("cuLinkComplete", "the driver's linker", state, ctypes.byref(code), ctypes.byref(size))
            return ctypes.string_at(code.value or 0, size.value)
        finally:
            here.call("cuLinkDestroy", "the driver's linker", state)


def products(code: bytes) -> int:
    """Return how many tensor-core products are in machine code (a cubin), as written, not as often as they run.

    Raises: RatioError where it is no machine code of such a form.
    """
    if code[:6] != b"\x7fELF\x02\x01":
        raise RatioError("the assembler made no machine code of a known form")
    headers, (size, count) = struct.unpack_from("<Q", code, 0x28)[0], struct.unpack_from("<HH", code, 0x3A)
    found = 0
    for number in range(count):
        _, kind, flags, _, begin, length = struct.unpack_from("<IIQQQQ", code, headers + number * size)
        if kind == 1 and flags & 4:  # a program's bytes, to be run
            words = struct.unpack_from(f"<{length // 8}Q", code, begin)[:: _INSTRUCTION // 8]
            found += sum(word & 0xFFF in _PRODUCTS for word in words)
    return found


def check(name: str, plain: bytes, code: bytes, made: Repeated) -> None:
    """Raise RatioError unless the assembled products of a repeated text are as many more as the text's are.

    Args:
        name: of the kernel.
        plain, code: machine code of the text as it is, and repeated.
        made: the text.
    """
    there, held = products(code), products(plain)
    before, after = sum(made.before.values()), sum(made.after.values())
    # As many as the text has, or, where the assembler unrolls a loop, as many times more as the text has.
    wanted = {after, held * after / before if before else 0}
    if not any(abs(there - count) <= _SHARE * count for count in wanted) or bool(before) != bool(held):
        raise RatioError(f"{name}: its machine code holds {there} products and should hold {max(wanted):.0f} "
                         f"({held} before, {after} for {before} in the text): its time would say nothing")  # fmt: skip
