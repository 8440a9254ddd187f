"""What the program around the engine was told for all of its runs, such as by ComfyUI's start options."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Orders:
    """Wishes for the whole process; what a user asks of one run goes before them.

    precision: the plain type that "auto" means; "": the engine's choice. half_sums: "auto" sums in fp16 where the card
    is faster with it and the model was made for fp16. no_overlap: why copies wait for the GPU; "": they run beside it.
    reserved: bytes of every card that stay free for others.
    """

    precision: str = ""
    half_sums: bool = False
    no_overlap: str = ""
    reserved: int = 0


#: Of this process; set before a VAE is loaded, as plans and packed weights of one are made for them.
ORDERS = Orders()
