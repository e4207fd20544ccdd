"""One rank of PyTorch's side of `cargo xtask bench pipeline`: torch.distributed.pipelining on CPU ranks, with gloo.

  pipeline.py --schedule 1f1b --micro-batches 8 --batch 1 --places 64 --steps 6 [--tuned]       a GPT
  pipeline.py --schedule zbv --micro-batches 32 --steps 3 --sleep 5ms                            stages that sleep

Started by a launcher (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Rank 0 prints one JSON line. Each rank builds the whole model, fills
it by the formula of resnet18.py and keeps its stages, which are cut as ours are. Outputs of the last stage are not collected. The
optimizer's step is not timed, on either side. With `--tuned` denormals are flushed; the launcher adds a core for each rank and a malloc
that keeps its memory.

Stages that sleep do so in their forward, and in backward where the runtime calls the stage: it computes input and weight gradients
apart by two walks through the graph, which an autograd Function that sleeps could not distinguish. They multiply by one vector, since the
runtime wants a graph.
"""
import argparse
import ctypes
import itertools
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gpt2 import tokens  # noqa: E402
from resnet18 import fill  # noqa: E402

WARM_UP = 2
LAYERS, HEADS, SIZE, POSITIONS, WORDS = 6, 6, 384, 256, 8000
# As in drumline-bench: the embedding, the blocks, the head.
COSTS = [0.1] + [1.0] * LAYERS + [WORDS / (12 * SIZE) + 0.2]
SCHEDULES = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "bfs": pipelining.ScheduleLoopedBFS,
    "zb1p": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
CHUNKS = {"gpipe": 1, "1f1b": 1, "zb1p": 1, "interleaved": 2, "bfs": 2, "zbv": 2}
PR_SET_TIMERSLACK = 29


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(SIZE, 3 * SIZE)
        self.c_proj = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        texts, places, size = x.shape
        q, k, v = (part.view(texts, places, HEADS, -1).transpose(1, 2) for part in self.c_attn(x).split(size, dim=2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(seen.transpose(1, 2).flatten(2, 3))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = nn.Linear(SIZE, 4 * SIZE)
        self.c_proj = nn.Linear(4 * SIZE, SIZE)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(SIZE), Attention()
        self.ln_2, self.mlp = nn.LayerNorm(SIZE), Mlp()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """Its head has a weight of its own: pipelining does not tie parameters of two stages."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(WORDS, SIZE)
        self.wpe = nn.Embedding(POSITIONS, SIZE)
        self.h = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.ln_f = nn.LayerNorm(SIZE)
        self.lm_head = nn.Linear(SIZE, WORDS, bias=False)


class First(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.wte, self.wpe = model.wte, model.wpe

    def forward(self, words):
        return self.wte(words) + self.wpe.weight[: words.shape[1]]


def layers(model):
    return [First(model), *model.h, nn.Sequential(model.ln_f, model.lm_head)]


def cut(stages):
    """The first layer of each stage, so that the longest stage is short; among equal cuts earlier stages have more layers."""
    count = len(COSTS)
    starts = [(0, *rest, count) for rest in itertools.combinations(range(1, count), stages - 1)]
    longest = {start: max(sum(COSTS[a:b]) for a, b in zip(start, start[1:])) for start in starts}
    least = min(longest.values())
    return max(start for start in starts if longest[start] <= least + 1e-9)


class Sleeping(nn.Module):
    """A stage that only sleeps. Its numbers are as many as a micro-batch of the GPT has; its parameter is there for the runtime."""

    def __init__(self, seconds):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(SIZE)), seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return x * self.weight


class Stage(pipelining.PipelineStage):
    def _get_init_p2p_neighbors_ops(self):
        """None: these messages warm up NCCL, and gloo cannot send one from a rank to itself, as ZB-V's stages would."""
        return []


class SleepingStage(Stage):
    def backward_one_chunk(self, *args, full_backward=True, **kwargs):
        time.sleep((2 if full_backward else 1) * self.submod.seconds)
        return super().backward_one_chunk(*args, full_backward=full_backward, **kwargs)

    def backward_weight_one_chunk(self, *args, **kwargs):
        time.sleep(self.submod.seconds)
        return super().backward_weight_one_chunk(*args, **kwargs)


def milliseconds(text):
    if not text.endswith("ms"):
        raise argparse.ArgumentTypeError("not a time; try 5ms")
    return float(text[:-2]) / 1e3


def own_stages(schedule, rank, ranks):
    """The numbers of a rank's stages: along a V for zbv."""
    if schedule == "zbv":
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * chunk for chunk in range(CHUNKS[schedule])]


def make_schedule(args, stages, loss_of):
    kind = SCHEDULES[args.schedule]
    # The first two are for a single stage.
    return kind(stages[0] if args.schedule in ("gpipe", "1f1b") else stages, args.micro_batches, loss_fn=loss_of)


def sleep(args, rank, ranks):
    chunks = CHUNKS[args.schedule]
    stage = lambda number: SleepingStage(Sleeping(args.sleep / chunks), number, ranks * chunks, torch.device("cpu"))
    stages = [stage(number) for number in own_stages(args.schedule, rank, ranks)]
    schedule = make_schedule(args, stages, lambda output, _target: output.reshape(-1)[:1].sum())
    x = torch.zeros(args.micro_batches * args.batch, args.places, SIZE, requires_grad=True)
    has_last = any(stage.is_last for stage in stages)
    inputs = (x,) if any(stage.is_first for stage in stages) else ()
    target = {"target": torch.zeros(args.micro_batches)} if has_last else {}
    # By default the kernel wakes a sleeper up to 50 us late.
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    times = []
    for _ in range(WARM_UP + args.steps):
        dist.barrier()
        began = time.perf_counter()
        schedule.step(*inputs, return_outputs=False, **target)
        times.append(time.perf_counter() - began)
    return times, None


def train(args, rank, ranks):
    whole = fill(Gpt())
    every = layers(whole)
    chunks = CHUNKS[args.schedule]
    starts = cut(ranks * chunks)
    part = lambda number: nn.Sequential(*every[starts[number] : starts[number + 1]])
    stage = lambda number: Stage(part(number), number, ranks * chunks, torch.device("cpu"))
    stages = [stage(number) for number in own_stages(args.schedule, rank, ranks)]
    parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    schedule = make_schedule(args, stages, lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()))
    has_first, has_last = (any(getattr(stage, name) for stage in stages) for name in ("is_first", "is_last"))
    texts = args.micro_batches * args.batch
    times, losses = [], []
    for step in range(WARM_UP + args.steps):
        inputs, targets = (every[-texts:] for every in tokens((step + 1) * texts, args.places, WORDS))
        of_step = []
        dist.barrier()
        began = time.perf_counter()
        schedule.step(
            *([inputs] if has_first else []),
            return_outputs=False,
            **({"target": targets, "losses": of_step} if has_last else {}),
        )
        times.append(time.perf_counter() - began)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(torch.stack(of_step).mean().item() if has_last else 0.0)
    return times, losses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=["pipeline"], default="pipeline")
    parser.add_argument("--schedule", choices=sorted(SCHEDULES), required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--places", type=int, default=128)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--sleep", type=milliseconds)
    parser.add_argument("--tuned", action="store_true")
    args = parser.parse_args()

    torch.set_num_threads(1)
    if args.tuned:
        torch.set_flush_denormal(True)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    times, losses = (train if args.sleep is None else sleep)(args, rank, ranks)
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    line = {"step_ms": 1e3 * statistics.median(slowest[WARM_UP:].tolist())}
    if losses is not None:
        # Only the rank with the last stage knows them.
        known = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(known)
        line["losses"] = known.tolist()
    if rank == 0:
        print(json.dumps(line), flush=True)
    # Gloo's threads sometimes abort the process, or wait for ever, while the interpreter is taken down.
    dist.barrier()
    os._exit(0)


main()
