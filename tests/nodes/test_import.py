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


def test_import_without_comfyui():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
