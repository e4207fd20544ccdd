#!/usr/bin/env python3
"""Activation checkpointing of a GPT on a CPU: ours beside torch.utils.checkpoint, in turns.

    PEER_PYTHON=/path/to/python-with-torch python3 bench/checkpointing/run.py --ours target/release/drumline-bench [--blocks 5]

Losses are compared first. Prints a table of medians over blocks: the time of forward and backward, its processor time (the
difference of two runs with different numbers of steps, which other programs disturb less), what is kept between forward and
backward, and the peak of the process's memory.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
HOWS = ["none", "full", "selective", "second"]


# Runs a program, and adds what the system says of it to its line.
MEASURE = """
import json, resource, subprocess, sys
out = subprocess.run(sys.argv[1:], check=True, capture_output=True, text=True).stdout
line, used = json.loads(out.splitlines()[-1]), resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({**line, "peak": used.ru_maxrss * 1024, "cpu_ms": (used.ru_utime + used.ru_stime) * 1e3}))
"""


def run_steps(command, args, how, steps):
    command = command + ["--how", how, "--size", args.size, "--batch", str(args.batch), "--places", str(args.places)]
    command += ["--steps", str(steps), "--threads", str(args.threads)]
    out = subprocess.run([sys.executable, "-c", MEASURE, *command], check=True, capture_output=True, text=True).stdout
    return json.loads(out)


def run(command, args, how):
    one, all = run_steps(command, args, how, 1), run_steps(command, args, how, 1 + args.steps)
    return {**all, "cpu_ms": (all["cpu_ms"] - one["cpu_ms"]) / args.steps}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ours", required=True)
    parser.add_argument("--size", default="mini")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--places", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=5)
    args = parser.parse_args()
    sides = {
        "Drumline": [args.ours, "checkpoint"],
        "PyTorch": [os.environ["PEER_PYTHON"], str(HERE / "torch_gpt.py")],
    }
    found = {}
    for block in range(args.blocks):
        order = [(side, how) for how in HOWS for side in sides]
        order = order[block % len(order):] + order[: block % len(order)]
        for side, how in order:
            found.setdefault((side, how), []).append(run(sides[side], args, how))
    # PyTorch's weights of linear layers begin at another place of the formula's order, and kernels round in another way.
    losses = {key: lines[0]["losses"][0] for key, lines in found.items()}
    for (side, how), loss in losses.items():
        first = losses["Drumline", "none"]
        assert abs(loss - first) < 1e-3 * first, f"{side} {how}: loss {loss}, expected {first}"
    print("| | none | full | selective | every second |\n|---|---|---|---|---|")

    def line(side, name, value):
        cells = [statistics.median(values) if None not in (values := [value(line) for line in found[side, how]]) else None for how in HOWS]
        print(f"| {side}: {name} | " + " | ".join("not counted" if cell is None else f"{cell:.0f}" for cell in cells) + " |")
        return cells

    steps = {}
    for side in sides:
        line(side, "forward and backward, ms", lambda found: found["step_ms"])
        steps[side] = line(side, "processor time of it, ms", lambda found: found["cpu_ms"])
        line(side, "kept between them, MB", lambda found: None if found["saved_bytes"] is None else found["saved_bytes"] / 1e6)
        line(side, "peak of the process, MB", lambda found: found["peak"] / 1e6)
    for side in sides:
        more = [f"{step / steps[side][0] - 1:+.0%}" for step in steps[side]]
        print(f"| {side}: processor time added | " + " | ".join(more) + " |")
    print("| Drumline against PyTorch, processor time | " + " | ".join(f"{theirs / ours:.2f}x" for ours, theirs in zip(*steps.values())) + " |")


main()
