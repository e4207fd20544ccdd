"""Activation checkpointing on one GPU: a GPT's training steps, ours and PyTorch's in turn; needs a GPU, torch 2.11 and a built drumline-bench.

  python3 bench/gpu/checkpointing.py --ours PATH/drumline-bench [--model gpt2-xl] [--batch 4] [--dropouts 0,0.1] [--blocks 2] [--steps 20] [--out FOLDER]

For each probability of dropout: what is kept (none, full, selective) on each side (ours eager and as a graph, PyTorch with fused AdamW and bf16
autocast), medians over blocks whose order rotates, and memory. The first losses without dropout must agree. Writes checkpointing.md and .csv.
"""
import argparse
import csv
import json
import os
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.join(HERE, "..", "..")
HOWS = ["none", "full", "selective"]
SIDES = ["ours:eager", "ours:graph", "pytorch:fused"]
COLUMNS = ["block", "dropout", "how", "side", "step_ms", "peak_bytes", "reserved_bytes", "loss_1", "loss_10"]
# First losses in bf16, ours against PyTorch's.
CLOSE = 3e-3
# At most: our step against our own step without checkpoints, and our peak against PyTorch's with full checkpoints. At least: PyTorch's step against ours.
MOST_STEP = {"full": 1.25, "selective": 1.08}
MOST_PEAK = 1.05
LEAST_SPEED = 1.3


def measure(options, dropout, how, side):
    who, mode = side.split(":")
    if who == "ours":
        command = [options.ours, "gpu", "--model", os.path.join(ROOT, "config", f"{options.model}.yaml"), "--precision", "bf16-master"]
    else:
        command = [sys.executable, os.path.join(HERE, "..", "peers", "gpu.py"), "--model", options.model, "--precision", "bf16"]
    command += ["--mode", mode, "--batch", str(options.batch), "--length", str(options.length), "--steps", str(options.steps)]
    command += ["--checkpoint", how, "--dropout", str(dropout)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout)
    if ended.returncode != 0:
        print(f"{side} {how} dropout {dropout}: exit code {ended.returncode}\n{ended.stderr[-2000:]}", flush=True)
        return None
    found = json.loads(next(line for line in reversed(ended.stdout.splitlines()) if line.startswith("{")))
    print(f"{side} {how} dropout {dropout}: {found['step_ms']:.2f} ms, {found['peak_bytes'] / 2**30:.2f} GiB", flush=True)
    return found


def table(rows):
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(str(cell).ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines)


def goals(dropout, times, peaks):
    rows = []
    for mode in ("eager", "graph"):
        side = f"ours:{mode}"
        for how, most in MOST_STEP.items():
            if (how, side) in times and ("none", side) in times:
                ratio = times[how, side] / times["none", side]
                rows.append(["PASS" if ratio <= most else "MISS", f"{how}, {mode}, dropout {dropout}: own step", f"<= {most}x", f"{ratio:.3f}x"])
        if ("full", side) in times and ("full", "pytorch:fused") in times:
            speed = times["full", "pytorch:fused"] / times["full", side]
            rows.append(["PASS" if speed >= LEAST_SPEED else "MISS", f"full, {mode}, dropout {dropout}: PyTorch's step", f">= {LEAST_SPEED}x", f"{speed:.2f}x"])
            peak = peaks["full", side] / peaks["full", "pytorch:fused"]
            rows.append(["PASS" if peak <= MOST_PEAK else "MISS", f"full, {mode}, dropout {dropout}: PyTorch's peak", f"<= {MOST_PEAK}x", f"{peak:.2f}x"])
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", required=True)
    parser.add_argument("--model", default="gpt2-xl")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--dropouts", default="0,0.1")
    parser.add_argument("--hows", default=",".join(HOWS))
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--out", default=".")
    options = parser.parse_args()
    sides, hows, dropouts = options.sides.split(","), options.hows.split(","), [float(p) for p in options.dropouts.split(",")]

    raw, wrong = [], []
    os.makedirs(options.out, exist_ok=True)
    for block in range(options.blocks):
        turn = block % len(sides)
        for dropout in dropouts:
            for how in hows:
                for side in sides[turn:] + sides[:turn]:
                    found = measure(options, dropout, how, side)
                    if found is None:
                        wrong.append(f"{side} {how} dropout {dropout}: failed, see above")
                        continue
                    raw.append([block, dropout, how, side, found["step_ms"], found["peak_bytes"], found["reserved_bytes"], found["losses"][0], found["losses"][9]])
                    # After each side, so that a run that is cut off has left something.
                    with open(os.path.join(options.out, "checkpointing.csv"), "w", newline="") as file:
                        csv.writer(file).writerows([COLUMNS, *raw])

    rows, reached = [["dropout", "kept", "side", "step ms", "of none", "peak GiB", "reserved GiB", "first loss"]], [["", "what", "goal", "measured"]]
    for dropout in dropouts:
        found = [row for row in raw if row[1] == dropout]
        of = lambda how, side, column: [row[column] for row in found if row[2:4] == [how, side]]  # noqa: E731
        measured = [(how, side) for how in hows for side in sides if of(how, side, 4)]
        times, peaks = ({key: statistics.median(of(*key, column)) for key in measured} for column in (4, 5))
        for how, side in measured:
            whole = times.get(("none", side))
            share = f"{times[how, side] / whole:.3f}" if whole else "-"
            loss = statistics.median(of(how, side, 7))
            rows.append([dropout, how, side, f"{times[how, side]:.2f}", share, f"{peaks[how, side] / 2**30:.2f}", f"{of(how, side, 6)[0] / 2**30:.2f}", f"{loss:.5f}"])
        losses = [row[7] for row in found]
        if dropout == 0 and losses and max(losses) - min(losses) > CLOSE * max(losses):
            wrong.append(f"first losses differ without dropout: {min(losses)} to {max(losses)}")
        reached += goals(dropout, times, peaks)

    import torch
    text = f"# Checkpointing {options.model}, batch {options.batch} x {options.length}, on {torch.cuda.get_device_name(0)}\n\n"
    text += f"`python3 bench/gpu/checkpointing.py --ours drumline-bench --blocks {options.blocks} --steps {options.steps}`; PyTorch {torch.__version__}, CUDA {torch.version.cuda}.\n\n"
    text += table(rows) + "\n" + ("\n" + table(reached) + "\n" if len(reached) > 1 else "")
    text += "\n".join(["", "Wrong:", *wrong, ""]) if wrong else ""
    print(text)
    with open(os.path.join(options.out, "checkpointing.md"), "w") as file:
        file.write(text)
    sys.exit(1 if wrong else 0)


main()
