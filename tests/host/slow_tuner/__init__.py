"""A pack for the tests of a page: tunings that measure nothing, so that they go on where there is no GPU, and for as
long as a test has them go on."""

import sys
import threading
from types import SimpleNamespace

from aiohttp import web
from server import PromptServer

NODE_CLASS_MAPPINGS = {}
LAYERS = 9
tick = threading.Semaphore(0)


def run(walk, device, progress, cancel):
    """Each layer waits for a tick; a fourth one fails."""
    errors = sys.modules[f"{ours().__package__.rpartition('.')[0]}.engine.errors"]
    for done in range(LAYERS):
        while not tick.acquire(timeout=0.05):
            if cancel():
                raise errors.Cancelled
        if walk == "fails" and done == 3:
            raise errors.InputError("the fused kernels are off here")
        progress(done + 1, LAYERS)
    return SimpleNamespace(schedules=dict.fromkeys(range(27))), SimpleNamespace(left=[1, 2, 3], dropped=[])


def ours():
    return next(module for name, module in sys.modules.items() if name.endswith(".nodes.panel"))


@PromptServer.instance.routes.get("/slow_tuner/ticks/{count}")
async def ticks(request):
    """That many layers more are done; 0 begins anew, with tunings of this pack instead of real ones."""
    if count := int(request.match_info["count"]):
        tick.release(count)
    else:
        while tick.acquire(blocking=False):
            pass
        module = ours()
        module.TUNER._run, module.TUNER._why = run, lambda device: None
        module.walk_of = lambda model, device: ("fails" if model == "not_a_vae.safetensors" else model, "")
    return web.json_response({})
