"""Schedules measured on the user's own GPU: the layers of a VAE, the candidates for them, and the store of the results.
"""
