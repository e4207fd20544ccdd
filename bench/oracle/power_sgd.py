"""PowerSGD as PyTorch 2.11 does it: two processes over gloo, gradients that both sides can compute, one bucket.

    python bench/oracle/power_sgd.py     # with torch 2.11 and numpy; writes bench/oracle/golden/power_sgd.json

Each case has its options and, for every step from the first compressed one on, the bucket after the hook (the same on both
ranks). Steps 0 and 1 are reduced in full.
"""

import json
import os
import pathlib
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

SIZES = [[6, 20], [20], [8, 3, 2, 2]]
STEPS = 5
GOLDEN = pathlib.Path(__file__).resolve().parent / "golden" / "power_sgd.json"
CASES = [
    {"rank": 1},
    {"rank": 2},
    {"rank": 4},
    {"rank": 2, "warm_start": False},
    {"rank": 1, "use_error_feedback": False, "random_seed": 7},
]


class Bucket:
    """What the hook asks of a bucket."""

    def __init__(self, gradients):
        self.flat = torch.cat([gradient.reshape(-1) for gradient in gradients])

    def index(self):
        return 0

    def is_last(self):
        return True

    def buffer(self):
        return self.flat

    def gradients(self):
        parts = self.flat.split([torch.Size(sizes).numel() for sizes in SIZES])
        return [part.view(sizes) for part, sizes in zip(parts, SIZES)]


def gradient(param, rank, step):
    index = torch.arange(torch.Size(SIZES[param]).numel(), dtype=torch.float64)
    return (index * 0.7 * (1 + param) + index**2 * 0.013 + rank * 2.1 + step * 0.9).sin().float().view(SIZES[param])


def run(rank, store, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for case in CASES:
        options = {key: value for key, value in case.items() if key != "rank"}
        state = PowerSGDState(
            None, matrix_approximation_rank=case["rank"], start_powerSGD_iter=2, min_compression_rate=1, **options
        )
        steps = []
        for step in range(STEPS):
            bucket = Bucket([gradient(param, rank, step) for param in range(len(SIZES))])
            powerSGD_hook(state, bucket).wait()
            if step >= 2:
                steps.append([float(f"{value:.8g}") for value in bucket.buffer().tolist()])
        if rank == 0:
            results.put({**case, "steps": steps})
    dist.barrier()
    dist.destroy_process_group()


def main():
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(run, (os.path.join(folder, "store"), results), nprocs=2)
        cases = [results.get() for _ in CASES]
    GOLDEN.write_text(json.dumps({"torch": torch.__version__, "cases": cases}) + "\n")


if __name__ == "__main__":
    main()
