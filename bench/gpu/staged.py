"""Several ranks on one GPU against one rank with the whole batch: the same losses, and what it costs; needs a GPU and built binaries.

  python3 bench/gpu/staged.py --drumline PATH/drumline --ours PATH/drumline-bench [--ranks 2,4] [--steps 30] [--out FOLDER]

ResNet-18 on 32 x 32 images, batch norms over all ranks, so that only the order of sums differs. Losses are compared in f64: in f32 one rank alone has
other losses after a few steps when it is run again, as cuDNN's sums have no fixed order, and this net makes much of last bits. Times are those of f32. Writes staged.md.
"""
import argparse
import json
import os
import subprocess
import sys

BATCH = 128
COMPARED = 10
# The loss itself is rounded to f32.
CLOSE = 1e-6


def train(options, ranks, steps, *more):
    program = [options.ours, "step", "--mode", "ddp", "--gpu", "--sync-norm", "--batch", str(BATCH // ranks), "--steps", str(steps), *more]
    command = [options.drumline, "run", "--nproc-per-node", str(ranks), *program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if ended.returncode != 0:
        sys.exit(f"{ranks} ranks: exit code {ended.returncode}\n{ended.stderr[-3000:]}")
    return json.loads(next(line[line.index("{"):] for line in reversed(ended.stdout.splitlines()) if "{" in line))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drumline", required=True)
    parser.add_argument("--ours", required=True)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", default=".")
    options = parser.parse_args()
    rows, wrong, one = [], [], None
    for ranks in [1, *map(int, options.ranks.split(","))]:
        losses = train(options, ranks, COMPARED, "--double")["losses"][:COMPARED]
        took = train(options, ranks, options.steps)["step_ms"]
        one = one or (losses, took)
        off = max(abs(a - b) for a, b in zip(one[0], losses))
        if off > CLOSE:
            wrong.append(f"{ranks} ranks: losses differ by {off:.1e}: {one[0]} {losses}")
        rows.append(f"| {ranks} | {took:.2f} | {took / one[1]:.1f}x | {losses[0]:.9f} | {losses[-1]:.9f} | {off:.1e} |")
    text = f"# Ranks that share one GPU\n\nResNet-18, {BATCH} images of 32 x 32 in all, SyncBatchNorm, collectives through the host's memory; steps in f32 without TF32, losses in f64:\n"
    text += "`python3 bench/gpu/staged.py --drumline drumline --ours drumline-bench`\n\n"
    text += f"| ranks | step ms | against 1 | loss 1 | loss {COMPARED} | losses 1 to {COMPARED} differ by |\n| --- | --- | --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"
    text += "\n".join(["", *wrong, ""]) if wrong else "\nLosses are those of one rank.\n"
    print(text)
    os.makedirs(options.out, exist_ok=True)
    with open(os.path.join(options.out, "staged.md"), "w") as file:
        file.write(text)
    sys.exit(1 if wrong else 0)


main()
