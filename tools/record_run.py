"""Record what ComfyUI's page shows of a decode on this machine's GPU: the plan's reply and the finished run's report.

    python tools/record_run.py docs/figures/run.json

tools/help_pictures.py draws it where there is no GPU. The decode is that of the workflow "Wan 2.1 - text to video"
under a limit of 13 GB (what `auto` is on a card of 16), of seeded random weights of the published widths; the second of
two runs is recorded. Needs a GPU and the ComfyUI of `pytest tests/host` (COMFYUI_DIR, COMFY_VENV).
"""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.parse
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "host"), str(ROOT / "tools")]

import frame_digests  # noqa: E402
import running  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

FILE, LIMIT = "wan_2.1_vae.safetensors", 13.0
#: Frames, height and width, and the latent's [C, T, h, w].
CLIP, LATENT = (33, 480, 832), (16, 9, 60, 104)
DECODE = {
    "z": {"class_type": "LoadLatent", "inputs": {"latent": "z.latent"}},
    "vae": {"class_type": "ZeroWasteVAELoader", "inputs": {"vae_name": FILE}},
    "decode": {
        "class_type": "ZeroWasteVAEDecode",
        "inputs": {"samples": ["z", 0], "vae": ["vae", 0], "vram_gb": LIMIT},
    },
    "shown": {"class_type": "PreviewAny", "inputs": {"source": ["decode", 1]}},
}


def main() -> int:
    output = Path(sys.argv[1])
    with (
        tempfile.TemporaryDirectory() as folder,
        running.serving(Path(folder), running.newest(), device=()) as comfy,
    ):
        frame_digests.seeded_file("wan2.1", Path(folder)).rename(comfy.base / "models" / "vae" / FILE)
        z = torch.randn(1, *LATENT, generator=torch.Generator().manual_seed(1))
        save_file({"latent_tensor": z, "latent_format_version_0": torch.tensor([])}, comfy.base / "input" / "z.latent")
        report = decoded(comfy)
        frames, height, width = CLIP
        query = {"model": FILE, "width": width, "height": height, "frames": frames, "vram_gb": LIMIT}
        plan = comfy.get(f"/zerowaste_vae/plan?{urllib.parse.urlencode(query)}")
    about = f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__.partition('+')[0]}, {date.today()}"
    record = {"measured": about, "limit": LIMIT, "plan": plan, "report": report}
    output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def decoded(comfy: running.Comfy) -> dict[str, Any]:
    """Run it twice; return the second report. The limit differs by a hair: equal prompts are not run again."""
    for limit in (LIMIT - 0.01, LIMIT):
        DECODE["decode"]["inputs"]["vram_gb"] = limit
        run = comfy.run(DECODE, timeout=240)
        if run.status != "success":
            raise SystemExit(f"{run.status}: {run.error}")
    return run.outputs["decode"]["zerowaste"][0]


if __name__ == "__main__":
    sys.exit(main())
