"""Schedules measured on the user's own GPU: the layers of a VAE, candidates for them, and the store of results."""
