"""Records what every program computes, to the bit, and compares two records; needs `drumline` and `drumline-train`, config/ and nothing else.

  python3 bench/bits/run.py record --programs FOLDER --out FILE.json [--cases GLOB] [--device cpu|cuda] [--repeat N] [--label TEXT]
  python3 bench/bits/run.py compare A.json B.json
  python3 bench/bits/run.py compact FILE.json --out base.json
  python3 bench/bits/run.py list [--device cpu|cuda]

README.md beside it says what is recorded and what can change bits.
"""
import argparse
import fnmatch
import json
import subprocess
import sys
import tempfile
import time

import comparing
import grid
from running import Failed, Runner


def machine(device):
    """What decides which kernels are taken."""
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            return "unknown GPU"
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        fields = dict(line.strip().split("\t", 1) for line in file if "\t" in line)
    fields = {key.strip(): value.split(":", 1)[-1].strip() for key, value in fields.items()}
    wide = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in fields.get("flags", "").split()]
    family = f"family {fields.get('cpu family')} model {fields.get('model')}"
    return f"{fields.get('model name', 'unknown CPU')}, {family}, {' '.join(wide)}"


def attempt(runner, case):
    try:
        return runner.record(case)
    except (Failed, OSError, ValueError) as error:
        labels = {"program": case.program.name, "ranks": case.ranks, "precision": case.precision, "options": case.options}
        return {**labels, "error": str(error) or repr(error)}


def record_case(runner, case, repeat, whole_of):
    """With what differs from run to run, and for a resumed run whether it ends as the uninterrupted one."""
    found = attempt(runner, case)
    unstable = set()
    for _ in range(repeat - 1):
        unstable |= set(comparing.differing(found, attempt(runner, case)))
    if unstable:
        found["unstable"] = sorted(unstable)
    if case.interrupted_by and "error" not in found:
        differences = comparing.differing(whole_of(case), found)
        found["resumed_equal"] = not differences
        if differences:
            found["resumed_difference"] = differences
    return found


def record(options):
    record = {"label": options.label, "device": options.device, "machine": machine(options.device), "cases": {}}
    chosen = [case for case in grid.cases(options.device) if fnmatch.fnmatch(case.name, options.cases)]
    if not chosen:
        sys.exit(f"no case matches {options.cases}; try run.py list")
    bad, began = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bits-") as work:
        runner = Runner(options.programs, options.device, work)

        def whole_of(case):
            whole = grid.uninterrupted(case)
            return record["cases"].get(whole.name) or attempt(runner, whole)

        for case in chosen:
            found = record_case(runner, case, options.repeat, whole_of)
            record["cases"][case.name] = found
            record.setdefault("libtorch", found.get("run", {}).get("libtorch"))
            words = found.get("error") or f"{found['seconds']} s, {len(found['steps'])} steps, last loss {found['steps'][-1]['loss']}"
            if "resumed_equal" in found:
                words += f", resumed from {found['interrupted']['checkpoint']}, ends " + ("as" if found["resumed_equal"] else "OTHERWISE than")
                words += f" the uninterrupted run {found.get('resumed_difference', '')}"
            words += f", NOT REPEATABLE: {', '.join(found['unstable'])}" if "unstable" in found else ""
            if "error" in found or found.get("resumed_equal") is False:
                bad.append(case.name)
            print(f"{case.name}: {words}", flush=True)
            # After each case, so that a recording that is cut short is worth something.
            write(record, options.out, indent=None)
    print(f"{len(chosen)} cases in {time.monotonic() - began:.0f} s, in {options.out}")
    return report_bad(bad)


def report_bad(bad):
    if bad:
        print(f"failed, or resumed to another end: {', '.join(bad)}")
    return 1 if bad else 0


def compare(options):
    text, equal = comparing.table(read(options.one), read(options.other))
    print(text)
    return 0 if equal else 1


def compact(options):
    write(comparing.compact(read(options.file)), options.out, indent=1)
    return 0


def read(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def write(value, path, indent):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=indent)
        file.write("\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("record", help="run the grid")
    command.add_argument("--programs", required=True, metavar="FOLDER", help="folder with drumline and drumline-train")
    command.add_argument("--out", required=True, metavar="FILE")
    command.add_argument("--cases", default="*", metavar="GLOB", help="only cases with such names")
    command.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    command.add_argument("--repeat", default=1, type=int, metavar="N", help="run each case N times, and note what differs from run to run")
    command.add_argument("--label", metavar="TEXT", help="kept in the record, such as the commit of the programs")
    command.set_defaults(do=record)
    command = commands.add_parser("compare", help="a table of two records")
    command.add_argument("one", metavar="A.json")
    command.add_argument("other", metavar="B.json")
    command.set_defaults(do=compare)
    command = commands.add_parser("compact", help="a record with hashes only")
    command.add_argument("file", metavar="FILE.json")
    command.add_argument("--out", required=True, metavar="FILE")
    command.set_defaults(do=compact)
    command = commands.add_parser("list", help="names of the cases")
    command.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    command.set_defaults(do=lambda options: print("\n".join(case.name for case in grid.cases(options.device))) or 0)
    options = parser.parse_args()
    return options.do(options)


if __name__ == "__main__":
    sys.exit(main())
