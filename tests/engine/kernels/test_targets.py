import subprocess
import sys

import pytest
import torch
from zerowaste_vae.engine import log
from zerowaste_vae.engine.errors import InputError
from zerowaste_vae.engine.kernels import cards, targets
from zerowaste_vae.engine.kernels.operators import Takes
from zerowaste_vae.engine.kernels.prebuilt import library as sets
from zerowaste_vae.engine.kernels.targets import (
    FP8,
    capabilities,
    kernels_for,
    prebuilt,
    projected,
    target,
    using,
    ways,
)
from zerowaste_vae.engine.options import Options
from zerowaste_vae.engine.precision import modes

GPU = torch.device("cuda", 3)


@pytest.mark.parametrize("sm, triton, dtype, fast, expected", [
    (90, (3, 6), FP8, False, "f32"), (90, (3, 6), torch.float16, True, "f32"), (90, (3, 6), torch.int8, False, "i32"),
    (120, (3, 6), FP8, False, "mx"), (120, (3, 5), FP8, False, "f32"), (120, (3, 5), FP8, True, "f16"),
    (120, (3, 6), torch.float16, True, "f16"), (89, (3, 6), FP8, True, "f16"), (89, (3, 6), FP8, False, "f32"),
    (80, (3, 6), torch.float16, True, "f32"), (86, (3, 6), torch.float16, True, "f16"),
])  # fmt: skip
def test_accumulation(sm, triton, dtype, fast, expected):
    assert capabilities("a GPU", sm, triton).accumulate(dtype, fast) == expected


@pytest.mark.parametrize("sm, triton, fp8, word", [
    (120, None, False, "not installed"), (90, (3, 4), False, "older than 3.5"), (75, (3, 6), False, "older than sm_80"),
    (86, (3, 6), False, "no fp8"), (89, (3, 6), True, "bulk tensor"), (120, (3, 5), True, "Triton 3.6"),
])  # fmt: skip
def test_what_is_off_is_explained(sm, triton, fp8, word):
    here = capabilities("a GPU", sm, triton)
    assert any(word in note for note in here.notes)
    assert here.supports(FP8) == fp8
    assert not here.supports(torch.float32)


@pytest.mark.parametrize("form, sm, like, fp8, tma, mx", [
    ("A", 86, 86, False, False, False), ("A", 90, 86, False, False, False), ("B", 89, 89, True, False, False),
    ("C", 120, 120, True, True, False), ("C", 90, 120, True, True, False), ("D", 120, 120, True, True, True),
])  # fmt: skip
def test_a_form_is_the_same_on_every_card(form, sm, like, fp8, tma, mx):
    here = prebuilt("a GPU", sm, form)
    assert (here.set, here.sm, here.capability, here.shared_kib) == (form, like, sm, 99)
    assert (here.fp8, here.tma, here.mxfp8) == (fp8, tma, mx) and here.kernels and here.supports(torch.bfloat16)
    assert here.accumulate(torch.float16, True) == "f16"
    assert here.accumulate(FP8, False) == ("mx" if mx else "f32")


def test_fp16_sums_where_the_card_gains_by_them():
    assert [prebuilt("a GPU", sm, "A").accumulate(torch.float16, True) for sm in (80, 86, 87, 89)] == [
        "f32", "f16", "f32", "f16"]  # fmt: skip


# -- which way runs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch):
    """here(sm, sets, triton) -> a machine with such a GPU, these sets and this Triton."""
    def machine(sm, there="ABCD", triton=(3, 6)):
        library = type("Library", (), {"sets": tuple(there)})
        monkeypatch.setattr(targets, "_off", {})
        monkeypatch.setattr(targets, "_card", lambda _: ("a GPU", sm))
        monkeypatch.setattr(targets, "triton_version", lambda: triton)
        monkeypatch.setattr(sets, "library", library)
        monkeypatch.delenv("ZEROWASTE_KERNELS", raising=False)
        targets._ways.cache_clear()

    yield machine
    targets._ways.cache_clear()


@pytest.mark.parametrize("sm, expected", [
    (75, ["plain"]), (80, ["triton", "A", "plain"]), (86, ["A", "triton", "plain"]), (87, ["A", "triton", "plain"]),
    (89, ["B", "A", "triton", "plain"]), (90, ["triton", "C", "B", "A", "plain"]),
    (100, ["triton", "C", "B", "A", "plain"]), (103, ["triton", "C", "B", "A", "plain"]),
    (110, ["C", "B", "A", "triton", "plain"]), (120, ["D", "C", "B", "A", "triton", "plain"]),
    (121, ["D", "C", "B", "A", "triton", "plain"]), (130, ["C", "B", "A", "triton", "plain"]),
])  # fmt: skip
def test_the_order_on_every_card(here, sm, expected):
    here(sm)
    assert [one.way for one in ways(GPU)] == expected
    assert [one.way for one in projected("a GPU", sm)] == expected


def test_missing_kernels(here):
    """Kernels that are not there are passed over, which is said."""
    here(120, "CBA", None)
    found = ways(GPU)
    assert [one.way for one in found] == ["C", "B", "A", "plain"] and target(GPU) == found[0]
    assert "set D of the prebuilt kernels is not part of this installation" in found[0].passed
    assert found[0].words.startswith("prebuilt kernels, set C (set D of the prebuilt kernels")
    here(86, "", None)
    (plain,) = ways(GPU)
    assert plain.notes == ("set A of the prebuilt kernels is not part of this installation; Triton is not installed",)
    assert plain.words == f"plain torch ({plain.notes[0]})" and not plain.kernels and not plain.supports(torch.float16)


@pytest.mark.parametrize("asked, expected", [
    ("A", ["A", "triton", "C", "B"]), ("B", ["B", "triton", "C", "A"]), ("triton", ["triton", "C", "B", "A"]),
    ("plain", []),
])  # fmt: skip
def test_asked_first(here, monkeypatch, asked, expected):
    """The kernels asked for come first on any card."""
    here(90)
    assert [one.way for one in ways(GPU, asked)] == [*expected, "plain"]
    monkeypatch.setenv("ZEROWASTE_KERNELS", asked.upper())
    assert target(GPU).way == [*expected, "plain"][0]
    assert target(GPU, "C").way == "C"  # nearer than the environment


def test_another_name_is_said_or_refused(here, monkeypatch, caplog):
    here(90)
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setenv("ZEROWASTE_KERNELS", "E")
    assert target(GPU).way == target(GPU).way == "triton"
    (line,) = [record.message for record in caplog.records]
    words = "ZEROWASTE_KERNELS='E' names no kernels: give auto, triton, plain, A, B, C, D"
    assert line.endswith(f"{words}; auto is used")
    with pytest.raises(InputError, match="kernels='E' names no kernels"):
        Options(kernels="E")
    with pytest.raises(InputError, match="write C"):
        Options(kernels="c")


@pytest.mark.parametrize(("text", "found"), [
    ("sm_86", ("sm_86", 86)), ("SM120", ("sm_120", 120)), ("8.9", ("sm_89", 89)),
    ("rtx  5070 Ti", ("rtx 5070 Ti", 120)),
    ("NVIDIA GeForce RTX 4090", ("NVIDIA GeForce RTX 4090", 89)), ("RTX 3060", ("RTX 3060", 86)),
    ("H200", ("H200", 90)),
    ("A100", ("A100", 80)), ("DGX Spark", ("DGX Spark", 121)), ("L40", ("L40", 89)),
])  # fmt: skip
def test_cards_have_the_names_that_people_use(text, found):
    assert cards.find(text, "--card") == found


@pytest.mark.parametrize("text", ["", "Voodoo 2", "RTX", "sm_", "GTX 1080", "9"])
def test_unknown_generation(text):
    """A name that says no generation is refused."""
    with pytest.raises(InputError, match=r"--card .* names no GPU that is known here"):
        cards.find(text, "--card")


def test_what_fails_is_off_on_its_device_alone(here):
    here(86)
    targets.switch_off(GPU, "A", "the driver refuses it")
    assert [one.way for one in ways(GPU)] == ["triton", "plain"]
    assert ways(GPU)[0].words == "Triton's kernels (the driver refuses it)"
    assert ways(torch.device("cuda", 2))[0].way == "A"


def test_operators_inside_run_what_is_chosen(here):
    here(90)
    form = prebuilt("a GPU", 90, "A")
    with using(form):
        assert kernels_for(GPU, "auto") == form and kernels_for(torch.device("meta"), "auto") == form
        assert kernels_for(GPU, "reference") is None
        assert Takes(FP8).why_not(FP8, form).endswith("has no fp8 matrix instruction")
    assert kernels_for(GPU, "auto").way == "triton" and kernels_for(torch.device("meta"), "auto") is None


def test_cpu_runs_the_reference_unless_asked():
    assert kernels_for(torch.device("cpu"), "auto") is None
    assert not target("cpu").kernels and target("cpu").notes
    with pytest.raises(ValueError, match="backend"):
        kernels_for(torch.device("cpu"), "fast")


def test_import():
    """Importing the operators imports no triton."""
    code = ("import sys; import zerowaste_vae.engine.kernels.conv3d, zerowaste_vae.engine.kernels.norm_act, "
            "zerowaste_vae.engine.kernels.upsample, zerowaste_vae.engine.kernels.attention, "
            "zerowaste_vae.engine.kernels.to_pixels, zerowaste_vae.engine.kernels.tokens, "
            "zerowaste_vae.engine.kernels.launching, zerowaste_vae.engine.kernels.prebuilt.launch; "
            "sys.exit('triton' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_second_way(here, monkeypatch):
    """fp8 on RTX 40 where its own set is not there: by Triton, or nowhere."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    here(89, "A")
    assert not target(GPU).fp8 and targets.has_fp8(GPU) and modes.resolve("fp8", GPU, 0.0, None) == modes.Mode("fp8")
    here(89, "A", None)
    assert not targets.has_fp8(GPU)
    made = modes.resolve("fp8", GPU, 0.0, None)
    assert made == modes.Mode("int8", False, "set A of the prebuilt kernels has no fp8 products: int8 runs instead")
    here(86, "A")
    assert not targets.has_fp8(GPU) and not targets.has_fp8(torch.device("cpu"))


@pytest.mark.parametrize(("name", "hip", "why"), [
    ("AMD Radeon RX 7900 XTX [ZLUDA]", None, "ZLUDA runs the torch operators"),
    ("AMD Radeon RX 7900 XTX", "6.2", "AMD GPUs run the torch operators"),
])  # fmt: skip
@pytest.mark.parametrize("asked", ["auto", "A", "triton"])
def test_amd_cards_run_plain_torch(monkeypatch, name, hip, why, asked):
    """ZLUDA's say that they are NVIDIA's of capability 8.8. Nothing else is tried, and one line says why."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 8))
    monkeypatch.setattr(targets, "triton_version", lambda: (3, 6))
    targets._ways.cache_clear()
    (only,), fp8 = targets.ways(torch.device("cuda", 0), asked), targets.has_fp8(torch.device("cuda", 0), asked)
    targets._ways.cache_clear()
    assert not only.kernels and not fp8 and only.notes == (why,) and only.words == f"plain torch ({why})"
