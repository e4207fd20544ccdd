"""Whether PyTorch thinks that torchrun started this process."""

import torch.distributed as dist

print(f"launched: {dist.is_torchelastic_launched()}")
