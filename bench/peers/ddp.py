"""One rank of PyTorch's side of `cargo xtask bench ddp`: ResNet-18 on 32x32 images, forward, backward, SGD.

  ddp.py --mode ddp|alone --batch 32 --steps 20 [--tuned]

Started by a launcher (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) for `ddp`. Rank 0 prints one JSON line.
`--tuned` is what PyTorch's guides advise on a CPU: gradients as views of buckets, a static graph, the fused optimizer, denormals flushed.
"""
import argparse
import json
import os
import resource
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from resnet18 import ResNet18, batch, fill  # noqa: E402

WARM_UP = 5


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["ddp", "alone"], required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--tuned", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(1)
    if args.tuned:
        torch.set_flush_denormal(True)
    rank, world = 0, 1
    if args.mode == "ddp":
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    model = fill(ResNet18(10))
    replica = model
    if args.mode == "ddp":
        options = {"gradient_as_bucket_view": True, "static_graph": True} if args.tuned else {}
        replica = DistributedDataParallel(model, **options)
    extra = {"fused": True} if args.tuned else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5, nesterov=True, **extra)
    loss_of = torch.nn.CrossEntropyLoss()

    times, losses = [], []
    for step in range(WARM_UP + args.steps):
        images, labels = batch(step, rank, world, args.batch)
        if args.mode == "ddp":
            dist.barrier()
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(replica(images), labels)
        loss.backward()
        optimizer.step()
        times.append((time.perf_counter() - began) * 1e3)
        losses.append(loss.detach())
    losses = torch.stack(losses)
    slowest = torch.tensor(times[WARM_UP:])
    if args.mode == "ddp":
        dist.all_reduce(losses)
        losses /= world
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        step = statistics.median(slowest.tolist())
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"step_ms": step, "images_per_s": world * args.batch / step * 1e3, "losses": losses.tolist(), "peak_bytes": peak}), flush=True)
    if args.mode == "ddp":
        # Gloo's threads sometimes abort the process while the interpreter is taken down.
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)


main()
