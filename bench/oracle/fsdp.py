"""What PyTorch's FSDP2 makes of 20 steps of AdamW on 2 and 3 ranks: plain, clipped, and accumulated and clipped.

  python fsdp.py        (torch 2.11) writes golden/fsdp.json

A small model whose weights and data are formulas, with rows that no number of ranks divides; processes over gloo on the CPU. A step has 24 samples in
all, which ranks and micro-batches divide evenly. A case has the parameters after its last step and the norm of each step's gradients.
"""
import json
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden", "fsdp.json")
# With a smaller eps, Adam magnifies the rounding of gradients that are nearly zero.
ADAM = {"lr": 0.02, "eps": 1e-3, "weight_decay": 0.1}
STEPS, BATCH = 20, 24
CASES = {"plain": (1, None), "clipped": (1, 0.2), "accumulated": (4, 0.2)}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 13)
        self.second = nn.Linear(13, 7)
        self.third = nn.Linear(7, 3)
        with torch.no_grad():
            for place, (_, parameter) in enumerate(sorted(self.named_parameters())):
                index = torch.arange(parameter.numel(), dtype=torch.float64)
                parameter.copy_((torch.sin(index * 0.7 + place) * 0.3).view_as(parameter))

    def forward(self, x):
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def samples(first, last):
    """Samples of an endless data set: inputs and targets."""
    rows = torch.arange(first, last, dtype=torch.float64).unsqueeze(1)
    x = torch.sin(rows * 1.3 + torch.arange(6, dtype=torch.float64) * 0.9)
    return x.float(), (x[:, :3] * x[:, 3:]).float()


def case(rank, ranks, num_micro_batches, max_norm):
    model, mesh = Net(), init_device_mesh("cpu", (ranks,))
    for layer in (model.first, model.second, model.third):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    each, norms = BATCH // ranks // num_micro_batches, []
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(num_micro_batches):
            first = step * BATCH + (rank * num_micro_batches + index) * each
            x, y = samples(first, first + each)
            (nn.functional.mse_loss(model(x), y) / num_micro_batches).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
        norms.append(norm.full_tensor().item())
        optimizer.step()
    final = {name: parameter.full_tensor().flatten().tolist() for name, parameter in model.named_parameters()}
    return {"norms": norms, "final": final}


def run(rank, ranks, port, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    cases = {name: case(rank, ranks, *how) for name, how in CASES.items()}
    if rank == 0:
        results.put(cases)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    golden = {"torch": torch.__version__, "steps": STEPS, "batch": BATCH, "adam": ADAM, "ranks": {}}
    for ranks in (2, 3):
        results = mp.get_context("spawn").SimpleQueue()
        processes = mp.spawn(run, (ranks, 29540 + ranks, results), nprocs=ranks, join=False)
        golden["ranks"][ranks] = results.get()
        processes.join()
    with open(OUT, "w") as file:
        json.dump(golden, file, indent=1)
        file.write("\n")
