"""Several ranks on one GPU against one rank with the whole batch: the same losses, and what it costs; needs a GPU and built binaries.

  python3 bench/gpu/staged.py --drumline PATH/drumline --ours PATH/drumline-train [--ranks 2,4] [--steps 30] [--out FOLDER]

ResNet-18 on 32 x 32 images in f32 without TF32, batch norms over all ranks, so that only the order of sums differs. One rank is run twice, as cuDNN's
order differs from run to run as well: what comes of that is the control. Writes staged.md.
"""
import argparse
import json
import os
import subprocess
import sys

BATCH = 128
CLOSE = 1e-4


def train(options, ranks):
    program = [options.ours, "bench-step", "--mode", "ddp", "--gpu", "--sync-norm", "--batch", str(BATCH // ranks), "--steps", str(options.steps), "--lr", "0.001"]
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
    one, wrong = train(options, 1), []
    rows = [f"| 1 | {one['step_ms']:.2f} | {one['losses'][0]:.6f} | {one['losses'][9]:.6f} | - |"]
    for ranks in [1, *map(int, options.ranks.split(","))]:
        found = train(options, ranks)
        off = max(abs(a - b) / max(1.0, abs(a)) for a, b in zip(one["losses"][:10], found["losses"][:10]))
        if off > CLOSE:
            wrong.append(f"{ranks} ranks: losses differ by {off:.1e}: {one['losses'][:10]} {found['losses'][:10]}")
        rows.append(f"| {ranks}{' again' if ranks == 1 else ''} | {found['step_ms']:.2f} | {found['losses'][0]:.6f} | {found['losses'][9]:.6f} | {off:.1e} |")
    text = f"# Ranks that share one GPU\n\nResNet-18, {BATCH} images of 32 x 32 in all, f32 without TF32, SyncBatchNorm, collectives through the host's memory:\n"
    text += "`python3 bench/gpu/staged.py --drumline drumline --ours drumline-train`\n\n"
    text += "| ranks | step ms | loss 1 | loss 10 | losses 1 to 10 differ by |\n| --- | --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"
    text += "\n".join(["", *wrong, ""]) if wrong else "\nLosses are those of one rank.\n"
    print(text)
    os.makedirs(options.out, exist_ok=True)
    with open(os.path.join(options.out, "staged.md"), "w") as file:
        file.write(text)
    sys.exit(1 if wrong else 0)


main()
