"""The pack imports without ComfyUI and pulls in nothing heavy."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, torch
before = set(sys.modules)
import zerowaste_vae
assert callable(zerowaste_vae.comfy_entrypoint)
assert not hasattr(zerowaste_vae, "NODE_CLASS_MAPPINGS")
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(sorted(new & {"triton", "comfy", "folder_paths", "av", "PIL", "matplotlib"}))
"""

# All that nodes/extension.py imports of the pack beside ComfyUI's own modules.
ENGINE = """
import sys, torch
from types import ModuleType
sys.modules["folder_paths"] = ModuleType("folder_paths")
import zerowaste_vae.engine.vae, zerowaste_vae.engine.loader, zerowaste_vae.engine.checkpoints
import zerowaste_vae.nodes.panel, zerowaste_vae.nodes.runs, zerowaste_vae.nodes.files
print(sorted({name.partition(".")[0] for name in sys.modules} & {"triton", "av", "matplotlib", "comfy_kitchen"}))
print(torch.cuda.is_initialized())
"""


def test_import_without_comfyui():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_what_the_host_loads_at_start_compiles_nothing():
    """Neither Triton nor media libraries are imported before a run needs them, and no GPU is touched."""
    run = subprocess.run([sys.executable, "-c", ENGINE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n")[:2] == ["[]", "False"]
