"""Steps of PyTorch's optimizers alone, on tensors of GPT-2's shapes: the side of PyTorch for `drumline-bench optim`.

    python bench/optim.py [--threads 2] [--steps 10]        # with torch 2.11; prints one JSON line for each optimizer
"""

import argparse
import json
import time

import torch

LAYERS, WIDTH, TOKENS, PLACES = 12, 768, 50304, 1024
BLOCK = [(WIDTH,), (WIDTH,), (WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,), (WIDTH,), (WIDTH,),
         (WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,)]
SHAPES = [(TOKENS, WIDTH), (PLACES, WIDTH), *BLOCK * LAYERS, (WIDTH,), (WIDTH,)]
OPTIMIZERS = {
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=True),
    "Adafactor, foreach": lambda params: torch.optim.Adafactor(params, foreach=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, foreach=False),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name, make in OPTIMIZERS.items():
        params = [torch.nn.Parameter(torch.arange(torch.Size(shape).numel()).sin().view(shape)) for shape in SHAPES]
        for param in params:
            param.grad = (param.detach() * 1e-3).sin()
        optimizer, times = make(params), []
        for _ in range(2 + args.steps):
            began = time.perf_counter()
            optimizer.step()
            times.append(time.perf_counter() - began)
        step = sorted(times[2:])[args.steps // 2]
        numel = sum(param.numel() for param in params)
        print(json.dumps({"which": name, "parameters": numel, "step_ms": step * 1e3, "parameters_per_s": numel / step}))
        del params, optimizer


if __name__ == "__main__":
    main()
