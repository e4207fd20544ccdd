"""PyTorch's side of run.py: forward and backward of a GPT with torch.utils.checkpoint (use_reentrant=False).

  torch_gpt.py --how none|full|selective|second --size mini|gpt2 --batch 4 --places 256 --steps 5 --threads 1

Prints one JSON line. `selective` keeps the results of matrix products and attention, as PyTorch's documentation shows it. What its
dispatch mode keeps does not pass hooks on saved tensors, so that its saved bytes are not counted.
"""
import argparse
import json
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "peers"))
from gpt2 import Gpt2, checkpointed, tokens  # noqa: E402
from resnet18 import fill  # noqa: E402

WARM_UP = 2
SIZES = {
    "mini": dict(layers=6, heads=6, size=384, positions=256, vocabulary=8000),
    "gpt2": dict(layers=12, heads=12, size=768, positions=1024, vocabulary=50304),
}
WORDS = {"mini": 8000, "gpt2": 50257}

def saved(forward):
    """What forward keeps for backward: bytes of memory beside parameters, each counted once."""
    sizes, parameters = {}, {}

    def pack(tensor):
        base = tensor if tensor._base is None else tensor._base
        if not (base.is_leaf and base.requires_grad):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return result, sum(sizes.values())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=["none", "full", "selective", "second"], required=True)
    parser.add_argument("--size", choices=sorted(SIZES), required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--places", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    with torch.no_grad():
        model = fill(Gpt2(**SIZES[args.size]))
    checkpointed(model, args.how)
    inputs, targets = tokens(args.batch, args.places, WORDS[args.size])

    def forward():
        logits = model(inputs)[..., : WORDS[args.size]]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))

    times, losses, saved_bytes = [], [], None
    for step in range(WARM_UP + args.steps):
        began = time.perf_counter()
        if step == 0:
            loss, saved_bytes = saved(forward)
        else:
            loss = forward()
        loss.backward()
        times.append((time.perf_counter() - began) * 1e3)
        losses.append(loss.item())
        model.zero_grad(set_to_none=True)
    print(json.dumps({
        "step_ms": statistics.median(times[WARM_UP:]),
        "saved_bytes": saved_bytes if args.how != "selective" else None,
        "losses": losses,
    }))


main()
