"""A pack for the tests on a GPU: another model that wants the memory, and what came of a decode."""

import gc
import hashlib
import json

import comfy.model_management as mm
import comfy.model_patcher
import comfy.ops
import torch

GIB = 1 << 30
#: Both live as long as the process: what other programs would take, and the models by their size.
others = []
models = {}


class Heavy(torch.nn.Module):
    def __init__(self, gib):
        super().__init__()
        half = comfy.ops.manual_cast.Linear  # of a GB in each
        layers = (half(1 << 14, 1 << 14, bias=False, dtype=torch.float16) for _ in range(2 * gib))
        self.layers = torch.nn.ModuleList(layers)
        # With dynamic VRAM layers have no weights before some are loaded.
        weights = {f"layers.{i}.weight": torch.empty(1 << 14, 1 << 14, dtype=torch.float16) for i in range(2 * gib)}
        self.load_state_dict(weights)


def patcher(gib):
    kind = getattr(comfy.model_patcher, "CoreModelPatcher", comfy.model_patcher.ModelPatcher)
    model = Heavy(gib)
    return kind(model, load_device=mm.get_torch_device(), offload_device=torch.device("cpu"))


class LoadHeavy:
    """Leave `free` GB of the card to the host, and have it load a model of `gib` GB."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",), "gib": ("INT", {}), "free": ("INT", {})}}

    RETURN_TYPES, FUNCTION, CATEGORY = ("LATENT",), "load", "test"

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")

    def load(self, samples, gib, free):
        others.clear()
        mm.soft_empty_cache()
        spare = torch.cuda.mem_get_info()[0] - free * GIB
        if spare > 0:
            others.append(torch.empty(spare, dtype=torch.uint8, device="cuda"))
        if gib not in models:
            models[gib] = patcher(gib)
        mm.load_models_gpu([models[gib]])
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


class Forget:
    """Give the memory of `others` back."""

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
        return {"ui": {"text": [json.dumps(facts)]}}


NODE_CLASS_MAPPINGS = {"TestLoadHeavy": LoadHeavy, "TestLook": Look, "TestForget": Forget}
