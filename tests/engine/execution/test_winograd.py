"""The Winograd form in whole decodes: by the card, where the driver refuses it, where its sums overflow."""

from dataclasses import replace

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine.extras.eight_bit import mixed
from zerowaste_vae.engine.kernels import targets
from zerowaste_vae.engine.kernels.conv3d import Epilogue, Geometry, conv3d
from zerowaste_vae.engine.kernels.conv3d.winograd2d import launch as form
from zerowaste_vae.engine.kernels.prebuilt import launch
from zerowaste_vae.engine.kernels.prebuilt.errors import PrebuiltError
from zerowaste_vae.engine.kernels.targets import capabilities
from zerowaste_vae.engine.options import DEFAULTS, OFF
from zerowaste_vae.engine.planning.choice import Choices

CPU, WIDTHS = torch.device("cpu"), (64, 64, 64, 64)


class Driver:
    """Takes no text (what: "load"), or runs none ("launch")."""

    def __init__(self, what):
        self.what, self.asked = what, []

    def load(self, device, ptx, symbol, shared):
        self.asked.append(symbol)
        if self.what == "load":
            raise PrebuiltError(f"the driver refuses {symbol}: a PTX JIT compilation failed (CUDA error 218)")
        return 7

    def launch(self, *of):
        raise PrebuiltError("a launch of 8 blocks failed: too many resources requested (CUDA error 701)")


@pytest.fixture
def card(monkeypatch):
    """An RTX 50 whose kernels are the references on this CPU."""
    here = replace(capabilities("RTX 5070 Ti", 120, (3, 6)), winograd=True)
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    monkeypatch.setattr(targets, "_winograd_off", {})
    def now(*_):
        return replace(here, winograd_off=targets._winograd_off.get(CPU, ""))

    monkeypatch.setattr(Choices, "of", now)
    for module in ("options", "planning.make"):
        monkeypatch.setattr(f"zerowaste_vae.engine.{module}.target", now)
    return here


@pytest.mark.parametrize("what", ["load", "launch"])
def test_a_driver_that_refuses_it(card, make_vae_file, noise, monkeypatch, caplog, what):
    """Only this form is off, with the reason, said once; what is finished stays, and the direct form runs on."""
    path, z = make_vae_file(WIDTHS, WIDTHS), noise(1, 16, 2, 2, 2)
    direct, vae, other = (load(path, precision="fp16", device="cpu") for _ in range(3))
    for one in (direct, vae, other):  # made before this test's card was there
        one.options = one.options.switched(off=["winograd"])
    expected = direct.decode(z)
    vae.options, other.options = DEFAULTS, DEFAULTS.switched(on=["winograd"])
    driver, reference = Driver(what), conv3d.reference
    monkeypatch.setattr(launch, "driver", lambda: driver)
    monkeypatch.setattr(launch, "_loaded", {})
    monkeypatch.setattr(form, "driver", lambda: driver)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)

    def instead(x, weight, out, *, geometry=Geometry(), epilogue=Epilogue(), start=0, **more):  # noqa: B008
        if weight.tiles:
            return form.launch(x, weight, out, geometry, epilogue, start)
        return reference(x, weight, out, geometry=geometry, epilogue=epilogue, start=start, **more)

    monkeypatch.setattr(conv3d, "reference", instead)
    assert torch.equal(vae.decode(z), expected) and len(driver.asked) == 1
    why = {"load": "a PTX JIT compilation failed", "launch": "too many resources requested"}[what]
    off = dict(vae.last_report.off)
    assert why in off["winograd"] and "newer driver" in off["winograd"] and "triton_fusion" not in off
    assert vae.last_report.kernels == "Triton's kernels"
    assert caplog.text.count("direct convolutions from here on") == 1
    assert torch.equal(other.decode(z), vae.decode(z)) and len(driver.asked) == 1  # never asked again
    assert caplog.text.count("direct convolutions from here on") == 1


def test_sums_of_inputs_that_overflow(card, make_vae_file, noise):
    """Inputs around 30,000 are fp16's, and so is the direct form; sums of four are not, and are computed again."""
    vae, z = load(make_vae_file(WIDTHS, WIDTHS), precision="fp16", device="cpu"), noise(1, 16, 1, 2, 2)
    block = vae.model.decoder.up_blocks[3].resnets[1]
    block.norm2.weight.mul_(1000)
    block.norm2.bias.fill_(30000)
    block.conv2.weight.div_(10000)
    vae.options = DEFAULTS.switched(off=["winograd"])
    assert torch.isfinite(vae.decode(z)).all() and not vae.last_report.events["nan_reruns"]
    vae.options = DEFAULTS
    frames = vae.decode(z)
    assert vae.last_report.events["nan_reruns"] == 1 and vae.last_report.precision == "fp16, then bf16"
    assert torch.isfinite(frames).all() and torch.equal(frames, vae._safer("").decode(z))


def test_a_report_names_the_form(card, make_vae_file, noise):
    """With how many convolutions have it; the packed weights are those that were planned."""
    vae, z = load(make_vae_file(WIDTHS, WIDTHS), precision="fp16", device="cpu"), noise(1, 16, 1, 2, 2)
    for options, on in ((DEFAULTS, True), (DEFAULTS.switched(off=["winograd"]), False)):
        vae.options = options
        vae.decode(z)
        (count, of), report = vae._fused.decoder().formed, vae.last_report
        assert count < of and (count > 0) == on
        assert vae._fused.decoder().nbytes == vae.planner.walk.network("decoder").nbytes
        assert report.kernels == "Triton's kernels" + f"; {count} of {of} convolutions in Winograd form" * on
        assert dict(report.off).get("winograd") == (None if on else OFF)


def test_kept_weights_carry_the_form(card, make_vae_file, noise, monkeypatch, tmp_path):
    """Layers of an int8 network that stay in 16 bit have it: what was packed with it is not taken without."""
    monkeypatch.setenv("ZEROWASTE_CACHE", str(tmp_path))
    asked, made = [], mixed.recipe
    monkeypatch.setattr(mixed, "recipe", lambda *of: asked.append(made(*of)) or asked[-1])
    vae = load(make_vae_file(WIDTHS, WIDTHS), precision="int8", device="cpu")
    for options in (DEFAULTS, DEFAULTS.switched(off=["winograd"]), DEFAULTS.switched(on=["winograd"])):
        vae.options = options
        vae.decode(noise(1, 16, 1, 1, 1))
    assert asked[0] == asked[2] != asked[1]
