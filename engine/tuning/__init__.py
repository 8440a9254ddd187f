"""Schedules measured on the user's own GPU: which layers a VAE has, what is tried for them, and what is kept."""
