"""Clips, pictures, sound and latents in files."""
