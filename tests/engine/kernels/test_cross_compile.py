"""Compile every shipped kernel x schedule for GPUs that this machine does not have."""

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="cross-compiling needs Triton")

SHARED_LIMIT = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB a block may use
# Matrix instruction by operand word of the case name.
INSTRUCTION = {
    80: {"float16": "HMMA.16816.F32", "int8": "IMMA.16832"},
    86: {"float16": "HMMA.16816.F32", "float16_fast": "HMMA.16816.F16", "int8": "IMMA.16832"},
    89: {"float16": "HMMA.16816.F32", "float16_fast": "HMMA.16816.F16", "int8": "IMMA.16832",
         "float8_fast": "QMMA.16832.F16.E4M3"},
    90: {"float16": "HGMMA", "float8": "QGMMA", "int8": "IGMMA"},
    100: {"float16": "UTCHMMA", "float8": "UTCQMMA", "int8": ("UTCIMMA", "IMMA.16832")},
    120: {"float16": "HMMA.16816.F32", "float16_fast": "HMMA.16816.F16", "int8": "IMMA.16832",
          "float8": "QMMA.SF.16832.F32.E4M3", "float8_fast": "QMMA.16832.F16.E4M3"},
}  # fmt: skip


@pytest.fixture(scope="module")
def builds(request):
    """Compile for the generations that tests were chosen for, in two processes of their own: here the interpreter
    has taken Triton's place."""
    chosen = {item.callspec.params["sm"] for item in request.session.items if "builds" in item.fixturenames}
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = str(Path(__file__).with_name("compile_cases.py"))

    def compiled(half):  # read as it comes: one whose pipe is full would wait for the other one's end
        command = [sys.executable, script, half, *map(str, sorted(chosen))]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    with ThreadPoolExecutor(2) as pool:
        rows = [row for each in pool.map(compiled, "01") for row in each]
    return {sm: [r for r in rows if r["sm"] == sm] for sm in chosen}


def problems(row, sm):
    name, word = row["case"], row["case"].split()[1]
    if "error" in row:
        return [f"{name}: {row['error']}"]
    found = []

    def expect(condition, what):
        if not condition:
            found.append(f"{name}: {what}; has {row['sass']}")

    # Tiles are for the loop in Gluon: without it they only have to run. One more program on a processor is worth more
    # than the registers that neighbourhood attention and the 8-bit gated product lack then.
    most = 16 if name.startswith(("neighbourhood", "blocks")) else 0
    if sm == 90 and name.startswith(("blocks fp8", "blocks float8")):  # rows, while they become codes
        most = 128
    expect(row["local"] <= most or name.startswith("fallback"), f"{row['local']} bytes of local memory")
    expect(row["direct"], "later launches go by Triton, not through the driver")
    expect(row["shared"] <= SHARED_LIMIT[sm] * 1024, f"{row['shared']} bytes of shared memory")
    opcodes = row["sass"]
    if name.startswith(("conv", "upsample")):
        word = name.split()[2] if name.startswith("upsample") else word
        wanted = INSTRUCTION[sm].get(word)
        if wanted is not None:
            wanted = wanted if isinstance(wanted, tuple) else (wanted,)
            expect(any(op.startswith(w) for op in opcodes for w in wanted), f"expected {wanted}")
        if word.startswith(("float8", "int8")):
            expect(not any(op.startswith(("HMMA", "HGMMA", "UTCHMMA")) for op in opcodes), "operands went to 16 bit")
        # Of sm_120, only what is written in Triton's own language: block-scaled products, and all for Triton 3.5.
        triton = sm in (90, 100) or word.startswith("float8")
        bulk = sm >= 90 and triton and "stride 2" not in name
        expect(any(op.startswith("UTMALDG" if bulk else "LDGSTS") for op in opcodes), "no asynchronous loads")
    multiply = ("attention scores", "attention values", "attention of tokens", "to_pixels columns", "patch_pixels",
                "blocks", "neighbourhood")  # fmt: skip
    if name.startswith(multiply):
        expect(any("MMA" in op and "HFMA" not in op for op in opcodes), "no matrix instruction")
    return found


@pytest.mark.parametrize("sm", SHARED_LIMIT)
def test_instructions_local_and_shared_memory(builds, sm):
    assert len(builds[sm]) >= 20
    found = [line for row in builds[sm] for line in problems(row, sm)]
    assert not found, "\n".join(found)
