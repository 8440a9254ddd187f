"""The widgets of the optimisations, and the engine's options that they stand for."""

from __future__ import annotations

from ..engine.kernels.cards import AUTO, CHOICES
from ..engine.options import TOGGLES, Options
from .host import io
from .machine import unavailable
from .widgets import advanced

#: Saved workflows know widgets by their place: the first so many toggles stand before Optimize's last widget, later
#: ones after it.
FIRST = 9
#: The number of toggles before `kernels`, which came after them.
BEFORE_KERNELS = 10


def toggle_inputs() -> tuple[list[io.Input], list[io.Input]]:
    """Return the dB floor with the first toggles, and the toggles that came later. Those that have no effect here carry
    the reason, for the tooltip and the panel; those that plans depend on are marked for the panel."""
    floor = io.Float.Input(
        "min_db",
        display_name="Least quality (dB), 0 = exact",
        default=0.0,
        min=0.0,
        max=200.0,
        step=1.0,
        optional=True,
        tooltip="PSNR in dB (peak 2.0) that approximations must keep against the exact decode. 0: nothing approximate "
        "but what is switched on here.",
    )
    toggles = [_toggle(name, reason) for name, reason in unavailable().items()]
    later = [*toggles[FIRST:BEFORE_KERNELS], _kernels(), *toggles[BEFORE_KERNELS:]]
    return [advanced(floor), *toggles[:FIRST]], later


def _kernels() -> io.Combo.Input:
    widget = io.Combo.Input(
        "kernels", display_name="Which fused kernels", options=list(CHOICES), default=AUTO, optional=True,
        tooltip="auto: the compiled kernels that come with this pack, or Triton's where those lack one (on data-centre "
        "cards Triton's first). triton, plain (plain torch) or a compiled set, on any card: A is for RTX 30, B for RTX "
        "40, C and D for RTX 50.",
    )  # fmt: skip
    widget.extra_dict["zerowaste_planned"] = True
    return advanced(widget)


def _toggle(name: str, reason: str | None) -> io.Boolean.Input:
    default = getattr(Options(), name) is not False
    toggle = TOGGLES[name]
    tooltip = toggle.text + (f" Not in use here: {reason}." if reason else "")
    widget = io.Boolean.Input(name, display_name=toggle.label, default=default, optional=True, tooltip=tooltip)
    if toggle.memory:
        widget.extra_dict["zerowaste_planned"] = True
    if reason:
        widget.extra_dict["zerowaste_off"] = reason
    return advanced(widget)


def options_from(min_db: float = 0.0, kernels: str = AUTO, **toggles: bool) -> Options:
    """Return options from widget values; those not given keep the engine's default."""
    given = {name: toggles[name] for name in TOGGLES if name in toggles}
    if given.get("channels_last_3d"):
        # Only for the kernels: plain torch is slower with it (1.8 times on an H200), so this widget never asks for it.
        given["channels_last_3d"] = None
    return Options(**given, min_db=min_db, kernels=kernels)


def without_optimisations() -> Options:
    """Return the options of plain torch without optimisations."""
    return Options().switched(off=TOGGLES)
