"""Steps of a GPT with ZeRO on a GPU, ours and PyTorch's FSDP2 and DDP in turn; needs a GPU, torch 2.11 and a built drumline-bench.

  python3 bench/gpu/shard.py --ours PATH/drumline-bench [--cases medium,xl,gpt2-2,gpt2-4] [--blocks 2] [--steps 20] [--out FOLDER]

Case `medium` is GPT-2 355M on one rank, `gpt2-2` GPT-2 124M on two ranks that share the GPU: over real NCCL, for both sides, with a host id for
each rank and NVIDIA's MPS, and ours by CUDA IPC as well. Every side trains on the same formula of weights and tokens; a side whose first loss differs fails the run. Times are
medians over blocks, whose order of sides rotates. Writes shard.md and shard.csv.
"""
import argparse
import csv
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
PEER = os.path.join(HERE, "..", "peers", "shard_gpu.py")
# Model, ranks, texts of each rank.
CASES = {
    "gpt2": ("gpt2", 1, 16),
    "medium": ("medium", 1, 8),
    "xl": ("xl", 1, 4),
    "gpt2-2": ("gpt2", 2, 8),
    "gpt2-4": ("gpt2", 4, 4),
}
ALONE = ["ours alone eager", "ours alone graph", "ours 3 eager", "ours 3 graph", "ours 3 eager alone", "ours 3 graph alone", "pytorch alone", "pytorch fsdp"]
SEVERAL = ["ours 0 eager ipc", "ours 3 eager ipc", "ours 0 eager", "ours 0 graph", "ours 1 eager", "ours 2 eager", "ours 3 eager", "ours 3 graph", "pytorch ddp", "pytorch fsdp"]
CLOSE = 5e-3


def command(side, case, options):
    size, _, batch = CASES[case]
    who, how, *rest = side.split()
    sized = ["--how", how, "--size", size, "--batch", str(batch), "--steps", str(options.steps)]
    if who == "pytorch":
        return [sys.executable, PEER, *sized]
    return [options.ours, "shard-gpu", *sized, "--mode", rest[0], *(["--shards-alone"] if "alone" in rest[1:] else [])]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def measure(side, case, options):
    ranks, port = CASES[case][1], free_port()
    route = "ipc" if "ipc" in side.split() else "nccl"
    started, errors = [], []
    for rank in range(ranks):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks),
                   MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DRUMLINE_SHARED_GPU=route,
                   NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        # In files: a rank that fills a pipe would wait for its reader, and the others for it.
        errors.append(tempfile.TemporaryFile("w+"))
        started.append(subprocess.Popen(command(side, case, options), env=env, text=True, stdout=subprocess.PIPE, stderr=errors[-1]))
    said, wrong = [], []
    for process, error in zip(started, errors):
        late = ""
        try:
            out, _ = process.communicate(timeout=options.timeout)
        except subprocess.TimeoutExpired:
            for other in started:
                other.kill()
            out, _ = process.communicate()
            late = f"no answer in {options.timeout} s\n"
        said.append(out)
        if process.returncode != 0:
            error.seek(0)
            wrong.append(late + error.read()[-1200:])
    if wrong:
        print(f"{case} {side}: failed\n{wrong[0]}", flush=True)
        return None
    found = json.loads(next(line for line in reversed(said[0].splitlines()) if line.startswith("{")))
    print(f"{case} {side}: {found['step_ms']:.2f} ms, peak {found['peak_bytes'] / 2**30:.2f} GiB, reserved {found['reserved_bytes'] / 2**30:.2f}, "
          f"losses {found['losses'][0]:.4f} {found['losses'][-1]:.4f}", flush=True)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ours", required=True)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--sides", default="")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--timeout", type=int, default=120)
    parser.add_argument("--out", default="results")
    options = parser.parse_args()
    os.makedirs(options.out, exist_ok=True)
    rows, failed, lines = [], False, []
    for case in options.cases.split(","):
        sides = options.sides.split(",") if options.sides else (ALONE if CASES[case][1] == 1 else SEVERAL)
        found = {side: [] for side in sides}
        for block in range(options.blocks):
            for side in sides[block % len(sides):] + sides[:block % len(sides)]:
                figures = measure(side, case, options)
                if figures is None:
                    failed = True
                    continue
                found[side].append(figures)
                rows.append([block, case, side, figures["step_ms"], figures["peak_bytes"], figures["reserved_bytes"], figures["losses"][0], figures["losses"][-1]])
        lines += [f"\n{case}: GPT {CASES[case][0]}, {CASES[case][1]} rank(s), {CASES[case][2]} x 1024 each\n", "| side | step, ms | peak, GiB | reserved, GiB | last loss |", "|---|---|---|---|---|"]
        first = None
        for side in sides:
            if not found[side]:
                continue
            middle = {key: statistics.median(figures[key] for figures in found[side]) for key in ("step_ms", "peak_bytes", "reserved_bytes")}
            losses = found[side][0]["losses"]
            first = first or losses[0]
            if abs(losses[0] - first) > CLOSE * first:
                print(f"{case} {side}: first loss {losses[0]}, others have {first}")
                failed = True
            lines.append(f"| {side} | {middle['step_ms']:.2f} | {middle['peak_bytes'] / 2**30:.2f} | {middle['reserved_bytes'] / 2**30:.2f} | {losses[-1]:.4f} |")
    with open(os.path.join(options.out, "shard.csv"), "w", newline="") as file:
        csv.writer(file).writerows([["block", "case", "side", "step_ms", "peak_bytes", "reserved_bytes", "loss_1", "loss_8"], *rows])
    with open(os.path.join(options.out, "shard.md"), "w") as file:
        file.write("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(failed)


main()
