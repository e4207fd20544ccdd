#!/usr/bin/env python3
"""Many ranks meet: our store beside PyTorch's TCPStore, interleaved in one run.

    PEER_PYTHON=/path/to/python-with-torch python3 bench/rendezvous/run.py [--sizes 1250,2500] [--rounds 5]

Both run in a network namespace of their own where that is allowed: PyTorch looks up the name of every peer, and
a slow name server would be all that is measured. Writes bench/results/<date>-rendezvous.{md,csv}.
"""

import argparse
import csv
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = HERE.parent / "results"
ISOLATED = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def build():
    subprocess.run(
        ["cargo", "build", "--quiet", "--release", "-p", "drumline-rendezvous", "--example", "meet"],
        cwd=ROOT,
        check=True,
    )
    metadata = subprocess.run(
        ["cargo", "metadata", "--format-version=1", "--no-deps"], cwd=ROOT, check=True, capture_output=True
    )
    return pathlib.Path(json.loads(metadata.stdout)["target_directory"]) / "release" / "examples" / "meet"


def can_isolate():
    try:
        return subprocess.run(ISOLATED + ["true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def measure(command):
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if result.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{result.stderr[-2000:]}")
    return json.loads(result.stdout.splitlines()[-1])


def table(rows, sizes, names, note):
    def median(name, size, field):
        return statistics.median(row[field] for row in rows if (row["store"], row["ranks"]) == (name, size))

    lines = ["# Many ranks meet: set + get + barrier per rank", "", note, ""]
    lines += ["| ranks | " + " | ".join(f"{name}, s (µs a rank)" for name in names) + " | ratio |"]
    lines += ["|---:|" + "---:|" * (len(names) + 1)]
    for size in sizes:
        totals = [median(name, size, "total_s") for name in names]
        cells = [f"{total:.3f} ({total / size * 1e6:.0f})" for total in totals]
        ratio = f"{totals[-1] / totals[0]:.2f}×" if len(totals) > 1 else ""
        lines += [f"| {size:,} | " + " | ".join(cells) + f" | {ratio} |"]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1250,2500,5000,10000")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=4, help="processes that hold PyTorch's clients")
    parser.add_argument("--threads", type=int, default=1, help="threads in each of them")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]

    python = os.environ.get("PEER_PYTHON", "python3")
    version = subprocess.run([python, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True)
    peers = {"drumline": [build()]}
    if version.returncode == 0:
        clients = ["--processes", str(options.processes), "--threads", str(options.threads)]
        peers["TCPStore"] = [python, HERE / "tcpstore.py", *clients]
    else:
        print("no torch in PEER_PYTHON: measuring ours only", file=sys.stderr)

    isolated = can_isolate()
    rows = []
    for turn in range(options.rounds):
        for size in sizes:
            for name, command in peers.items():
                prefix = ISOLATED if isolated else []
                result = measure(prefix + [str(part) for part in command] + ["--ranks", str(size)])
                rows.append({"round": turn, "store": name, **result})
                print(rows[-1], file=sys.stderr)

    note = (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores ({platform.machine()}), Linux {'.'.join(platform.release().split('.')[:2])}, "
        f"PyTorch {version.stdout.strip() or 'absent'}. Median of {options.rounds} interleaved rounds, from the first connect to "
        f"the last rank through the barrier; loopback{', no name server' if isolated else ''}. The server has a process of its own; "
        f"our ranks are sockets of one event loop, TCPStore's are blocking clients in {options.processes} processes. Ours "
        "includes the mutual proof of the job key; TCPStore has none."
    )
    RESULTS.mkdir(exist_ok=True)
    text = table(rows, sizes, list(peers), note)
    name = f"{time.strftime('%Y-%m-%d')}-rendezvous"
    (RESULTS / f"{name}.md").write_text(text)
    with open(RESULTS / f"{name}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    print(text)


if __name__ == "__main__":
    main()
