"""Losses of 20 steps of ResNet-18 under PyTorch's DistributedDataParallel: two processes, gloo, CPU, one thread each.

  python ddp_resnet18.py        (torch 2.11) writes golden/ddp_resnet18.json

Weights and images are formulas (peers/resnet18.py), so that no file of weights is needed. A step's loss is the mean over the samples of both ranks.

Everything is float64. In float32 the losses differ in their third digit after five steps, from one processor to the next, because each has other kernels; in float64 they agree to 1e-8 after twenty.
"""
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "peers"))
from resnet18 import ResNet18, batch, fill  # noqa: E402

WORLD, BATCH, STEPS = 2, 8, 20
SGD = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-5, "nesterov": True}


def rank_main(rank, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    model = fill(ResNet18(10).double())
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    losses = []
    for step in range(STEPS):
        images, labels = batch(step, rank, WORLD, BATCH)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(replica(images.double()), labels)
        loss.backward()
        optimizer.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / WORLD)
    if rank == 0:
        sums = {name: [p.double().sum().item(), p.double().abs().sum().item()] for name, p in model.named_parameters() if p.dim() > 1}
        golden = {"torch": torch.__version__.split("+")[0], "world": WORLD, "batch": BATCH, "sgd": SGD, "losses": losses, "sums": sums}
        with open(os.path.join(HERE, "golden", "ddp_resnet18.json"), "w") as file:
            json.dump(golden, file, indent=1)
            file.write("\n")
        print(losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank_main, args=(29711,), nprocs=WORLD)
