"""Files of the user and of the cache folder: written whole or not at all, one run at a time."""
