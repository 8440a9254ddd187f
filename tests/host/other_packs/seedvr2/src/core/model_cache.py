"""The process's cache of models."""


class GlobalModelCache:
    def __init__(self):
        self._vae_models, self._runner_templates = {}, {}

    def get_vae(self, vae_config, debug=None):
        if not vae_config.get("cache_model", False):
            return None
        return self._vae_models.get(vae_config.get("node_id"), (None,))[0]

    def set_vae(self, vae_config, model, model_name, debug=None):
        if not vae_config.get("cache_model", False):
            return None
        self._vae_models[vae_config.get("node_id")] = model, vae_config
        return vae_config.get("node_id")

    def get_runner(self, dit_id, vae_id, debug=None):
        return self._runner_templates.get(f"{dit_id}+{vae_id}")

    def set_runner(self, dit_id, vae_id, runner, debug=None):
        self._runner_templates.setdefault(f"{dit_id}+{vae_id}", runner)

    def remove_vae(self, vae_config, debug=None):
        name = vae_config.get("node_id")
        if name not in self._vae_models:
            return False
        for parameter in self._vae_models.pop(name)[0].parameters():
            if parameter.is_cuda:
                parameter.data.set_()
        for key in [key for key in self._runner_templates if key.endswith(f"+{name}")]:
            del self._runner_templates[key]
        return True


_cache = GlobalModelCache()


def get_global_cache():
    return _cache
