"""ComfyUI nodes. host.py and the files that import it need ComfyUI; frames.py, saving.py and settings.py do not."""
