"""The flags of the original documents: `--info`, and `--model VAE` with `--benchmark` or `--info`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .parser import Parser

FLAGS = ("--info", "--model", "--benchmark")


def run(argv: Sequence[str], program: str) -> int:
    """Run a command line that starts with one of FLAGS."""
    parser = Parser(
        prog=program, epilog="`info` and `bench` are the same with more options.", description=__doc__
    )
    parser.add_argument("--info", action="store_true", help="show this machine, and what the model file holds")
    parser.add_argument("--model", type=Path, metavar="VAE", help="VAE weights (.safetensors or .gguf)")
    parser.add_argument("--benchmark", action="store_true", help="time decodes of the model")
    parser.add_argument("--num-runs", type=int, default=10, metavar="N", help="timed decodes (default: 10)")
    parser.add_argument("--warmup-runs", type=int, default=3, metavar="N", help="untimed ones first (default: 3)")
    parser.add_argument("--vram-gb", type=float, default=16.0, metavar="GB", help="of which 81.25 %% are used (16)")
    args = parser.parse_args(argv)
    if args.benchmark and args.model is None:
        parser.error("--benchmark needs --model VAE")
    if not args.benchmark:
        from .info import about
        from .options import print_facts

        print_facts(about(args.model and str(args.model)))
        return 0
    from ..compat.names import BlackwellIntegratedVAE

    BlackwellIntegratedVAE(args.model, args.vram_gb).benchmark(args.num_runs, args.warmup_runs)
    return 0
