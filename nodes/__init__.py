"""ComfyUI nodes. host.py and the files that import it need ComfyUI; the others, such as frames.py, do not."""
