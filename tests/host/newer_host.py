"""Give a copy of ComfyUI 0.33.0 what versions after it ask of a VAE, as far as their files could be read.

    python tests/host/newer_host.py CHECKOUT COPY

No whole ComfyUI after 0.33.0 could be had for the tests. Read were sd.py and nodes.py at 033046cc (after 0.38), 0.38's
model_patcher.py at 08d0e510 and model_prefetch.py at 03fb330a, model_management.py at 02b2b388, progress.py at
1b71f275, and vae2_2.py at 32671a67. Each change here refuses a checkout that it does not fit.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

#: The version that the copy says it is.
VERSION = "0.38.1"
#: Folders of a checkout that hold a user's own files.
USERS = (".git", "models", "input", "output", "temp", "user")
#: Optional here, so that prompts from before it run; the real one may want it.
CHOICE = ('"optional": {"encode_as": (["Auto", "Video Frames", "Individual Images"], {"default": "Auto", '
          '"advanced": True})}')
TOLD = 'not_video={"Individual Images": True, "Video Frames": False}.get(encode_as)'

#: Of a state dict newer hosts ask where its tensors lie, to read them again rather than hold them in memory.
STORAGE = '''
def state_dict_fast_disk(state_dict):
    parts = state_dict if isinstance(state_dict, (list, tuple)) else [state_dict]
    for value in (value for part in parts for value in part.values()):
        if hasattr(value, "untyped_storage"):
            getattr(value.untyped_storage(), "_comfy_source_path", None)
    return False
'''
#: Counts what the recording of allocations would not see; recording itself needs a GPU.
PREFETCH = '''

PAUSED = 0


class _Paused:
    def __init__(self, sync=False):
        pass

    def __enter__(self):
        global PAUSED
        PAUSED += 1

    def __exit__(self, *_):
        global PAUSED
        PAUSED -= 1


def pause_malloc_graph(sync=False):
    return _Paused(sync)
'''
#: A node's progress has a word for what the node does, with a number of steps or without.
ACTIVITY = '''    def set_activity(self, node_id, activity):
        entry = self.ensure_entry(node_id)
        if entry.get("activity") != activity:
            entry["activity"] = activity
            self.update_progress(node_id, entry["value"], entry["max"])

'''
#: Qwen-Image 2.1 (after 0.38): the layout of Wan 2.2's VAE with kernels of one frame and without patches.
QWEN = '''                wan22 = "decoder.upsamples.0.upsamples.0.residual.2.weight" in sd
                head = sd.get("decoder.head.2.weight")
                if wan22 and head is not None and head.ndim == 5 and head.shape[2] == 1:
                    self.latent_channels, self.output_channels = 64, head.shape[0]
                    self.upscale_ratio = self.downscale_ratio = 16
                    self.pad_channel_value = 1.0
                    self.first_stage_model = comfy.ldm.wan.vae2_2.WanVAE(
                        dim=sd["encoder.conv1.weight"].shape[0], dec_dim=sd["decoder.head.0.gamma"].shape[0], z_dim=64,
                        dim_mult=[1, 2, 4, 8, 8], num_res_blocks=2, attn_scales=[],
                        temperal_downsample=[False, True, True, True], image_channels=self.output_channels,
                        patch_size=1, temporal_kernel=1)
                    self.working_dtypes = [torch.bfloat16, torch.float16, torch.float32]
                elif wan22:  # Wan 2.2 VAE
'''
#: What that class has of its own in vae2_2.py: what to replace, by what, and how often it stands there.
QWEN_NETWORK = (
    ("CausalConv3d(in_dim, out_dim, 3, padding=1)", "_conv(in_dim, out_dim)", 1),
    ("CausalConv3d(out_dim, out_dim, 3, padding=1)", "_conv(out_dim, out_dim)", 1),
    ("CausalConv3d(12, dims[0], 3, padding=1)", "_conv(ENDS, dims[0])", 1),
    ("CausalConv3d(out_dim, z_dim, 3, padding=1)", "_conv(out_dim, z_dim)", 1),
    ("CausalConv3d(z_dim, dims[0], 3, padding=1)", "_conv(z_dim, dims[0])", 1),
    ("CausalConv3d(out_dim, 12, 3, padding=1)", "_conv(out_dim, ENDS)", 1),
    ("(3, 1, 1), padding=(1, 0, 0)", "(TAPS, 1, 1), padding=(TAPS // 2, 0, 0)", 1),
    ("(3, 1, 1), stride", "(TAPS, 1, 1), stride", 1),
    ("class Resample(", "TAPS, ENDS = 3, 12  # of the network that is being made\n\n\ndef _conv(inputs, outputs):\n"
     "    return CausalConv3d(inputs, outputs, (TAPS, 3, 3), padding=(TAPS // 2, 1, 1))\n\n\nclass Resample(", 1),
    ("def patchify(x, patch_size):\n", "def patchify(x, patch_size):\n    if patch_size == 1:\n        return x\n", 1),
    ("def unpatchify(x, patch_size):\n",
     "def unpatchify(x, patch_size):\n    if patch_size == 1:\n        return x\n", 1),
    ("feat_idx, first_chunk)\n            else:\n                x = layer(x)\n",
     "feat_idx, first_chunk)\n            else:\n                x = layer(x, first_chunk=first_chunk)\n", 1),
)  # fmt: skip
#: The same of the class WanVAE in it.
QWEN_CLASS = (
    ("        dropout=0.0,\n    ):\n        super().__init__()\n",
     "        dropout=0.0,\n        image_channels=3,\n        patch_size=2,\n        temporal_kernel=3,\n    ):\n"
     "        super().__init__()\n        global TAPS, ENDS\n"
     "        TAPS, self.patch_size = temporal_kernel, patch_size\n"
     "        ENDS = image_channels * patch_size * patch_size\n", 1),
    ("patch_size=2)", "patch_size=self.patch_size)", 2),
    ("    def encode(self, x):\n", "    def encode(self, x):\n        if x.ndim == 4:\n"
     "            x = patchify(x.unsqueeze(2), patch_size=self.patch_size)\n"
     "            return self.conv1(self.encoder(x)).chunk(2, dim=1)[0].squeeze(2)\n", 1),
    ("    def decode(self, z):\n", "    def decode(self, z):\n        if z.ndim == 4:\n"
     "            x = self.decoder(self.conv2(z.unsqueeze(2)), first_chunk=True)\n"
     "            return unpatchify(x, patch_size=self.patch_size).squeeze(2)\n", 1),
)  # fmt: skip


def changed(text: str, changes: tuple[tuple[str, str, int], ...]) -> str:
    """Return `text` with each (old, new, how often) replaced. Raises ValueError where one does not fit."""
    for old, new, times in changes:
        if text.count(old) != times:
            raise ValueError(f"{old!r} stands there {text.count(old)} times, not {times}")
        text = text.replace(old, new)
    return text


def edit(path: Path, *changes: tuple[str, str, int], added: str = "") -> None:
    try:
        text = changed(path.read_text("utf-8"), changes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    path.write_text(text + added, "utf-8")


def make(checkout: Path, copy: Path) -> Path:
    """Make `copy` of a checkout of 0.33.0, newer than it; return it."""
    def left_out(folder: str, names: list[str]) -> set[str]:
        return {"__pycache__", *(USERS if Path(folder) == checkout else ())} & set(names)

    shutil.copytree(checkout, copy, ignore=left_out)
    pictures_or_a_clip(copy)
    fast_disk(copy)
    edit(copy / "comfy/model_management.py",
         ("def pin_memory(tensor):", "def pin_memory(tensor, evict_active=True):", 1))
    edit(copy / "comfy/model_prefetch.py", added=PREFETCH)
    activity(copy)
    qwen_image(copy)
    (copy / "comfyui_version.py").write_text(f'__version__ = "{VERSION}"\n', "utf-8")
    return copy


def pictures_or_a_clip(copy: Path) -> None:
    """VAE Encode and its tiled twin ask what several images are, and always tell the VAE."""
    path = copy / "nodes.py"
    edit(path,
         ('"pixels": ("IMAGE", ), "vae": ("VAE", )}}', f'"pixels": ("IMAGE", ), "vae": ("VAE", )}}, {CHOICE}}}', 1),
         ("    def encode(self, vae, pixels):\n        t = vae.encode(pixels)",
          f'    def encode(self, vae, pixels, encode_as="Auto"):\n        t = vae.encode(pixels, {TOLD})', 1),
         ("pixels, tile_size, overlap, temporal_size=64, temporal_overlap=8):",
          'pixels, tile_size, overlap, temporal_size=64, temporal_overlap=8, encode_as="Auto"):', 1),
         ('tile_t=temporal_size, overlap_t=temporal_overlap)\n        return ({"samples": t}, )',
          f'tile_t=temporal_size, overlap_t=temporal_overlap, {TOLD})\n        return ({{"samples": t}}, )', 1))
    text = path.read_text("utf-8")
    (inputs,) = re.finditer(r"class VAEEncodeTiled:.*?\n +\}(?=\}\n)", text, re.DOTALL)
    path.write_text(f"{text[:inputs.end()]}, {CHOICE}{text[inputs.end():]}", "utf-8")
    edit(copy / "comfy/sd.py",
         ("    def encode(self, pixel_samples):\n", "    def encode(self, pixel_samples, not_video=None):\n", 1),
         ("tile_t=None, overlap_t=None):\n        self.throw_exception_if_invalid()\n        pixel_samples",
          "tile_t=None, overlap_t=None, not_video=None):\n        self.throw_exception_if_invalid()\n"
          "        pixel_samples", 1),
         ("if not self.not_video:", "if not (self.not_video if not_video is None else not_video):", 2))


def fast_disk(copy: Path) -> None:
    """A patcher knows whether its weights can be read again from their file."""
    (copy / "comfy/storage.py").write_text(STORAGE.lstrip(), "utf-8")
    edit(copy / "comfy/sd.py",
         ("import comfy.pixel_space_convert\n", "import comfy.pixel_space_convert\nimport comfy.storage\n", 1),
         ("dtype=None, metadata=None):\n        is_seedvr2_vae",
          "dtype=None, metadata=None):\n        fast_disk = comfy.storage.state_dict_fast_disk(sd)\n"
          "        is_seedvr2_vae", 1),
         ("self.patcher = mp(self.first_stage_model, load_device=self.device, offload_device=offload_device)",
          "self.patcher = mp(self.first_stage_model, load_device=self.device, offload_device=offload_device, "
          "fast_disk=fast_disk)", 1))
    edit(copy / "comfy/model_patcher.py",
         ("size=0, weight_inplace_update=False):", "size=0, weight_inplace_update=False, fast_disk=False):", 3),
         ("        self.size = size\n        self.model = model\n",
          "        self.size = size\n        self.model = model\n        self.fast_disk = fast_disk\n", 1),
         ("super().__init__(model, load_device, offload_device, size, weight_inplace_update)",
          "super().__init__(model, load_device, offload_device, size, weight_inplace_update, fast_disk)", 1),
         ("weight_inplace_update=self.weight_inplace_update)",
          "weight_inplace_update=self.weight_inplace_update, fast_disk=self.fast_disk)", 1))


def activity(copy: Path) -> None:
    """Progress says what a node does, as long as that is known."""
    shown = '"real_node_id": self.registry.dynprompt.get_real_node_id(node_id),\n            }'
    edit(copy / "comfy_execution/progress.py",
         (shown, shown + ' | ({"activity": state["activity"]} if state.get("activity") else {})', 1),
         ("    def finish_progress(", ACTIVITY + "    def finish_progress(", 1))


def qwen_image(copy: Path) -> None:
    """The host's own VAE of Qwen-Image 2.1. The real class is told its kernels; here it sets them for what it makes."""
    path = copy / "comfy/ldm/wan/vae2_2.py"
    before, name, after = path.read_text("utf-8").partition("class WanVAE(")
    path.write_text(changed(before, QWEN_NETWORK) + name + changed(after, QWEN_CLASS), "utf-8")
    found = '                if "decoder.upsamples.0.upsamples.0.residual.2.weight" in sd:  # Wan 2.2 VAE\n'
    edit(copy / "comfy/sd.py", (found, QWEN, 1))


if __name__ == "__main__":
    print("made", make(*map(Path, sys.argv[1:])))
