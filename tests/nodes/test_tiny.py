"""Whose latents a tiny decoder takes: found by what its file holds, and by names only where layouts are shared."""

from __future__ import annotations


def test_the_file_of_the_latents_own_family(folders):
    """Not one of another layout, nor another VAE's of the same."""
    find = folders.pack.tiny.find
    for name, kind in (("taew2_1.safetensors", "video"), ("taehv.safetensors", "video"), ("any.safetensors", "video48"),
                       ("taef1_decoder.safetensors", "pictures16"), ("taesdxl.safetensors", "pictures")):  # fmt: skip
        folders.write(name, kind)
    (folders.base / "vae" / "taew2_0.safetensors").write_bytes(b"not one")
    found = {family: find(family, "") for family in ("wan2.1", "hunyuanvideo", "wan2.2")}
    assert {family: (one.name, one.title) for family, one in found.items()} == {
        "wan2.1": ("taew2_1.safetensors", "TAEHV"), "hunyuanvideo": ("taehv.safetensors", "TAEHV"),
        "wan2.2": ("any.safetensors", "TAEHV"),
    }  # fmt: skip
    assert find("flux", "ae.safetensors").name == "taef1_decoder.safetensors"
    assert find("sd", "sdxl_vae.safetensors").name == "taesdxl.safetensors"
    # None of those that are here is theirs.
    assert find("flux", "sd3_vae.safetensors") == "put taesd3_decoder.safetensors into models/vae_approx (a tiny " \
        "decoder of SD3's latents)"  # fmt: skip
    for family in ("svd", "minimaxh3", "hunyuanvideo1.5", "flux2"):
        assert find(family, "").startswith("put tae")


def test_a_name_alone_is_nothing(folders):
    """A file that is called like one and holds another network."""
    folders.write("taew2_1.safetensors", "pictures16")
    assert "put taew2_1.safetensors into models/vae_approx" in folders.pack.tiny.find("wan2.1", "")


def test_a_file_in_the_folder_of_vaes_and_one_that_comes_later(folders):
    find = folders.pack.tiny.find
    assert isinstance(find("wan2.1", ""), str)
    folders.write("lighttaew2_1.safetensors", "video", folder="vae")
    assert find("wan2.1", "").path == folders.base / "vae" / "lighttaew2_1.safetensors"


def test_pickled_files_are_named_and_not_opened(folders):
    (folders.base / "vae_approx" / "taesd_decoder.pth").write_bytes(b"")
    assert folders.pack.tiny.find("sd", "sd15.safetensors") == (
        "put taesd_decoder.safetensors into models/vae_approx (taesd_decoder.pth is pickled, and never opened)"
    )
