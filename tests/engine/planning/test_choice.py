"""Choose the kernels of a component: all of one prebuilt set, Triton's, or none, with the reasons."""

import threading
from dataclasses import replace

import pytest
import torch
from zerowaste_vae.engine.families import DEFAULT
from zerowaste_vae.engine.kernels import targets
from zerowaste_vae.engine.kernels.prebuilt import library as sets
from zerowaste_vae.engine.kernels.prebuilt.errors import PrebuiltError
from zerowaste_vae.engine.kernels.probe import op
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning import choice, launches
from zerowaste_vae.engine.planning.choice import Choices, project
from zerowaste_vae.engine.planning.fused_walk import FusedWalk
from zerowaste_vae.engine.precision.modes import Mode

GPU = torch.device("cuda", 3)


class Library:
    """The sets "A" to "C", which lack what a test says: (form, a word of a kernel's key) pairs."""

    sets, lacks, damaged, covered = ("A", "B", "C"), (), False, frozenset()

    def has(self, form, wanted):
        if self.damaged:
            raise sets.SetError("index.json is damaged; install this pack again")
        return not any(form == one and word in str(wanted) for one, word in self.lacks)

    def covers(self, form, use):
        return (form, use) in self.covered

    def identity(self, form):
        return "0" * 12


@pytest.fixture
def machine(monkeypatch):
    """machine(sm, triton) -> choices of the published SeedVR2 on such a GPU; `launched` has the ways of first kernels.
    """
    library, launched = Library(), []
    for module in (sets, launches, choice):
        monkeypatch.setattr(module, "library", lambda: library)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(choice, "_cuda", lambda: None)
    monkeypatch.setattr(targets, "_off", {})
    monkeypatch.setattr(op, "_tried", set())
    monkeypatch.setattr(op, "_run", lambda device, here: launched.append(here.way))
    monkeypatch.delenv("ZEROWASTE_KERNELS", raising=False)

    def make(sm, triton=(3, 6), mode=Mode(), options=DEFAULTS):  # noqa: B008
        monkeypatch.setattr(targets, "_card", lambda _: ("a GPU", sm))
        monkeypatch.setattr(targets, "triton_version", lambda: triton)
        targets._ways.cache_clear()
        walk = FusedWalk(DEFAULT, DEFAULT.published.config, torch.float16, options)
        return Choices(walk, GPU, mode)

    make.library, make.launched = library, launched
    yield make
    targets._ways.cache_clear()


def test_complete_set_runs(machine):
    """A set that has all kernels of a component runs it."""
    choices = machine(86)
    assert choices.of("decoder").way == "A" and choices.lacks("decoder") is None and machine.launched == ["A"]
    assert choices.of("decoder") is choices.of("decoder") and choices.of("decoder").words == "prebuilt kernels, set A"


def test_lacking_half(machine):
    """A half that a set lacks is triton s as a whole."""
    machine.library.lacks = [("A", "to_pixels")]
    choices = machine(86)
    assert (choices.of("decoder").way, choices.of("encoder").way) == ("triton", "A")
    assert choices.of("decoder").words == (
        "Triton's kernels (set A lacks kernels of this model (to_pixels.columns_kernel, to_pixels.gather_kernel))")


def test_no_triton(machine):
    """Without triton plain torch runs that half."""
    machine.library.lacks = [("A", "to_pixels")]
    choices = machine(86, None)
    assert choices.of("encoder").way == "A" and not choices.of("decoder").kernels
    assert choices.lacks("decoder").startswith("set A lacks kernels of this model (to_pixels")
    assert choices.lacks("decoder").endswith("; Triton is not installed")
    assert choices.lacks_any(["encoder"]) is None and choices.lacks_any(["encoder", "decoder"])


def test_missing_8_bit_kernel(machine):
    """An 8 bit kernel that is missing is missed in 8 bit alone."""
    machine.library.lacks = [("A", "*i8")]
    assert machine(86, None).of("decoder").way == "A"
    assert not machine(86, None, Mode("int8")).of("decoder").kernels


@pytest.mark.parametrize("covered", [True, False])
def test_a_driver_that_is_too_old_for_a_use(machine, monkeypatch, covered):
    """A set's kernels in fp8 are in a newer PTX than its others: each use by itself, before anything is loaded, and the
    line names the driver that is needed. Projections do not ask this machine's driver."""
    library = machine.library
    uses = {kind: launches.use_id(DEFAULT, DEFAULT.published.config, "decoder", torch.float16, DEFAULTS, kind, False)
            for kind in (None, "fp8")}  # fmt: skip
    library.covered = {("B", use) for use in uses.values()} if covered else frozenset()
    library.lacks = [("A", "*fp8")]
    library.versions = lambda form: {"8.5", "8.7"} if form == "B" else {"8.5"}
    asked = []

    def version(form, use, wanted):
        asked.append(use)
        assert covered or wanted()
        return "8.7" if use == uses["fp8"] else "8.5"

    library.version = version
    monkeypatch.setattr(choice, "_cuda", lambda: 12060)
    assert machine(89, None).of("decoder").words == "prebuilt kernels, set B"
    eight = machine(89, None, Mode("fp8"))
    assert not eight.of("decoder").kernels and machine.launched == ["B"]
    assert eight.lacks("decoder").startswith(
        "prebuilt kernels for this need NVIDIA's driver 570 or newer (CUDA 12.8), this one has CUDA 12.6; set A la")
    assert asked == [uses[None], uses["fp8"]]
    assert project(eight._walk, "decoder", "a card", 89, Mode("fp8")).way == "B"
    monkeypatch.setattr(choice, "_cuda", lambda: 12040)
    old = machine(89, None).of("decoder")
    assert old.words == ("plain torch (prebuilt kernels for this need NVIDIA's driver 555 or newer (CUDA 12.5), "
                         "this one has CUDA 12.4; Triton is not installed)")  # fmt: skip
    monkeypatch.setattr(choice, "_cuda", lambda: 12080)  # reads all, so that no text is looked into
    asked.clear()
    assert machine(89, None, Mode("fp8")).of("decoder").way == "B" and asked == []


def test_damaged_files_are_a_reason(machine):
    machine.library.damaged = True
    choices = machine(120, None)
    assert "index.json is damaged; install this pack again" in choices.lacks("decoder")


def test_failing_way(machine, caplog):
    """A way that fails makes room for the next one and never runs again."""
    choices = machine(120)
    assert choices.of("decoder").way == "C"
    assert choices.give_up("decoder", PrebuiltError("the driver refuses conv_kernel: too new"))
    assert choices.of("decoder").way == "B"
    reason = "prebuilt kernels (set C) fail here (PrebuiltError: the driver refuses conv_kernel: too new)"
    assert reason in choices.of("decoder").words and reason in caplog.text
    assert machine(120).of("encoder").way == "B"
    for way in ("A", "triton", "plain"):
        assert choices.give_up("decoder", PrebuiltError("no")) and choices.of("decoder").way == way
    assert not choices.give_up("decoder", PrebuiltError("no"))


def test_a_first_kernel_that_fails_is_enough(machine, monkeypatch):
    def run(device, here):
        if here.set:
            raise PrebuiltError("the driver refuses doubling_kernel: too new (CUDA error 222)")

    monkeypatch.setattr(op, "_run", run)
    choices = machine(86)
    assert choices.of("decoder").way == "triton" and "too new" in choices.of("decoder").words


@pytest.mark.parametrize(("asked", "way"), [("auto", "triton"), ("C", "C"), ("A", "A"), ("plain", "plain")])
def test_what_is_asked_for_runs_on_any_card(machine, asked, way):
    choices = machine(90, options=replace(DEFAULTS, kernels=asked))
    assert choices.of("decoder").way == way


def test_what_a_set_was_made_for_is_not_walked(machine, monkeypatch):
    """Other options, types and widths are others."""
    known = launches.use_id(DEFAULT, DEFAULT.published.config, "decoder", torch.float16, DEFAULTS, None, False)
    machine.library.covered = {("A", known)}
    monkeypatch.setattr(choice, "needs", lambda *of: pytest.fail(f"walked {of[2]}"))
    assert machine(86, options=replace(DEFAULTS, cuda_graphs=False)).of("decoder").way == "A"
    for mode, options in ((Mode("int8"), DEFAULTS), (Mode(half_accumulate=True), DEFAULTS),
                          (Mode(), DEFAULTS.switched(off=["composed_upsample"]))):  # fmt: skip
        with pytest.raises(pytest.fail.Exception, match="walked decoder"):
            machine(86, mode=mode, options=options).of("decoder")
    # The Winograd form is written here, and runs beside the direct form's kernels.
    assert machine(86, options=DEFAULTS.switched(on=["winograd"])).of("decoder").way == "A"
    with pytest.raises(pytest.fail.Exception, match="walked encoder"):
        machine(86).of("encoder")


def test_loaded_first(machine, monkeypatch):
    """In a thread beside the packing of weights; what that finds wrong is raised."""
    known = launches.use_id(DEFAULT, DEFAULT.published.config, "decoder", torch.float16, DEFAULTS, None, False)
    begun, loaded = threading.Event(), []

    def preload(*of):
        assert begun.wait(10)
        loaded.append(of)

    monkeypatch.setattr(choice, "preload", preload)
    monkeypatch.setattr(choice, "cores", lambda: 2)
    with machine(86).loading("decoder"):
        assert not loaded
        begun.set()
    assert loaded == [(3, "A", known, 2)]
    with machine(90).loading("decoder"):  # Triton compiles when it launches
        pass
    assert len(loaded) == 1
    monkeypatch.setattr(choice, "preload", lambda *of: "".index("x"))
    with pytest.raises(ValueError), machine(86).loading("encoder"):
        pass


def test_texts_are_read_before_a_run(machine, monkeypatch):
    """Where prebuilt kernels are the first choice; nothing is launched or walked for it."""
    asked = []
    monkeypatch.setattr(choice, "read_ahead", lambda device, form, uses: asked.append((device, form, *uses)))
    monkeypatch.setattr(choice, "needs", lambda *of: pytest.fail(f"walked {of[2]}"))
    uses = [launches.use_id(DEFAULT, DEFAULT.published.config, half, torch.float16, DEFAULTS, "int8", False)
            for half in ("decoder", "encoder")]  # fmt: skip
    machine(120, mode=Mode("int8")).read_ahead(["decoder", "encoder"])
    machine(90, options=replace(DEFAULTS, kernels="A"), mode=Mode("int8")).read_ahead(["encoder"])
    assert asked == [(3, "C", *uses), (3, "A", uses[1])] and machine.launched == []
    machine(90).read_ahead(["decoder"])  # Triton's kernels are compiled when they are launched
    machine(86, options=replace(DEFAULTS, kernels="plain")).read_ahead(["decoder"])
    machine(86, options=DEFAULTS.switched(off=["triton_fusion"])).read_ahead(["decoder"])
    walk = FusedWalk(DEFAULT, DEFAULT.published.config, torch.float16, DEFAULTS)
    Choices(walk, torch.device("cpu"), Mode()).read_ahead(["decoder"])
    assert len(asked) == 2


def test_a_card_that_is_not_here(machine):
    walk = machine(75)._walk
    assert [project(walk, "decoder", "a card", sm, Mode()).way for sm in (75, 86, 89, 90, 120)] == [
        "plain", "A", "B", "triton", "C"]  # fmt: skip
    assert torch.cuda.is_available() and machine.launched == []


def test_a_cpu_has_nothing_to_choose():
    walk = FusedWalk(DEFAULT, DEFAULT.published.config, torch.float16, DEFAULTS)
    choices = Choices(walk, torch.device("cpu"), Mode())
    assert choices.of("decoder") is None and choices.lacks("decoder") is None
