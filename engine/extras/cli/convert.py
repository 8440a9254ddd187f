"""`convert`: convert a VAE file between safetensors and GGUF, plain or block-quantised."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import CheckpointError, InputError, one_line
from .options import add_force, add_norm_groups, add_output, settle_output
from .running import progress

if TYPE_CHECKING:
    from torch import Tensor

    from ...vae import VideoVAE
    from ..convert.convert import Conversion

# Size of the clip that --verify decodes: two latents (5 frames) of 16x16, small enough for the full-width network on a
# CPU.
VERIFY_FRAMES = 5
VERIFY_PIXELS = 128


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "convert",
        description="Convert a VAE file between safetensors and GGUF. Block types (q8_0 to q2_k) quantise convolutions "
        "and linear layers; norms, biases, first and last convolutions keep their type. The result is read back and "
        "compared before it takes its name.",
    )
    parser.add_argument("source", type=Path, metavar="IN", help=".safetensors or .gguf")
    add_output(parser, "OUT", "name.safetensors (f32, f16, bf16) or name.gguf")
    parser.add_argument(
        "--type", required=True, metavar="T",
        help="f32, f16, bf16, q8_0, q6_k, q5_1, q5_k, q5_0, q4_1, q4_k, q4_0, q3_k or q2_k",
    )  # fmt: skip
    parser.add_argument("--verify", action="store_true", help="decode a clip with both files and print the PSNR")
    add_norm_groups(parser)
    parser.add_argument("--details", action="store_true", help="print every tensor's type and error")
    add_force(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..convert.convert import TYPES, check_conversion, convert_checkpoint

    settle_output(args)
    args.target, kind = Path(args.out), args.type.lower()
    if args.norm_groups is not None and not args.verify:
        raise InputError("--norm-groups is for --verify, which decodes with the file; leave it out")
    if kind not in TYPES:
        raise InputError(f"--type {args.type} is not one of {', '.join(TYPES)}")
    check_conversion(args.target, kind, args.force, args.source)
    # Load it before anything is written: a file that cannot be decoded cannot be verified.
    source = _load(args.source, args.norm_groups) if args.verify else None
    with progress("convert", args.quiet) as report:
        result = convert_checkpoint(args.source, args.target, kind, args.force, report)
    if not args.quiet:
        _print(result, args)
    if source is not None:
        latent, what = _verify_latent(source)
        psnr = decode_psnr(source, _load(args.target, args.norm_groups), latent)
        print(f"decode PSNR against {args.source.name}: {psnr:.1f} dB (peak 2.0, {source.precision}, {what})")
    return 0


def decode_psnr(reference: VideoVAE, other: VideoVAE, latent: Tensor) -> float:
    """Return the PSNR in dB (peak 2.0) of another VAE's unclamped decode against the reference's.

    Args:
        reference, other: the VAEs.
        latent: raw, [1, C, T, h, w].
    """
    from ..eight_bit.sampling import decibel, mse

    return decibel(mse([reference.decode_raw(latent)], [other.decode_raw(latent)]))


def _load(path: Path, norm_groups: int | None) -> VideoVAE:
    from ...loader import load

    vae = load(path, norm_groups=norm_groups)
    if not vae.can_decode:
        raise CheckpointError(f"{path}: holds no decoder, so --verify cannot compare decodes; leave it out")
    return vae


def _verify_latent(vae: VideoVAE) -> tuple[Tensor, str]:
    """Return a raw latent to compare decodes on (the demo clip or seeded noise), and its description."""
    import torch

    if vae.can_encode:
        from ...loader import demo_clip_path
        from ..media.clips import read_video

        frames, _ = read_video(demo_clip_path(), max_frames=VERIFY_FRAMES)
        top, left = ((n - min(n, VERIFY_PIXELS)) // 2 for n in frames.shape[1:3])
        crop = frames[None, :, top : top + VERIFY_PIXELS, left : left + VERIFY_PIXELS]
        return vae.encode(crop) / vae.scale, f"{frames.shape[0]} frames of the demo clip"
    size = VERIFY_PIXELS // vae.spatial
    generator = torch.Generator().manual_seed(0)
    shape = (1, vae.latent_channels, vae.architecture.latents(VERIFY_FRAMES + 1), size, size)
    made = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    return made, "seeded noise, the file has no encoder"


def _print(result: Conversion, args: argparse.Namespace) -> None:
    if args.details:
        for name, kind in result.types.items():
            error = result.errors.get(name)
            how = "equal" if error is None else f"relative RMS error {error:.2e}"
            print(f"{kind:5} {one_line(name, 100)}: {how}")
    for line in result.summary():
        print(line)
    before = args.source.stat().st_size
    print(f"{result.bytes_written / before:.1%} of {args.source.name}'s {before / 2**20:.1f} MiB")
