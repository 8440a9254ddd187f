"""Run under torchrun: a decode to out.mp4 of which rank 1 hangs behind its first frames; rank_hangs.py HOW VAE LATENT.

HOW: "stopped", its process stands still; "stuck", it does not come to the end of a chunk.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from zerowaste_vae.engine.execution import call, results
from zerowaste_vae.engine.extras.cli import main
from zerowaste_vae.engine.extras.distributed import shares, watch

made = call.decode


def hanging(core, z, request, tick, results, wanted, *rest):
    for number, finished in enumerate(made(core, z, request, tick, results, wanted, *rest)):
        yield finished
        if number == 1:
            print(f"rank 1 hangs: process {os.getpid()}", flush=True)
            if sys.argv[1] == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            tick.check()
            time.sleep(3600)


if __name__ == "__main__":
    torch.set_num_threads(1)
    watch.PULSE, watch.GRACE = 0.2, 10.0
    watch.SILENCE, watch.CHUNK_CPU = (3.0, 600.0) if sys.argv[1] == "stopped" else (60.0, 10.0)
    shares.Leads.__call__ = lambda self, first: 0.1 * bool(first)
    results.waiting_room = lambda ram_gb: 2 * 4 * 3 * (8 * 16 * 3)
    if os.environ["RANK"] == "1":
        call.decode = hanging
    sys.exit(main(["decode", sys.argv[3], "out.mp4", "--vae", sys.argv[2], "--device", "cpu", "--chunk", "1"]))
