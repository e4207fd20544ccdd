"""Steps of a GPT whose optimizer's state is in host memory, ours and PyTorch's FSDP2 in turn; needs a GPU, torch 2.11 and a built drumline-bench.

  python3 bench/gpu/offload.py --ours PATH/drumline-bench [--cases xl,6.7b] [--steps 6] [--out FOLDER]

Every side trains on the same formula of weights and tokens; a side whose first loss differs fails the run. `bound` is the larger one of a step
without the optimizer, and of what Adam reads and writes in host memory at the rate of a bare loop. Writes offload.md and offload.csv.
"""
import argparse
import csv
import json
import os
import socket
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PEER = os.path.join(HERE, "..", "peers", "shard_gpu.py")
CONFIGS = os.path.join(HERE, "..", "..", "config")
# Configuration, texts of a batch, what is kept of blocks.
CASES = {
    "xl": ("gpt2-xl.yaml", 4, "none"),
    "6.7b": ("gpt-6.7b.yaml", 4, "full"),
}
SIDES = ["ours none", "ours host", "ours host in-backward", "ours auto", "pytorch", "pytorch offload"]
CLOSE = 1e-2


def command(side, case, options):
    config, batch, checkpoint = CASES[case]
    who, *rest = side.split()
    sized = ["--batch", str(batch), "--steps", str(options.steps)]
    if who == "pytorch":
        kept = ["--checkpoint"] if checkpoint == "full" else []
        return [sys.executable, PEER, "--how", "fsdp", "--size", case, *sized, *kept, *(["--offload"] if rest else [])]
    return [options.ours, "offload", "--model", os.path.join(CONFIGS, config), "--to", rest[0], "--checkpoint", checkpoint, *sized, *(["--in-backward"] if rest[1:] else [])]


def measure(side, case, options):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = dict(os.environ, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        done = subprocess.run(command(side, case, options), env=env, text=True, capture_output=True, timeout=options.timeout)
    except subprocess.TimeoutExpired:
        print(f"{case} {side}: no answer in {options.timeout} s", flush=True)
        return None
    if done.returncode != 0:
        print(f"{case} {side}: failed\n{done.stderr[-1200:]}", flush=True)
        return None
    found = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))
    print(f"{case} {side}: {json.dumps(found)}", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ours", required=True)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--timeout", type=int, default=280)
    parser.add_argument("--out", default="results")
    options = parser.parse_args()
    os.makedirs(options.out, exist_ok=True)
    rows, failed, lines = [], False, []
    for case in options.cases.split(","):
        config, batch, checkpoint = CASES[case]
        lines += [f"\n{case}: {config}, {batch} x 1024, checkpointing {checkpoint}\n", "| side | step, ms | bound, ms | peak, GiB | last loss |", "|---|---|---|---|---|"]
        first = None
        for side in options.sides.split(","):
            found = measure(side, case, options)
            if found is None:
                failed = True
                continue
            losses = found["losses"]
            first = first or losses[0]
            if abs(losses[0] - first) > CLOSE * first:
                print(f"{case} {side}: first loss {losses[0]}, others have {first}")
                failed = True
            bound = max(found["compute_ms"], found["adam_at_bandwidth_ms"]) if "compute_ms" in found else None
            rows.append([case, side, found["step_ms"], bound, found["peak_bytes"], losses[0], losses[-1]])
            lines.append(f"| {side} | {found['step_ms']:.1f} | {'' if bound is None else f'{bound:.1f}'} | {found['peak_bytes'] / 2**30:.2f} | {losses[-1]:.4f} |")
    with open(os.path.join(options.out, "offload.csv"), "w", newline="") as file:
        csv.writer(file).writerows([["case", "side", "step_ms", "bound_ms", "peak_bytes", "loss_1", "last_loss"], *rows])
    with open(os.path.join(options.out, "offload.md"), "w") as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(failed)


main()
