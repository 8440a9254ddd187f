"""What the pack's VAE plans before the host has moved its weights, on a host that says it has a GPU."""

import os
import subprocess

from zerowaste_vae import demo_vae_path

PLAN = """
import sys
sys.argv = ["main.py", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
import torch
import comfy.model_management as mm
gpu = torch.device("cuda", 0)
mm.vae_device = lambda: gpu
from zerowaste_vae.engine import vae as engine_vae
from zerowaste_vae.nodes import host
from zerowaste_vae.nodes.settings import Settings
asked = []
engine_vae.why_off = lambda name, config, dtype, device: asked.append((dtype, device))
vae = host.from_file(__import__("pathlib").Path(sys.stdin.read()), "auto", None, Settings())
assert (vae.engine.precision, vae.engine.device) == ("fp16", gpu), (vae.engine.precision, vae.engine.device)
assert all(p.device.type == "cpu" for p in vae.engine.model.parameters())
vae.memory_used_decode((1, 16, 2, 8, 8), torch.float16)
assert asked and set(asked) == {(torch.float16, gpu)}, asked
print("planned for", gpu)
"""


def test_plans_are_made_for_the_device_of_the_run(host_places, pack_folder):
    """The weights start offloaded; a plan for the device they lie on would be for other kernels and another size."""
    checkout, venv = host_places
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    paths = os.pathsep.join((str(checkout), str(pack_folder)))
    ran = subprocess.run(
        [python, "-c", PLAN], input=str(demo_vae_path()), text=True, capture_output=True, cwd=checkout,
        env={**os.environ, "PYTHONPATH": paths}, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "planned for cuda:0" in ran.stdout
