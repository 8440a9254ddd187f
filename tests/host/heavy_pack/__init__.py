"""A pack for the tests on a GPU: another model that wants the memory, and what came of a decode."""

import gc
import hashlib
import json
import threading
import time

import comfy.model_management as mm
import comfy.model_patcher
import comfy.ops
import torch

GIB = 1 << 30
#: Both live as long as the process: what other programs would take, and the models by their size.
others = []
models = {}
#: Bytes that a VAE's run asked for, and what was free when it began; (bytes of ours, of the heavy models) then.
rooms = []
asked = []
#: Calls that page-lock host memory, by anybody.
locks = [0]
least = []


def watched(load):
    def load_models_gpu(given, memory_required=0, **rest):
        load(given, memory_required=memory_required, **rest)
        if memory_required:
            asked.append((memory_required, sum(model.loaded_size() for model in given)))

    return load_models_gpu


def noted(enter):
    """The context that a run is in from the end of its preparation on."""

    def cuda_device_context(device):
        if asked:
            wanted, ours = asked.pop()
            rooms.append({"asked": wanted, "ours": ours, "free": mm.get_free_memory(device), "heavy": loaded()})
        return enter(device)

    return cuda_device_context


class Runtime:
    """CUDA's functions; those that page-lock are counted."""

    def __getattr__(self, name):
        return getattr(cudart(), name)

    def cudaHostRegister(self, *given):
        locks[0] += 1
        return cudart().cudaHostRegister(*given)


if torch.cuda.is_available():
    mm.load_models_gpu = watched(mm.load_models_gpu)
    mm.cuda_device_context = noted(mm.cuda_device_context)
    cudart, torch.cuda.cudart = torch.cuda.cudart, Runtime


class Heavy(torch.nn.Module):
    def __init__(self, gib):
        super().__init__()
        half = comfy.ops.manual_cast.Linear  # of half a GB each
        layers = (half(1 << 14, 1 << 14, bias=False, dtype=torch.float16) for _ in range(2 * gib))
        self.layers = torch.nn.ModuleList(layers)
        # With dynamic VRAM layers have no weights before some are loaded.
        # Written to: pages that nobody has written are one page of zeros to the system, which is copied sooner.
        weights = {f"layers.{i}.weight": torch.ones(1 << 14, 1 << 14, dtype=torch.float16) for i in range(2 * gib)}
        self.load_state_dict(weights)


def patcher(gib):
    kind = getattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcher)
    model = Heavy(gib)
    return kind(model, load_device=mm.get_torch_device(), offload_device=torch.device("cpu"))


def loaded():
    return sum(model.loaded_size() for model in models.values())


def watch():
    """Note the least memory that is free on the card, until `others` are gone."""
    while others:
        least[:] = [min([*least, torch.cuda.mem_get_info()[0]])]
        time.sleep(0.001)


def run(gib):
    """Load and run a model of `gib` GB, as a sampler does. 0: have every model leave instead."""
    if not gib:
        mm.unload_all_models()
        mm.soft_empty_cache()
        return
    if gib not in models:
        models[gib] = patcher(gib)
    mm.load_models_gpu([models[gib]])
    for layer in models[gib].model.layers:  # with dynamic VRAM weights come when they are used
        layer(torch.zeros(1, 1 << 14, dtype=torch.float16, device="cuda"))
    torch.cuda.synchronize()


class Step:
    """Run a model of `gib` GB, or with 0 have every model leave. JSON: the seconds when that began and ended, and the
    bytes of models of this pack that were on the card then."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"gib": ("INT", {})}, "optional": {"samples": ("LATENT",), "images": ("IMAGE",)}}

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = ("LATENT",), "step", "test", True

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")

    def step(self, gib, samples=None, images=None):
        torch.cuda.synchronize()
        held, began = loaded(), time.perf_counter()
        run(gib)
        facts = {"began": began, "ended": time.perf_counter(), "before": held, "after": loaded()}
        return {"ui": {"text": [json.dumps(facts)]}, "result": (samples,)}


class LoadHeavy:
    """Leave `free` GB of the card to the host, and have it load and run a model of `gib` GB."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",), "gib": ("INT", {}), "free": ("INT", {})}}

    RETURN_TYPES, FUNCTION, CATEGORY = ("LATENT",), "load", "test"

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")

    def load(self, samples, gib, free):
        others.clear()
        rooms.clear()
        mm.soft_empty_cache()
        # What the model holds still, it does not take once more.
        spare = torch.cuda.mem_get_info()[0] + loaded() - free * GIB
        if spare > 0:
            others.append(torch.empty(spare, dtype=torch.uint8, device="cuda"))
        if gib:
            run(gib)
        rooms.append({"heavy": loaded(), "free": mm.get_free_memory(mm.get_torch_device())})
        least.clear()
        threading.Thread(target=watch, daemon=True).start()
        return (samples,)


class Look:
    """JSON: shape, spread and digest of `images`."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"images": ("IMAGE",)}}

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "look", "test", True

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")

    def look(self, images):
        digest = hashlib.sha256(images.contiguous().numpy()).hexdigest()
        facts = {"shape": list(images.shape), "std": images.std().item(), "digest": digest}
        return {"ui": {"text": [json.dumps(facts)]}}


class Rooms:
    """JSON: the memory that was free behind the last LoadHeavy, and for each run since then."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "rooms", "test", True

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")

    def rooms(self):
        return {"ui": {"text": [json.dumps(rooms)]}}


class Forget:
    """Give the memory of `others` back; JSON: what is held, was locked, and was free at least beside `others`."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "forget", "test", True

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")

    def forget(self):
        others.clear()
        models.clear()
        gc.collect()
        mm.soft_empty_cache(True)
        facts = {"allocated": torch.cuda.memory_allocated(), "free": torch.cuda.mem_get_info()[0]}
        facts |= {"locks": locks[0], "least": min(least, default=None)}
        return {"ui": {"text": [json.dumps(facts)]}}


NODE_CLASS_MAPPINGS = {
    "TestLoadHeavy": LoadHeavy, "TestLook": Look, "TestForget": Forget, "TestRooms": Rooms, "TestStep": Step,
}  # fmt: skip
