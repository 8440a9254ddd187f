"""The host's two folders of VAEs, with small tiny decoders as they are published: without their latents' scale."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import save_file
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import by_name, tae, taehv

WIDTHS = (8, 8, 8, 8)
TINY = {
    "video": taehv.Config(None, (8, 8, 8, 16)), "video48": taehv.Config(None, WIDTHS, 48, 2),
    "video24": taehv.Config(None, WIDTHS, 24, 2),
    "pictures": tae.Config(None, WIDTHS), "pictures16": tae.Config(None, WIDTHS, 16),
    "packed": tae.Config(None, WIDTHS, 32, pooled=True),
}  # fmt: skip


class Folders:
    """models/vae and models/vae_approx of a host that is not there."""

    def __init__(self, pack, base: Path) -> None:
        self.pack, self.base = pack, base
        host = pack.files.folder_paths
        for kind in ("vae", "vae_approx"):
            (base / kind).mkdir()
        host.get_folder_paths = lambda kind: [str(base / kind)] if kind != "checkpoints" else []
        host.recursive_search = lambda folder, excluded_dir_names: ([p.name for p in Path(folder).iterdir()], {})
        host.get_full_path_or_raise = self.full
        for kind in ("output", "input", "temp"):
            setattr(host, f"get_{kind}_directory", lambda at=str(base / kind): at)

    def full(self, kind: str, name: str) -> str:
        if not (self.base / kind / name).is_file():
            raise FileNotFoundError(name)
        return str(self.base / kind / name)

    def write(self, name: str, kind: str, folder: str = "vae_approx") -> Path:
        """Write a tiny decoder of one of these kinds."""
        config, path = TINY[kind], self.base / folder / name
        family = by_name("taehv" if isinstance(config, taehv.Config) else "taef2" if config.pooled else "taesd")
        made = random_checkpoint(config, architecture=family).tensors
        save_file({n: t for n, t in made.items() if n not in ("vae_scale", "vae_shift")}, path)
        return path
