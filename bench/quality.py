"""The loss that each optimizer reaches in the same steps: a GPT on texts, and ResNet-18 on images, both small and on a CPU.

    cargo build --release -p drumline-zoo
    python3 bench/quality.py --program target/release/drumline-train --out /tmp/quality        # prints a Markdown table

Every run has one rank, one thread and a fixed seed, and gives the same bits again on the same type of CPU. Finished runs in
`--out` are not repeated. Of the learning rates of a row the best is shown, by the loss on the validation set.
"""

import argparse
import json
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
GPT_STEPS, IMAGE_STEPS = 300, 96
# The optimizer's keys, and the learning rates that are tried: of the GPT, of ResNet-18.
ROWS = {
    "AdamW": (["OPTIM.METHOD", "adamw"], ["3e-3"], ["1e-3"]),
    "AdamW, bf16 moments": (["OPTIM.METHOD", "adamw", "OPTIM.MOMENTS", "bf16"], ["3e-3"], ["1e-3"]),
    "AdamW, 8-bit moments": (["OPTIM.METHOD", "adamw", "OPTIM.MOMENTS", "8bit"], ["3e-3"], ["1e-3"]),
    "Lion": (["OPTIM.METHOD", "lion", "OPTIM.BETAS", "[0.9, 0.99]"], ["3e-4", "1e-3"], ["1e-4", "3e-4"]),
    "LAMB": (["OPTIM.METHOD", "lamb"], ["1e-2", "3e-2"], ["1e-2", "3e-2"]),
    "Adafactor": (["OPTIM.METHOD", "adafactor"], ["1e-2", "3e-2"], ["1e-2", "3e-2"]),
    "AdamW, bf16 weights, masters copied": (["OPTIM.METHOD", "adamw", "PRECISION", "bf16-master"], ["3e-3"], []),
    "AdamW, bf16 weights, masters split": (
        ["OPTIM.METHOD", "adamw", "PRECISION", "bf16-master", "OPTIM.MASTER", "split"], ["3e-3"], []),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", required=True, type=pathlib.Path)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    args = parser.parse_args()
    args.program, args.out = args.program.resolve(), args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    make_data(args)
    print(f"| optimizer | GPT, {GPT_STEPS} steps | ResNet-18, {IMAGE_STEPS} steps |\n|---|---|---|")
    for name, (keys, gpt_rates, image_rates) in ROWS.items():
        cells = [best(args, keys, gpt_rates, gpt), best(args, keys, image_rates, images)]
        print(f"| {name} | {cells[0]} | {cells[1]} |", flush=True)


def make_data(args):
    if not (args.out / "story/valid.tokens").exists():
        call(args, "data", "synth-story", "--out", "story")
        for part in ["train", "valid"]:
            call(args, "data", "tokens", f"story/{part}.txt", "--out", f"story/{part}.tokens")
    if not (args.out / "cifar").exists():
        call(args, "data", "synth-cifar", "--out", "cifar", "--train", "2000", "--test", "500")


def best(args, keys, rates, train):
    losses = {rate: train(args, keys, rate) for rate in rates}
    if not losses:
        return ""
    rate = min(losses, key=losses.get)
    return f"{losses[rate]:.3f} ({rate})"


def gpt(args, keys, rate):
    return run(args, "gpt", "gpt-tiny", keys, rate, [
        "GPT.TRAIN", "story/train.tokens", "GPT.DEV", "story/valid.tokens", "TRAIN.MAX_STEPS", str(GPT_STEPS)])


def images(args, keys, rate):
    return run(args, "resnet18", "cifar-resnet18", keys, rate, [
        "TRAIN.DATASET", "cifar", "TRAIN.MAX_STEPS", str(IMAGE_STEPS), "RNG_SEED", "1", "OPTIM.WEIGHT_DECAY", "0.01"])


def run(args, kind, config, keys, rate, more):
    """Trains, unless that was done, and returns the loss on the validation set after the last step."""
    name = "-".join([kind, *keys[1::2], rate]).replace(" ", "")
    metrics = args.out / name / "metrics.jsonl"
    if not metrics.exists() or '"kind":"end"' not in metrics.read_text():
        call(args, "train", "--cfg", str(ROOT / f"config/{config}.yaml"), *more, *keys, "OPTIM.BASE_LR", rate,
             "OUT_DIR", name)
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [event["loss"] for event in events if event["kind"] == "eval"][-1]


def call(args, *words):
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with open(args.out / "log.txt", "a", encoding="utf-8") as log:
        subprocess.run([args.program, *words], check=True, cwd=args.out, env=environment, stdout=log, stderr=log)


if __name__ == "__main__":
    main()
