"""A draft by the tiny decoder of a VAE's latents, and the film of all frames while a decode runs, beside a host that is
not there."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae.engine import InputError, load, log
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import by_name
from zerowaste_vae.engine.planning.budget import Machine

from ..engine.families.small import SMALL

LATENT = torch.randn(1, 16, 3, 4, 6, generator=torch.Generator().manual_seed(0))


def loaded(folders, family: str, name: str):
    """A small VAE of this family, from a file of this name."""
    path = folders.base / "vae" / name
    made = random_checkpoint(SMALL[family], architecture=by_name(family))
    save_file(made.tensors, path, {"norm_num_groups": "4"})
    return folders.pack.conversion.from_file(path, "fp32", None, folders.pack.settings.Settings(), name)


@pytest.fixture
def vae(folders):
    """A small VAE of Wan 2.1."""
    return loaded(folders, "wan2.1", "wan.safetensors")


@pytest.fixture
def said(monkeypatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(log, "once", lambda text, say=None: lines.append(text))
    return lines


def decoded(pack, vae, latent: torch.Tensor = LATENT, **widgets):
    """(frames, report in its history) of our Decode."""
    out = pack.decode.Decode.execute({"samples": latent}, vae, **widgets)
    return out.args[0], out.ui["zerowaste"][0]


def test_a_draft_is_the_tiny_decoders_decode(folders, vae):
    path = folders.write("taew2_1.safetensors", "video")
    frames, report = decoded(folders.pack, vae, draft=True)
    assert torch.equal(frames, load(path, device="cpu").decode(LATENT)[0])
    full, usual = decoded(folders.pack, vae)
    assert full.shape == frames.shape == (9, 32, 48, 3) and not torch.equal(full, frames)
    assert "draft by taew2_1.safetensors (TAEHV): the VAE itself did not run" in report["text"]
    facts, before = report["plan_facts"], usual["plan_facts"]
    assert facts["draft"] == "TAEHV" and "draft" not in before and "draft" not in usual["text"]
    assert facts["compare_off"] == "the last run was a draft"
    assert facts["model"] == before["model"] == "wan.safetensors"  # of which the next run's plan is


@pytest.mark.parametrize(("family", "name", "kind", "tiny", "shape"), [
    ("flux", "ae.safetensors", "pictures16", "taef1_decoder", (2, 16, 4, 6)),
    ("flux2", "vae.safetensors", "packed", "taef2_decoder", (1, 128, 2, 3)),
    ("svd", "svd.safetensors", "pictures", "taesd_decoder", (3, 4, 4, 6)),  # a batch is a clip
    ("wan2.1", "qwen_image_vae.safetensors", "video", "lighttaew2_1", (1, 16, 4, 6)),  # one picture
    ("minimaxh3", "h3.safetensors", "video24", "taeh3", (1, 24, 7, 2, 3)),  # 22 frames
])  # fmt: skip
def test_drafts_have_the_shape_of_the_vaes_own_decode(folders, family, name, kind, tiny, shape):
    folders.write(f"{tiny}.safetensors", kind)
    own, latent = loaded(folders, family, name), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    full, _ = decoded(folders.pack, own, latent)
    draft, report = decoded(folders.pack, own, latent, draft=True)
    assert draft.shape == full.shape and draft.std() > 0.01
    assert f"draft by {tiny}.safetensors" in report["text"]


def test_padding_of_a_clip_that_is_a_batch_is_cropped_off(folders):
    folders.write("taesd_decoder.safetensors", "pictures")
    own, z = loaded(folders, "svd", "svd.safetensors"), torch.randn(3, 4, 4, 6)
    samples = {"samples": z, folders.pack.frames.CLIP_SIZE: (3, 28, 44)}
    for draft in (False, True):
        out = folders.pack.decode.Decode.execute(samples, own, draft=draft)
        assert out.args[0].shape == (3, 28, 44, 3) and "cropped to 3 frames of 44x28" in out.args[1]


def test_a_draft_of_pictures_with_alpha_says_that_it_has_none(folders, monkeypatch):
    folders.write("taew2_1.safetensors", "video")
    monkeypatch.setitem(SMALL, "wan2.1", replace(SMALL["wan2.1"], encoder_colours=4, decoder_colours=4))
    own, picture = loaded(folders, "wan2.1", "qwen_image_layered_vae.safetensors"), LATENT[:, :, :1]
    (full, usual), (draft, report) = (decoded(folders.pack, own, picture, draft=on) for on in (False, True))
    assert full.shape[-1] == 4 and draft.shape == (*full.shape[:-1], 3)
    assert ["no transparency" in one["text"] for one in (usual, report)] == [False, True]


def test_without_a_file_no_other_vae_decodes(folders, vae, monkeypatch):
    folders.write("taehv.safetensors", "video")  # of the same layout, and HunyuanVideo's
    monkeypatch.setattr(type(vae), "run_decode", lambda *_, **__: pytest.fail("a VAE runs"))
    with pytest.raises(InputError) as error:
        decoded(folders.pack, vae, draft=True)
    assert str(error.value) == ("No draft: put taew2_1.safetensors into models/vae_approx (a tiny decoder of Wan 2.1's "
                                "latents); switch Draft off for the VAE itself")  # fmt: skip


def test_a_vae_of_the_hosts_own_code_has_no_draft(folders):
    stranger = folders.pack.comfy.sd.VAE(sd={"network": torch.nn.Identity()})
    with pytest.raises(InputError, match="No draft: ComfyUI's own code runs this VAE"):
        decoded(folders.pack, stranger, draft=True)


def test_a_tiny_vae_decodes_as_ever(folders):
    path = folders.write("taew2_1.safetensors", "video")
    own = folders.pack.conversion.from_file(path, "auto", None, folders.pack.settings.Settings(), path.name)
    (draft, report), (usual, _) = decoded(folders.pack, own, draft=True), decoded(folders.pack, own)
    assert torch.equal(draft, usual) and "draft" not in report["plan_facts"]


def test_the_decoder_is_kept_until_its_file_changes(folders, vae):
    read, find = folders.pack.drafts._loaded, folders.pack.tiny.find
    path = folders.write("taew2_1.safetensors", "video")
    first = read(find("wan2.1", ""), vae.device)
    assert read(find("wan2.1", ""), vae.device) is first
    tensors = first.source().tensors
    save_file({name: 2 * t for name, t in tensors.items() if name.startswith("decoder.")}, path)
    assert read(find("wan2.1", ""), vae.device) is not first


def test_the_plan_of_a_draft(folders, vae):
    pack, here = folders.pack, Machine(torch.device("cpu"), None, 4 << 30)
    wish = {"model": "wan.safetensors", "width": "48", "height": "32", "frames": "9", "precision": "bf16"}

    def planned(**more: str) -> dict:
        question = pack.panel.Question.parse(wish | more)
        return (pack.drafts.planned if question.draft else pack.panel.answer)(question, here)

    with pytest.raises(InputError, match=r"^No draft: put taew2_1\.safetensors"):
        planned(draft="1")
    folders.write("taew2_1.safetensors", "video")
    usual, draft = planned(), planned(draft="1")
    assert draft["draft"] == "TAEHV" and draft["model"] == "wan.safetensors" and "draft" not in usual
    assert draft["fits"] and draft["frames"] == 9 and draft["predicted_gb"] < usual["predicted_gb"]
    assert (usual["precision"], draft["precision"]) == ("bf16", "fp32")
    assert planned(draft="1", vram_gb="0.00001", ram_gb="0.00001")["fits"] is False
    pack.panel.KNOWN.learn("theirs.safetensors", None, None)
    wish["model"] = "theirs.safetensors"
    with pytest.raises(InputError, match=r"^No draft: ComfyUI's own code"):
        planned(draft="1")
    wish["model"] = "nobody knows"
    assert planned(draft="1")["unknown"]


def test_a_plan_knows_no_more_of_a_file_than_the_run(folders, monkeypatch):
    """Older hosts' loaders do not say which file a VAE is from, and two kinds of latents have Flux's layout."""
    pack, here = folders.pack, Machine(torch.device("cpu"), None, 4 << 30)
    loaded(folders, "flux", "ae.safetensors")
    folders.write("taef1_decoder.safetensors", "pictures16")

    def planned(draft: str) -> dict:
        wish = {"model": "ae.safetensors", "width": "48", "height": "32", "frames": "1", "draft": draft}
        return pack.drafts.planned(pack.panel.Question.parse(wish), here)

    assert planned("1")["draft"] == planned("2")["draft"] == "TAESD"
    monkeypatch.setattr(pack.panel.KNOWN, "forgetful", True)
    assert planned("1")["draft"] == "TAESD"
    with pytest.raises(InputError, match=r"No draft: its file is not known, .* Flux\.1 or SD3; switch Draft off"):
        planned("2")


@pytest.fixture
def screen(folders, monkeypatch):
    """Pictures that the host is given, in arrays, with previews on; `shown.goes_on` is what it answers."""
    shown = SimpleNamespace(pictures=[], goes_on=True, enough=threading.Event())

    def show(picture) -> bool:
        shown.pictures.append(np.asarray(picture))
        if len(shown.pictures) >= 9:
            shown.enough.set()
        return shown.goes_on

    drafts = folders.pack.drafts
    monkeypatch.setattr(drafts, "shows_previews", lambda: True)
    monkeypatch.setattr(drafts, "pictures_here", lambda: show)
    monkeypatch.setattr(drafts, "RATE", 1e6)
    run = type(vae_of(folders)).run_decode

    def patient(self, *given, **rest):
        """A decode that ends after the film has gone round once."""
        shown.rest = rest
        shown.enough.wait(20)
        return run(self, *given, **rest)

    monkeypatch.setattr(folders.pack.host.EngineVAE, "run_decode", patient)
    return shown


def vae_of(folders):
    return object.__new__(folders.pack.host.EngineVAE)


def test_all_frames_are_played_while_the_decode_runs(folders, vae, screen, monkeypatch):
    path = folders.write("taew2_1.safetensors", "video")
    monkeypatch.setattr(folders.pack.drafts, "PREVIEW_SIZE", 32)  # half of the latent's pixels
    frames, report = decoded(folders.pack, vae)
    less = LATENT.unflatten(3, (2, 2)).unflatten(5, (3, 2)).mean((4, 6))
    mean = less.mean((2, 3, 4), keepdim=True)
    before, now = (x.std((2, 3, 4), correction=0, keepdim=True) for x in (LATENT, less))
    less = mean + (less - mean) * before / now
    film = load(path, device="cpu").decode(less, output="uint8")[0].numpy()
    assert film.shape == (9, 16, 24, 3)
    assert all(np.abs(a.astype(int) - b).max() <= 1 for a, b in zip(screen.pictures, film, strict=False))
    assert len(screen.pictures) >= 9 and screen.rest == {"pictures": False}
    assert "preview of all frames by taew2_1.safetensors: " in report["text"]
    count = len(screen.pictures)
    usual, _ = decoded(folders.pack, vae)
    assert torch.equal(frames, usual) and count
    assert [t.name for t in threading.enumerate() if t.name == "zerowaste-film"] == []


def test_a_film_of_a_long_clip_keeps_as_many_pictures_as_it_shows(folders, vae, screen, monkeypatch):
    """9 frames of 4 at most: every third."""
    path, drafts = folders.write("taew2_1.safetensors", "video"), folders.pack.drafts
    monkeypatch.setattr(drafts, "MOST", 4)
    decoder, latent = drafts._loaded(folders.pack.tiny.find("wan2.1", ""), vae.device), LATENT
    frames, _ = drafts._every(decoder, latent, folders.pack.settings.Settings(chunk=1), 3)
    assert torch.equal(frames, load(path, device="cpu").decode(latent, output="uint8")[0, ::3])
    assert frames.untyped_storage().nbytes() == frames.nbytes
    decoded(folders.pack, vae)
    assert len({picture.tobytes() for picture in screen.pictures}) == 3


def full(*_: object) -> None:
    raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("fault", ["file", "run", "show"])
def test_a_film_that_fails_is_said_once_and_the_decode_goes_on(folders, vae, screen, said, monkeypatch, fault):
    path, drafts = folders.write("taew2_1.safetensors", "video"), folders.pack.drafts
    expected = vae.engine.decode(LATENT)[0]
    if fault == "file":
        found = folders.pack.tiny.find("wan2.1", "")
        monkeypatch.setattr(folders.pack.tiny, "find", lambda *_: found)
        path.write_bytes(path.read_bytes()[:-40])
    elif fault == "run":
        monkeypatch.setattr(drafts, "_loaded", full)
    else:
        monkeypatch.setattr(drafts, "pictures_here", lambda: lambda picture: 1 / 0)
    screen.enough.set()
    frames, report = decoded(folders.pack, vae)
    assert torch.equal(frames, expected)
    lines = [line for line in said if "no preview of all frames: " in line]
    why = {"file": "taew2_1.safetensors", "run": "out of memory", "show": "division by zero"}[fault]
    assert len(lines) == 1 and why in lines[0] and report["text"].count("no preview of all frames: ") == 1
    assert screen.rest == {"pictures": fault != "show"}  # finished frames are shown then


def test_no_film_where_none_is_wanted_or_possible(folders, vae, screen, said, monkeypatch):
    screen.enough.set()
    decoded(folders.pack, vae)
    assert [line for line in said if "preview" in line] == [
        "decode: no preview of all frames: put taew2_1.safetensors into models/vae_approx (a tiny decoder of Wan 2.1's "
        "latents)"
    ]  # fmt: skip
    folders.write("taew2_1.safetensors", "video")
    monkeypatch.setattr(folders.pack.drafts, "shows_previews", lambda: False)
    _, report = decoded(folders.pack, vae)
    assert screen.pictures == [] and "preview" not in report["text"]


def test_the_stop_button_ends_the_film_and_stays_pressed(pack, monkeypatch):
    """Whoever finds it pressed takes that back."""
    services, mm, pressed = pack.services, pack.comfy.model_management, []

    class Stopped(BaseException):
        pass

    def update(self, value, total=None, preview=None):
        assert (value, total, preview) == (3, 7, ("JPEG", "picture", services.PREVIEW_SIZE))
        if pressed:
            raise Stopped

    mm.InterruptProcessingException, mm.interrupt_current_processing = Stopped, lambda: pressed.append("again")
    monkeypatch.setattr(pack.comfy.utils.ProgressBar, "update_absolute", update)
    assert services.pictures_here() is None
    monkeypatch.setattr(services, "get_executing_context", lambda: SimpleNamespace(node_id="5"))
    monkeypatch.setitem(sys.modules, "server", SimpleNamespace(PromptServer=SimpleNamespace(instance=object())))
    state = SimpleNamespace(nodes={"5": {"value": 3, "max": 7}})
    monkeypatch.setattr(services, "get_progress_state", lambda: state)
    show = services.pictures_here()
    assert show("picture") and not pressed
    pressed.append("once")
    assert not show("picture") and pressed == ["once", "again"]
