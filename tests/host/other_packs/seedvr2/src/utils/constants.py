"""Where files are."""

import os

FOLDERS: list[str] = []


def find_model_file(filename, fallback_dir=None):
    folders = FOLDERS
    if not folders:
        import folder_paths

        folders = folder_paths.get_folder_paths("vae")
    return next((path for f in folders if os.path.exists(path := os.path.join(f, filename))), filename)
