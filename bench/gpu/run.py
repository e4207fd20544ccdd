"""Training steps on one GPU, ours and PyTorch's in turn; needs a GPU, torch 2.11 and a built drumline-bench.

  python3 bench/gpu/run.py --ours PATH/drumline-bench [--cases resnet18-128,…] [--blocks 3] [--steps 100] [--out FOLDER] [--add]

Every side trains on the same formula of weights and images, so that losses are compared before times are: a side that computes something
else fails the run. Times are medians over blocks, whose order of sides rotates; PyTorch's compiled ways, which take a minute to start, are in the first
only. Writes gpu.md and gpu.csv into the folder; with --add it goes on from the CSV that is there.
"""
import argparse
import csv
import json
import os
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PEER = os.path.join(HERE, "..", "peers", "gpu.py")
PEER_MODES = ["eager", "fused", "compile", "reduce-overhead"]
COMPILED = ["compile", "reduce-overhead"]
COLUMNS = ["block", "case", "who", "mode", "step_ms", "first_step_s", "peak_bytes", "loss_1", "loss_10"]
IMAGES = {
    "resnet18-128": ("resnet18", 128, 32),
    "resnet18-1024": ("resnet18", 1024, 32),
    "resnet50-256": ("resnet50", 256, 224),
}
TOKENS = {"gpt2-16x1024": ("gpt2", 16, 1024)}
# Case, ours against which side, at least how many times as fast.
GOALS = [
    ("resnet18-128", "fused", 5.0),
    ("resnet18-128", "reduce-overhead", 2.0),
    ("resnet18-1024", "fused", 3.0),
    ("resnet50-256", "best", 1.1),
    ("gpt2-16x1024", "fused", 1.2),
]
# Floating-point operations of a step, forward and backward, for the share of the GPU's peak.
FLOPS = {
    "resnet18-128": 128 * 3 * 2 * 37.0e6,
    "resnet18-1024": 1024 * 3 * 2 * 37.0e6,
    "resnet50-256": 256 * 3 * 2 * 4.09e9,
    "gpt2-16x1024": 16 * 1024 * (6 * 124e6 + 12 * 12 * 768 * 1024),
}
# What products of matrices reach on an H200, as measured: bf16, 8192 x 8192 x 8192.
PEAK = 790e12
# The first loss, ours against PyTorch's in the same precision; later ones are told by rounding as much as by what was computed. In bf16 cuDNN's choice of
# kernels, another in each process, moves it by a few times that for a net whose last norms see one pixel of each image: so the middle of ours over all blocks and
# ways is compared with the middle of theirs, and no single one may be further off than MOST.
CLOSE = {"bf16": 1e-3, "fp32": 1e-5}
MOST = {"bf16": 3e-3, "fp32": 1e-5}
# In f32 the loss after a step shows backward and optimizer as well, of nets in which last bits do not tell it: ResNet-50's first step from these weights is so long that
# PyTorch's own second loss moves by 2 % where images are multiplied by 1 + 2e-7. From the third on last bits tell it in all nets.
SECOND = {"resnet18-128": 1e-3, "resnet18-1024": 1e-3, "gpt2-16x1024": 1e-3}


def arguments(case, mode, precision, steps):
    model, batch, edge = {**IMAGES, **TOKENS}[case]
    sized = ["--length", str(edge)] if case in TOKENS else ["--edge", str(edge)]
    return ["--model", model, "--mode", mode, "--precision", precision, "--batch", str(batch), *sized, "--steps", str(steps)]


def measure(side, case, options):
    who, mode = side
    program = [options.ours, "gpu"] if who == "ours" else [sys.executable, PEER]
    precision = "bf16-master" if who == "ours" and options.precision == "bf16" else options.precision
    command = program + arguments(case, mode, precision, options.steps)
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout)
    except subprocess.TimeoutExpired:
        print(f"{case} {who} {mode}: no answer in {options.timeout} s", flush=True)
        return None
    if ended.returncode != 0:
        print(f"{case} {who} {mode}: exit code {ended.returncode}\n{ended.stderr[-2000:]}", flush=True)
        return None
    found = json.loads(next(line for line in reversed(ended.stdout.splitlines()) if line.startswith("{")))
    print(f"{case} {who} {mode}: {found['step_ms']:.3f} ms, first step after {found['first_step_s']:.1f} s", flush=True)
    return found


def check_losses(case, found_by, precision):
    """Of all blocks: ours begin where PyTorch's do, and a batch that is seen again and again is learnt, by all."""
    firsts = {who: [found["losses"][0] for side, found in found_by if side[0] == who] for who in ("ours", "pytorch")}
    wrong = [f"{case} {' '.join(side)}: a batch that is seen again and again is not learnt: {found['losses'][-1]}"
             for side, found in found_by if found["losses"][-1] > found["losses"][0] / 2]
    missing = [who for who in firsts if not firsts[who]]
    if missing:
        return wrong + [f"{case}: nothing of {' and '.join(missing)} to compare"]
    ours, theirs = (statistics.median(firsts[who]) for who in ("ours", "pytorch"))
    size = max(1.0, abs(theirs))
    if abs(ours - theirs) > CLOSE[precision] * size:
        wrong.append(f"{case}: the middle of our first losses is {ours}, of PyTorch's {theirs}")
    wrong += [f"{case}: one of our first losses is {loss}, the middle of PyTorch's {theirs}" for loss in firsts["ours"] if abs(loss - theirs) > MOST[precision] * size]
    if precision == "fp32" and case in SECOND:
        second = statistics.median(found["losses"][1] for side, found in found_by if side[0] == "pytorch")
        wrong += [f"{case} {' '.join(side)}: the second loss is {found['losses'][1]}, PyTorch's {second}"
                  for side, found in found_by if side[0] == "ours" and abs(found["losses"][1] - second) > SECOND[case] * max(1.0, abs(second))]
    return wrong


def table(rows):
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(str(cell).ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines)


def write_csv(path, raw):
    """After each side, so that a run that is cut off has left something."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *raw])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", required=True)
    parser.add_argument("--cases", default=",".join(list(IMAGES) + list(TOKENS)))
    parser.add_argument("--sides", default="ours:eager,ours:graph," + ",".join(f"pytorch:{mode}" for mode in PEER_MODES))
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--out", default=".")
    parser.add_argument("--add", action="store_true", help="go on from the gpu.csv that lies there")
    options = parser.parse_args()
    sides = [tuple(side.split(":")) for side in options.sides.split(",")]

    raw, wrong, csv_path = [], [], os.path.join(options.out, "gpu.csv")
    results = {case: [] for case in options.cases.split(",")}
    unknown = [case for case in results if case not in {**IMAGES, **TOKENS}]
    if unknown:
        parser.error(f"unknown cases: {', '.join(unknown)}; expected some of {', '.join({**IMAGES, **TOKENS})}")
    if options.add and os.path.exists(csv_path):
        with open(csv_path, newline="") as file:
            raw = [[row[name] for name in COLUMNS] for row in csv.DictReader(file)]
    for block in range(options.blocks):
        for case in results:
            turned = sides[block % len(sides):] + sides[: block % len(sides)]
            for side in turned:
                if block > 0 and side[1] in COMPILED:
                    continue
                found = measure(side, case, options)
                if found is None:
                    wrong.append(f"{case} {' '.join(side)}: failed, see above")
                    continue
                results[case].append((side, found))
                raw.append([block, case, *side, found["step_ms"], found["first_step_s"], found["peak_bytes"], found["losses"][0], found["losses"][9]])
                write_csv(csv_path, raw)
    wrong += [line for case, found_by in results.items() for line in check_losses(case, found_by, options.precision)]

    times, firsts, memory, losses = {}, {}, {}, {}
    for _, case, who, mode, step_ms, first_step_s, peak_bytes, loss, _ in raw:
        key = (case, (who, mode))
        times.setdefault(key, []).append(float(step_ms))
        firsts.setdefault(key, []).append(float(first_step_s))
        losses.setdefault(key, []).append(float(loss))
        memory[key] = int(peak_bytes)

    median = {key: statistics.median(values) for key, values in times.items()}
    rows = [["case", "side", "step ms (least to most)", "steps/s", "MFU", "first step s", "peak GiB", "first loss"]]
    for case, side in median:
        values, flops = times[(case, side)], FLOPS.get(case)
        took = median[(case, side)]
        share = f"{flops / (took / 1e3) / PEAK:.1%}" if flops else "-"
        rows.append([case, " ".join(side), f"{took:.3f} ({min(values):.3f} to {max(values):.3f})", f"{1e3 / took:.1f}", share,
                     f"{statistics.median(firsts[(case, side)]):.2f}", f"{memory[(case, side)] / 2**30:.2f}",
                     f"{statistics.median(losses[(case, side)]):.5f}"])
    goals, measured = [["", "case", "against", "goal", "measured"]], {case for case, _ in median}
    for case, against, least in GOALS if options.precision == "bf16" else []:
        ours = min((median[key] for key in median if key[0] == case and key[1][0] == "ours"), default=None)
        wanted = PEER_MODES if against == "best" else [against]
        theirs = [median[(case, ("pytorch", mode))] for mode in wanted if (case, ("pytorch", mode)) in median]
        if case not in measured:
            continue
        if ours is None or len(theirs) < len(wanted):
            goals.append(["MISSING", case, f"PyTorch {against}", f">= {least}x", "not all sides were measured"])
            continue
        ratio = min(theirs) / ours
        goals.append(["PASS" if ratio >= least else "MISS", case, f"PyTorch {against}", f">= {least}x", f"{ratio:.2f}x"])
    for case in sorted(measured):
        ours, eager, compiled = (min(firsts.get((case, side), [0])) for side in [("ours", "graph"), ("pytorch", "fused"), ("pytorch", "compile")])
        if ours and eager and compiled:
            goals.append(["PASS" if compiled / ours >= 5 else "MISS", case, "first step, PyTorch compile", ">= 5x", f"{compiled / ours:.1f}x"])
            goals.append(["PASS" if eager >= ours else "MISS", case, "first step, PyTorch eager", ">= 1x", f"{eager / ours:.1f}x"])

    import torch
    text = f"# Training steps on {torch.cuda.get_device_name(0)}\n\n`python3 bench/gpu/run.py --ours drumline-bench`, {options.precision}, "
    text += f"{options.blocks} blocks of {options.steps} steps (compiled ways: 1), order rotated; PyTorch {torch.__version__}, CUDA {torch.version.cuda}.\n\n"
    text += table(rows) + "\n" + ("\n" + table(goals) + "\n" if len(goals) > 1 else "")
    text += "\n".join(["", "Wrong:", *wrong, ""]) if wrong else f"\nAll sides compute the same losses in {', '.join(results)}.\n"
    print(text)
    os.makedirs(options.out, exist_ok=True)
    with open(os.path.join(options.out, "gpu.md"), "w") as file:
        file.write(text)
    sys.exit(1 if wrong else 0)


main()
