"""ComfyUI nodes. Only host.py and what builds on it need ComfyUI; frames.py, saving.py and settings.py do not."""
