"""What the upscaler looks for in its cache."""

from .model_cache import get_global_cache


def _initialize_cache_context(dit_cache, vae_cache, dit_id, vae_id, dit_model, vae_model, debug=None):
    cache = get_global_cache()
    context = {"global_cache": cache, "vae_cache": vae_cache, "vae_id": vae_id, "cached_vae": None}
    if vae_cache and vae_model and vae_id is not None:
        cached = cache.get_vae({"node_id": vae_id, "cache_model": True}, debug)
        if cached:
            if getattr(cached, "_model_name", None) == vae_model:
                context["cached_vae"] = cached
            else:
                cache.remove_vae({"node_id": vae_id}, debug)
    elif vae_id is not None:
        cache.remove_vae({"node_id": vae_id}, debug)
    return context
