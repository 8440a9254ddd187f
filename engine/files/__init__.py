"""Files: weights in any dialect (checkpoint/), clips and images (media), latents, and writing without leftovers."""
