"""One rank of PyTorch's side of `bench/gpu/shard.py`: steps of a GPT on a GPU, with FSDP2, DDP or alone.

  shard_gpu.py --how fsdp|ddp|alone --size gpt2|medium|large|xl|6.7b|13b --batch 8 --places 1024 --steps 20 [--offload] [--checkpoint]

With `--offload` (fsdp) parameters, gradients and the optimizer's state are in pinned host memory, as FSDP2's CPUOffloadPolicy has them.

Started with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. bf16 products with f32 weights, f32 reduction, the fused optimizer; FSDP2 shards each
block and the rest, and reshards after forward, as its documentation advises. Rank 0 prints one JSON line.
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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gpt2 import Gpt2, tokens  # noqa: E402
from resnet18 import fill  # noqa: E402

WARM_UP, CHUNK = 8, 5
SIZES = {
    "gpt2": dict(layers=12, heads=12, size=768),
    "medium": dict(layers=24, heads=16, size=1024),
    "large": dict(layers=36, heads=20, size=1280),
    "xl": dict(layers=48, heads=25, size=1600),
    "6.7b": dict(layers=32, heads=32, size=4096),
    "13b": dict(layers=40, heads=40, size=5120),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=["fsdp", "ddp", "alone"], required=True)
    parser.add_argument("--size", choices=sorted(SIZES), required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--places", type=int, default=1024)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--checkpoint", action="store_true")
    args = parser.parse_args()
    if args.offload and args.how != "fsdp":
        parser.error("only fsdp offloads; try --how fsdp")
    torch.cuda.set_device(0)
    torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = fill(Gpt2(**SIZES[args.size]))
    if not args.offload:
        model = model.cuda()
    if args.checkpoint:
        for index, block in enumerate(model.h):
            model.h[index] = checkpoint_wrapper(block)
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=args.how != "fsdp")
    parallel = model
    if args.how == "fsdp":
        mesh = init_device_mesh("cuda", (world,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        offload = CPUOffloadPolicy() if args.offload else OffloadPolicy()
        for block in model.h:
            fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload)
        fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    elif args.how == "ddp":
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    every = tokens(args.batch * world, args.places)
    inputs, targets = (part[args.batch * rank: args.batch * (rank + 1)].cuda() for part in every)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            logits = parallel(inputs)
            loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses = [step().float() for _ in range(WARM_UP)]
    torch.cuda.synchronize()
    times = []
    for _ in range(-(-args.steps // CHUNK)):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CHUNK):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3 / CHUNK)
    figures = torch.stack(losses)
    dist.all_reduce(figures)
    slowest = torch.tensor(times, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(json.dumps({
            "step_ms": statistics.median(slowest.tolist()),
            "losses": (figures / world).tolist(),
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
        }))
    dist.destroy_process_group()


main()
