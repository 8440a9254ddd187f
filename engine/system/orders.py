"""Settings that the surrounding program, such as ComfyUI by its start options, gives all runs of the engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Orders:
    """Defaults for the whole process; options of a single run take precedence.

    precision: the plain type that "auto" means; "": the engine's choice. half_sums: "auto" sums in fp16 where the card
    is faster with it and the model was made for fp16. no_overlap: why copies wait for the GPU; "": they run at the same
    time as its work. reserved: bytes of every card that stay free for other programs.
    """

    precision: str = ""
    half_sums: bool = False
    no_overlap: str = ""
    reserved: int = 0


#: The orders of this process; set before a VAE is loaded, because its plans and packed weights are made for them.
ORDERS = Orders()
