"""Links and other packs bring values past the bounds of widgets, inside a host: a line, and nothing left behind."""

from running import inside

ODD = """
import math
import comfy.sd
import folder_paths
import torch
from pathlib import Path
from zerowaste_vae.engine import InputError
from zerowaste_vae.nodes.decode import Decode
from zerowaste_vae.nodes.encode import Encode
from zerowaste_vae.nodes.encode import EncodeFromVideo
from zerowaste_vae.nodes.files import DEMO
from zerowaste_vae.nodes.loader import Loader
from zerowaste_vae.nodes.save import Save
from zerowaste_vae.nodes.decode import DecodeToVideo

def refused(node, *given, **widgets):
    try:
        node.execute(*given, **widgets)
    except InputError as error:
        assert "\\n" not in str(error)
        print("refused:", error)
    else:
        raise AssertionError((node, widgets))

def video(fps=8.0, **widgets):
    refused(DecodeToVideo, latent, vae, fps=fps, codec="h264", crf=20, pixels="yuv420p", **widgets)

vae = Loader.execute(DEMO)[0]
latent = {"samples": torch.randn(1, 16, 1, 4, 4)}
video(math.nan)
video(math.inf)
for shape, rate in ((0, 2, 9), 8), ((2, 9), 8), ((1, 0, 9), 8), ((1, 2, 9), 0):
    video(audio={"waveform": torch.zeros(shape), "sample_rate": rate})
assert not list(Path(folder_paths.get_temp_directory()).glob("*")), "something was left behind"
for start, frames in ((-1, 0), (0, -1)):
    refused(EncodeFromVideo, None, vae, start, frames)
refused(Decode, latent, vae, output="uint8")
refused(Save, vae, "x", "bogus")

images = torch.rand(1, 16, 16, 3)
coded = [Encode.execute(x, vae)[0]["samples"] for x in (images, images.mul(255).round().byte())]
assert (coded[0] - coded[1]).abs().max() < 0.1 * coded[0].std(), "bytes are 0 to 255"

own = comfy.sd.VAE(sd={"pixel_space_vae": torch.tensor(1.0)})
refused(Decode, {"samples": torch.zeros(0, 3, 8, 8)}, own)
refused(Encode, images[0], own)
refused(Encode, images[:0], own)

vaes = Path(folder_paths.get_folder_paths("vae")[0])
vaes.mkdir(parents=True)
(vaes / "a.safetensors").write_bytes(b"a")
first, linked = Loader.fingerprint_inputs("a.safetensors"), Loader.fingerprint_inputs(precision="auto")
assert linked == Loader.fingerprint_inputs() and Loader.fingerprint_inputs(DEMO)
(vaes / "a.safetensors").write_bytes(b"bc")
assert first != Loader.fingerprint_inputs("a.safetensors") and linked != Loader.fingerprint_inputs()
print("all of it")
"""


def test_what_links_and_other_packs_bring(host_places, pack_folder, tmp_path):
    (tmp_path / "base").mkdir()
    said = inside(host_places, pack_folder, ODD, "--base-directory", str(tmp_path / "base"))
    assert "all of it" in said and said.count("refused:") == 13
