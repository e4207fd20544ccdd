"""One rank of PyTorch's side of `cargo xtask bench shard`: steps of a GPT on CPU ranks, with FSDP2 or DDP on gloo.

  shard.py --how fsdp|fsdp-kept|ddp|alone --size mini|gpt2 --batch 4 --places 128 --steps 5 [--tuned]

Started by a launcher (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Rank 0 prints one JSON line. With `--tuned` DDP's gradients are
views of buckets, its graph is static, and denormals are flushed; both always use the fused optimizer. FSDP2 shards each block and the
rest, and reshards after forward, as its documentation advises; on a CPU its streams do nothing, so that there is nothing to tune. `fsdp-kept`
keeps parameters from forward to backward: fewer gathers, more memory. `alone` steps as many parameters as a rank of FSDP2.
"""
import argparse
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gpt2 import Gpt2, tokens  # noqa: E402
from resnet18 import fill  # noqa: E402

WARM_UP = 2
SIZES = {
    "mini": dict(layers=6, heads=6, size=384, positions=256, vocabulary=8000),
    "gpt2": dict(layers=12, heads=12, size=768, positions=1024, vocabulary=50304),
}
WORDS = {"mini": 8000, "gpt2": 50257}


def pss():
    """This process's share of the memory that it uses, in bytes."""
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def warm_up():
    """Steps of a small model, after which the code of libtorch is in memory and does not count as the model's."""
    model = Gpt2(layers=1, heads=2, size=32, positions=8, vocabulary=50)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(WARM_UP):
        inputs, targets = tokens(2, 8, 50)
        F.cross_entropy(model(inputs).reshape(-1, 50), targets.reshape(-1)).backward()
        optimizer.step()


def share(parameters, ranks):
    """As many of the parameters as a rank would step if they were divided."""
    left, own = sum(parameter.numel() for parameter in parameters) // ranks, []
    for parameter in parameters:
        if parameter.numel() <= left:
            left -= parameter.numel()
            own.append(parameter)
    return own


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=["fsdp", "fsdp-kept", "ddp", "alone"], required=True)
    parser.add_argument("--size", choices=sorted(SIZES), required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--places", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--tuned", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(1)
    if args.tuned:
        torch.set_flush_denormal(True)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    warm_up()
    empty = pss()
    model = fill(Gpt2(**SIZES[args.size]))
    if args.how.startswith("fsdp"):
        mesh = init_device_mesh("cpu", (world,))
        for block in model.h:
            fully_shard(block, mesh=mesh, reshard_after_forward=args.how == "fsdp")
        fully_shard(model, mesh=mesh)
        parallel = model
    elif args.how == "alone":
        parallel = model
    else:
        options = {"gradient_as_bucket_view": True, "static_graph": True} if args.tuned else {}
        parallel = DistributedDataParallel(model, **options)
    parameters = list(model.parameters())
    stepped = share(parameters, world) if args.how == "alone" else parameters
    optimizer = torch.optim.AdamW(stepped, lr=1e-4, fused=True)

    times, losses = [], []
    for step in range(WARM_UP + args.steps):
        index = step * world + rank
        inputs, targets = (every[-args.batch:] for every in tokens((index + 1) * args.batch, args.places, WORDS[args.size]))
        dist.barrier()
        began = time.perf_counter()
        model.zero_grad(set_to_none=True)
        logits = parallel(inputs)[..., : WORDS[args.size]]
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        loss.backward()
        optimizer.step()
        times.append((time.perf_counter() - began) * 1e3)
        losses.append(loss.item())
    figures = torch.tensor([losses, [0.0] * WARM_UP + times[WARM_UP:]], dtype=torch.float64)
    dist.all_reduce(figures[0])
    slowest = figures[1].clone()
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    memory = torch.tensor([float(pss() - empty)], dtype=torch.float64)
    dist.all_reduce(memory)
    if rank == 0:
        print(json.dumps({
            "step_ms": statistics.median(slowest[WARM_UP:].tolist()),
            "losses": (figures[0] / world).tolist(),
            "pss_bytes": memory.item(),
        }), flush=True)
    # Gloo's threads sometimes abort the process, or wait for ever, while the interpreter is taken down.
    dist.barrier()
    os._exit(0)


main()
