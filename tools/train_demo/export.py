"""Write the demo VAE: fp16 safetensors with the published parameter names.

    python -m zerowaste_vae.tools.train_demo.export trained.safetensors assets/demo_vae.safetensors
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ...engine.families.seedvr2 import ARCHITECTURE, Config
from ...engine.network.plain import Network


def save(model: Network, path: Path) -> None:
    """Save the weights rounded to fp16; metadata `norm_num_groups` gives loaders the number that shapes do not show."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to("cpu", torch.float16).contiguous() for name, p in model.state_dict().items()}
    save_file(tensors, path, {"norm_num_groups": str(model.config.norm_groups), "format": "pt"})


def _scale(layer: nn.Module, weight: float, bias: float) -> None:
    layer.weight.data.mul_(weight)
    layer.bias.data.mul_(bias)


@torch.no_grad()
def balance(model: Network) -> None:
    """Shrink the two largest residual streams by powers of two; in exact arithmetic the output does not change.

    Training lets the streams before the encoder's last norm and the decoder's last norm grow to 14,000, near enough to
    fp16's 65,504 to worry. Norms undo any scale, so only the layers that write into a stream have to be scaled.
    """
    encoder, decoder = model.encoder, model.decoder
    low = 1 / 32
    _scale(encoder.down_blocks[2].downsamplers[0].conv, low, low)
    for resnet in (*encoder.down_blocks[3].resnets, *encoder.mid_block.resnets):
        if resnet.conv_shortcut is not None:
            _scale(resnet.conv_shortcut, 1, low)
        _scale(resnet.conv2, low, low)
    _scale(encoder.mid_block.attentions[0].to_out[0], low, low)
    _scale(decoder.up_blocks[2].upsamplers[0].conv, 1 / 8, 1 / 8)
    first = decoder.up_blocks[3].resnets[0]
    into = 1 / 8
    if first.conv_shortcut is not None:  # takes the stream from 1/8 to 1/32
        into = low
        _scale(first.conv_shortcut, low * 8, low)
    for resnet in decoder.up_blocks[3].resnets:
        _scale(resnet.conv2, into, into)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trained", type=Path, help="averaged weights that train.py wrote")
    parser.add_argument("out", type=Path, help="file to ship")
    args = parser.parse_args()
    tensors = load_file(args.trained)
    with safe_open(args.trained, "pt") as file:
        groups = int(file.metadata()["norm_num_groups"])
    model = ARCHITECTURE.build(Config.from_shapes({name: tuple(t.shape) for name, t in tensors.items()}, groups))
    model.load_state_dict(tensors)
    balance(model)
    save(model, args.out)


if __name__ == "__main__":
    main()
