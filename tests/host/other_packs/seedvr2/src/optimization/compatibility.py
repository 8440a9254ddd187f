"""The type that the upscaler computes in; bfloat16 on nearly all machines, this one for comparisons."""

import torch

COMPUTE_DTYPE = torch.float32
