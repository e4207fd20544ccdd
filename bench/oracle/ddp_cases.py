"""What PyTorch's DistributedDataParallel makes of uneven inputs, unused parameters, accumulation and gradients that are not zeroed.

  python ddp_cases.py        (torch 2.11) writes golden/ddp_cases.json

A tiny model whose weights and data are formulas; 2 or 3 processes over gloo on the CPU, SGD with momentum. A case's `final` holds rank 0's parameters
and buffers after its last step; parameters are the same on all ranks, and `equal_buffers` says whether buffers are, too.
"""
import contextlib
import json
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

OUT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden", "ddp_cases.json")
SGD = {"lr": 0.1, "momentum": 0.9}
BATCH = 4


class Net(nn.Module):
    """Two layers with a norm between them, and a third for those who ask for it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.second = nn.Linear(12, 3)
        self.extra = nn.Linear(3, 3)
        with torch.no_grad():
            for place, (_, parameter) in enumerate(sorted(self.named_parameters())):
                index = torch.arange(parameter.numel(), dtype=torch.float64)
                parameter.copy_((torch.sin(index * 0.7 + place) * 0.3).view_as(parameter))

    def forward(self, x, with_extra):
        x = self.second(torch.tanh(self.norm(self.first(x))))
        return self.extra(x) if with_extra else x


def batch(rank, index):
    """The rank's batch number `index`: inputs and targets."""
    first = rank * 1000 + index * BATCH
    rows = torch.arange(first, first + BATCH, dtype=torch.float64).unsqueeze(1)
    x = torch.sin(rows * 1.3 + torch.arange(6, dtype=torch.float64) * 0.9)
    return x.float(), (x[:, :3] * x[:, 3:]).float()


class Training:
    def __init__(self, rank):
        self.rank, self.model = rank, Net()
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), **SGD)

    def backward(self, index, with_extra=False, divisor=1):
        x, y = batch(self.rank, index)
        (nn.functional.mse_loss(self.ddp(x, with_extra), y) / divisor).backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def uneven(rank, batches, divide_by_initial_world_size):
    training = Training(rank)
    with training.ddp.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for index in range(batches[rank]):
            training.backward(index)
            training.step()
    return training


def control_flow(rank, steps):
    """The extra layer is used by one rank, by both, by none, in turns."""
    training = Training(rank)
    for step in range(steps):
        training.backward(step, with_extra=uses_extra(rank, step))
        training.step()
    return training


def uses_extra(rank, step):
    return (step + 1) >> rank & 1 == 1


def accumulation(rank, steps, micro_batches, with_extra):
    """The extra layer, if at all, is used by rank 1 in the first micro-batch, which is not the one that reduces."""
    training = Training(rank)
    for step in range(steps):
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            with contextlib.nullcontext() if is_last else training.ddp.no_sync():
                extra = with_extra and rank == 1 and micro == 0
                training.backward(step * micro_batches + micro, extra, divisor=micro_batches)
        training.step()
    return training


def not_zeroed(rank, steps, with_extra):
    """Gradients add up over all steps."""
    training = Training(rank)
    for step in range(steps):
        training.backward(step, with_extra=with_extra and uses_extra(rank, step))
        training.optimizer.step()
    return training


CASES = {
    "uneven_divided_among_all_ranks": (3, uneven, ([4, 2, 5], True)),
    "uneven_divided_among_ranks_with_data": (3, uneven, ([4, 2, 5], False)),
    "uneven_first_rank_is_last": (2, uneven, ([5, 3], True)),
    "uneven_first_rank_has_nothing": (2, uneven, ([0, 3], False)),
    "even_in_join": (2, uneven, ([3, 3], True)),
    "control_flow_that_differs": (2, control_flow, (8,)),
    "accumulation": (2, accumulation, (4, 3, False)),
    "accumulation_with_unused": (2, accumulation, (4, 2, True)),
    "gradients_not_zeroed": (2, not_zeroed, (4, False)),
    "gradients_not_zeroed_with_unused": (2, not_zeroed, (6, True)),
}


def rank_main(rank, world, name, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    _, run, arguments = CASES[name]
    training = run(rank, *arguments)
    state = {key: value.flatten().tolist() for key, value in training.model.state_dict().items()}
    everybodys = [None] * world
    dist.all_gather_object(everybodys, state)
    trained = [key for key, _ in training.model.named_parameters()]
    assert all(theirs[key] == state[key] for theirs in everybodys for key in trained), name
    if rank == 0:
        found = {"world": world, "final": state, "equal_buffers": all(theirs == state for theirs in everybodys)}
        with open(f"{OUT}.{name}", "w") as file:
            json.dump(found, file)
    dist.barrier()
    # Gloo's threads may still be at work for join; ending them one by one aborts now and then.
    os._exit(0)


def main():
    golden = {"torch": torch.__version__.split("+")[0], "sgd": SGD, "batch": BATCH, "cases": {}}
    for place, (name, (world, _, _)) in enumerate(CASES.items()):
        mp.spawn(rank_main, args=(world, name, 29720 + place), nprocs=world)
        with open(f"{OUT}.{name}") as file:
            golden["cases"][name] = json.load(file)
        os.remove(f"{OUT}.{name}")
    with open(OUT, "w") as file:
        json.dump(golden, file, indent=1)
        file.write("\n")
    print(f"{len(CASES)} cases, {os.path.getsize(OUT)} bytes")


if __name__ == "__main__":
    main()
