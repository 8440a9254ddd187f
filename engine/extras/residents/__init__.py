"""Runs beside other models of ComfyUI's on one card: which of them stays, and what moving it costs."""
