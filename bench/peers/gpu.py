"""PyTorch's side of the steps that are timed on a GPU.

  gpu.py --model resnet18 --mode eager|fused|compile|reduce-overhead --batch 128 --edge 32 --steps 100 [--precision fp32]
  gpu.py --model gpt2-xl --mode fused --batch 4 --steps 20 --checkpoint full --dropout 0.1

Trains on one batch again and again and prints one JSON line. `eager` is the optimizer as it comes (foreach), the other modes take the
fused one. All but fp32 train in channels_last under bf16 autocast, as PyTorch's guides advise.
"""
import time

began = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import sys  # noqa: E402

import torch  # noqa: E402

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from gpt2 import Gpt2, checkpointed, tokens  # noqa: E402
from resnet18 import ResNet18, batch, fill  # noqa: E402
from resnet50 import ResNet50  # noqa: E402

WARM_UP = 10
# Layers, heads and size.
GPTS = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600)}
CHUNK = 10


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["resnet18", "resnet50", *GPTS], required=True)
    parser.add_argument("--mode", choices=["eager", "fused", "compile", "reduce-overhead"], required=True)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--edge", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--checkpoint", choices=["none", "full", "selective"], default="none", help="of each block of a GPT")
    parser.add_argument("--dropout", type=float, default=0.0, help="of a GPT")
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()

    torch.backends.cudnn.benchmark = True
    if args.precision == "fp32":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    fused = {} if args.mode == "eager" else {"fused": True}
    if args.model in GPTS:
        with torch.device("cuda"):
            net = Gpt2(*GPTS[args.model], dropout=args.dropout)
        checkpointed(fill(net), args.checkpoint)
        inputs, targets = (part.cuda() for part in tokens(args.batch, args.length))
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, **fused)
    else:
        network = {"resnet18": ResNet18, "resnet50": ResNet50}[args.model]
        net = fill(network(1000 if args.edge > 64 else 10)).cuda().to(memory_format=torch.channels_last)
        inputs, targets = batch(0, 0, 1, args.batch, edge=args.edge)
        inputs, targets = inputs.cuda().contiguous(memory_format=torch.channels_last), targets.cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5, nesterov=True, **fused)
    def forward(inputs, targets):
        logits = net(inputs)
        return torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())

    if args.mode == "compile":
        forward = torch.compile(forward)
    elif args.mode == "reduce-overhead":
        forward = torch.compile(forward, mode="reduce-overhead")

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=args.precision == "bf16"):
            loss = forward(inputs, targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses, times = [], []
    first_step = None
    for _ in range(WARM_UP):
        losses.append(step().item())
        first_step = first_step or time.perf_counter() - began
    for _ in range(-(-args.steps // CHUNK)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CHUNK):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3 / CHUNK)
    losses.append(step().item())
    took = statistics.median(times)
    print(json.dumps({"step_ms": took, "per_s": args.batch / took * 1e3, "losses": losses, "first_step_s": first_step,
                      "peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}), flush=True)


main()
