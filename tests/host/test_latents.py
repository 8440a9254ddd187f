"""A latent keeps its notes on its way through the nodes, and frames of another range, inside a host."""

import pytest
from running import inside

pytestmark = pytest.mark.host

NODES = """
import folder_paths
import torch
from fractions import Fraction
from pathlib import Path
from comfy_api.latest import InputImpl, Types
from safetensors.torch import save_file
from zerowaste_vae.engine import InputError
from zerowaste_vae.engine.families import by_name, kl, wan
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.nodes.decode import Decode
from zerowaste_vae.nodes.encode import Encode
from zerowaste_vae.nodes.encode import EncodeFromVideo
from zerowaste_vae.nodes.files import DEMO
from zerowaste_vae.nodes.loader import Loader
from zerowaste_vae.nodes.decode import DecodeToVideo

def refused(says, node, *given, **widgets):
    try:
        node.execute(*given, **widgets) if hasattr(node, "execute") else node(*given)
    except InputError as error:
        assert "\\n" not in str(error) and says in str(error), error
        print("refused:", error)
    else:
        raise AssertionError((node, says))

W = (16, 16, 16, 16)
vaes = Path(folder_paths.get_folder_paths("vae")[0])
vaes.mkdir(parents=True)
for file, name, config in ("wan", "wan2.1", wan.Config(W, W)), ("flux", "flux", kl.Config(W, W, norm_groups=4)):
    made = random_checkpoint(config, 0, by_name(name))
    save_file(made.tensors, vaes / f"{file}.safetensors", {k: str(v) for k, v in made.metadata.items()})
demo, wan, flux = (Loader.execute(name)[0] for name in (DEMO, "wan.safetensors", "flux.safetensors"))
clip = torch.rand(6, 16, 16, 3)
video = {"fps": 8.0, "codec": "h264", "crf": 20, "pixels": "yuv420p"}

of_nodes, report = Encode.execute(clip, wan)[:2]
assert "the last one was repeated 3 times" in report, report
of_video = EncodeFromVideo.execute(InputImpl.VideoFromComponents(Types.VideoComponents(clip, Fraction(8))), wan, 0, 0)
assert "the last one was repeated 3 times" in of_video[2], of_video[2]
for latent in (of_nodes, of_video[0], {**of_nodes, "samples": of_nodes["samples"] + 0.1}):
    assert Decode.execute(latent, wan)[0].shape == clip.shape
    for other in (demo, flux):
        refused("The latent was made by wan2.1 (wan", Decode, latent, other)
        refused("connect the VAE that made it", DecodeToVideo, latent, other, **video)
    assert Decode.execute(latent, demo, any_vae=True)[0].shape == clip.shape
    DecodeToVideo.execute(latent, demo, any_vae=True, **video)
    DecodeToVideo.execute(latent, wan, **video)
Decode.execute({"samples": of_nodes["samples"] + 0.1}, demo)  # nothing is known of it

straight = wan.encode(clip[:5])
assert torch.equal(wan.decode(straight), wan.decode(straight.clone()))
refused("this latent was made by wan2.1", demo.decode, straight)

for make in (torch.Tensor.to_sparse, lambda t: t.to("meta")):
    refused("a latent is", Decode, {"samples": make(torch.zeros(1, 16, 1, 2, 2))}, wan)
    refused("a clip is", Encode, make(clip), wan)

for wrong, says in ((255 * clip, "the frames reach 25"), (2 * clip - 1, "below -0.1 and frames are in 0..1")):
    assert says in Encode.execute(wrong, wan)[1]
    given = InputImpl.VideoFromComponents(Types.VideoComponents(wrong, Fraction(8)))
    assert says in EncodeFromVideo.execute(given, wan, 0, 0)[2]
    assert wan.encode(wrong[:5]).isfinite().all()  # as the host's own
    assert says in Encode.execute(wrong[:1], flux)[1]
assert "frames are in 0..1" not in Encode.execute(1.2 * clip - 0.05, wan)[1]
print("all of it")
"""


def test_latents_and_frames_of_the_nodes(host_places, pack_folder, tmp_path):
    (tmp_path / "base").mkdir()
    said = inside(host_places, pack_folder, NODES, "--base-directory", str(tmp_path / "base"))
    assert "all of it" in said
