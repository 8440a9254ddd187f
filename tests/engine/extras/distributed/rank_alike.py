"""Run under torchrun, with two VAE files: what rank 1 has otherwise than rank 0; all print what each call says."""

from __future__ import annotations

import sys

import torch
from zerowaste_vae import InputError, load
from zerowaste_vae.engine.execution import core
from zerowaste_vae.engine.extras.distributed.ranks import joined


def main(path, other):
    torch.set_num_threads(1)
    core.why_off = lambda *_: "off"
    with joined() as ranks:
        vae, odd = load(path, device="cpu"), ranks.rank == 1
        z, video = torch.ones(1, 16, 5, 1, 2), torch.full((1, 17, 8, 16, 3), 0.5)
        calls = {
            "latent": lambda: vae.decode(z.index_fill(2, torch.tensor([4]), float(odd)), devices=ranks),
            "stream's latent": lambda: list(vae.stream(z * (1 + odd), devices=ranks)),
            "part": lambda: vae.decode(z, start=int(odd), frames=9, devices=ranks),
            "output": lambda: vae.decode(z, output="uint8" if odd else "float32", devices=ranks),
            "VAE": lambda: load(other if odd else path, device="cpu").decode(z, devices=ranks),
            "VAE, mixed": lambda: load(other if odd else path, device="cpu").decode(
                z, devices=ranks, mixed_devices=True),
            "options": lambda: vae.with_options(vae.options.switched(**{"off" if odd else "on": ["tf32"]})).decode(
                z, devices=ranks),
            "video": lambda: vae.encode(video * (1 - 0.5 * odd), devices=ranks),
            "nothing": lambda: vae.encode(video, devices=ranks),
        }  # fmt: skip
        for name, call in calls.items():
            try:
                call()
            except InputError as error:
                print(f"{ranks.rank} {name}: {error}", flush=True)
            else:
                print(f"{ranks.rank} {name}: made", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
