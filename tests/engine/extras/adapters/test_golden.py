"""Stand-ins give what the packs' own classes gave, call by call (recorded outputs, fp32, CPU)."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from zerowaste_vae import load
from zerowaste_vae.adapters import SeedVR2VAE, WanVideoVAE

#: Of the recorded output's standard deviation.
BOUND = 3e-5
SCALE = 0.9152
#: Frames of each batch of the upscaler's loops, with the repetitions that it fills them up with, and how many it keeps.
BATCHES = {
    "plain": (([0, 1, 2, 3, 4], 5), ([5, 6, 7, 8, 7], 4)),
    "overlap": (([0, 1, 2, 3, 4], 5), ([3, 4, 5, 6, 7], 5), ([6, 7, 8, 7, 6], 3)),
    "uniform": (([0, 1, 2, 3, 4, 5, 6, 7, 6], 8), ([5, 6, 7, 8, 8, 7, 6, 8, 6], 4)),
    "tiled": ((list(range(9)), 9),),
}
OVERLAP = {"plain": 0, "overlap": 2, "uniform": 3, "tiled": 0}


@pytest.fixture(scope="module")
def recorded(shared):
    folder = shared / "golden" / "other_packs"
    if not folder.is_dir():
        pytest.skip("the outputs of other packs are not in the larger golden set")
    index, read = json.loads((folder / "index.json").read_text(encoding="utf-8"))["files"], {}

    def found(name):
        if name not in read:
            tensors = load_file(folder / index[name]["file"])
            weights = {k.removeprefix("weights."): t.float() for k, t in tensors.items() if k.startswith("weights.")}
            vae = load(weights, device="cpu", norm_groups=index[name]["config"].get("norm_num_groups"))
            read[name] = index[name], tensors, vae
        return read[name]

    return found


def close(ours, wanted):
    finite = wanted.isfinite()  # where tiles of theirs leave a gap they divide by 0
    assert ours.shape == wanted.shape
    assert torch.equal(ours.isfinite(), finite)
    assert (ours - wanted)[finite].abs().max() <= BOUND * wanted[finite].std()


def given(tensors, name):
    """Return a case's input, such as "x[:, :, :9]"."""
    key, _, part = name.partition("[")
    x = tensors[key].float()
    return eval(f"x[{part}", {"x": x}) if part else x


@pytest.mark.parametrize("name", ["wan21", "wan21_light", "wan22"])
def test_wan_video(recorded, name):
    index, tensors, vae = recorded(name)
    like = SimpleNamespace(mean=torch.tensor(index["like"]["mean"]), inv_std=torch.tensor(index["like"]["inv_std"]))
    theirs = WanVideoVAE(vae, like, tiles="theirs")
    assert (theirs.z_dim, theirs.upsampling_factor) == (index["like"]["z_dim"], index["like"]["upsampling_factor"])
    for case in index["cases"]:
        x, args = given(tensors, case["input"]), {k: tuple(v) if isinstance(v, list) else v
                                                  for k, v in case["args"].items()}  # fmt: skip
        if case["case"].startswith("decode"):
            ours = torch.stack(theirs.decode(x, "cpu", **args))
        else:
            torch.manual_seed(5)  # of encode_sample
            ours = theirs.encode(x, "cpu", **args)
        close(ours, tensors[case["output"]])


def test_seedvr2(recorded):
    index, tensors, vae = recorded("seedvr2")
    theirs = SeedVR2VAE(vae, tiles="theirs")
    for case in index["cases"]:
        x, args = given(tensors, case["input"]), case["args"]
        if case["case"].startswith("decode"):
            ours = theirs.decode(x, **args).sample
        else:
            ours = theirs.encode(x, **args)
            ours = ours.posterior.logvar if case["case"].endswith("logvar") else ours.latent
        close(ours, tensors[case["output"]])


@pytest.mark.parametrize("loop", BATCHES)
def test_batches_of_the_upscaler(recorded, loop):
    """Its loops around the VAE: clips of their own, blended where they overlap."""
    _, tensors, vae = recorded("seedvr2_batches")
    theirs = SeedVR2VAE(vae, tiles="theirs")
    tiles = {"tiled": True, "tile_size": (24, 24), "tile_overlap": (8, 8)} if loop == "tiled" else {}
    video, end, shared = None, 0, OVERLAP[loop]
    for i, (frames, kept) in enumerate(BATCHES[loop]):
        clip = 2 * tensors["images"][frames].float().permute(3, 0, 1, 2)[None] - 1
        latent = theirs.encode(clip, **tiles).latent * SCALE
        close(latent[0].movedim(0, -1), tensors[f"out.{loop}_latent{i}"])
        made = theirs.decode(latent / SCALE, **tiles).sample[0].movedim(0, -1)[:kept]
        if video is None:
            video, end = torch.empty(9, *made.shape[1:]), len(made)
            video[:end] = made
            continue
        rise = torch.linspace(0, 1, shared).view(-1, 1, 1, 1) if shared else torch.empty(0, 1, 1, 1)
        rise = 0.5 - 0.5 * torch.cos(torch.pi * rise) if shared >= 3 else rise
        video[end - shared : end] = video[end - shared : end] * (1 - rise) + made[:shared] * rise
        video[end : end + len(made) - shared] = made[shared:]
        end += len(made) - shared
    close(video, tensors[f"out.{loop}_raw"])
    if loop == "overlap":
        close((0.5 * video + 0.5).clamp(0, 1), tensors["out.overlap_final"])
