"""Golden traces of PyTorch 2.11's GradScaler on a CPU, for the tests of drumline-torch.

    python bench/oracle/amp.py          # with torch 2.11; writes bench/oracle/golden/amp.safetensors

Two parameters make steps by gradients that are given; in those of `BAD` one of them is infinite or NaN. The file holds the
gradients of the unscaled loss (`grad.<step>.*`), the scale and its growth tracker after each step (`<case>.scale`, `<case>.tracker`),
and the parameters and counts of steps after each (`<case>.*`).
"""

import pathlib

import torch
from safetensors.torch import save_file

GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"
SHAPES = {"w": (4, 3), "b": (5,)}
STEPS = 24
BAD = {0: ("w", float("inf")), 5: ("b", float("nan")), 6: ("w", float("-inf")), 13: ("b", float("inf")), 20: ("w", float("nan"))}
# The Rust tests name the same cases.
CASES = {
    "sgd": (torch.optim.SGD, dict(lr=0.1), dict(growth_interval=3)),
    "sgd_momentum": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.05), dict(growth_interval=3)),
    "adamw": (torch.optim.AdamW, dict(lr=0.01), dict(init_scale=1024.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=5)),
    "clipped": (torch.optim.AdamW, dict(lr=0.01), dict(growth_interval=2)),
}
MAX_NORM = 0.5


def inputs():
    torch.manual_seed(7)
    given = {f"param.{name}": torch.randn(shape) for name, shape in SHAPES.items()}
    for step in range(STEPS):
        for name, shape in SHAPES.items():
            given[f"grad.{step}.{name}"] = torch.randn(shape)
        if step in BAD:
            name, value = BAD[step]
            given[f"grad.{step}.{name}"].view(-1)[1] = value
    return given


def run(given, case):
    make, options, scaling = CASES[case]
    params = {name: given[f"param.{name}"].clone().requires_grad_() for name in SHAPES}
    # The buffers of a first step that is left out are never filled by PyTorch's fused SGD: what is in them is chance. The plain loop has none.
    fused = make is not torch.optim.SGD
    optimizer = make(params.values(), fused=fused, **options)
    scaler = torch.amp.GradScaler("cpu", **scaling)
    scaler.scale(torch.zeros(()))  # makes the scale
    trace = {name: [] for name in ["scale", "tracker", "steps", *SHAPES]}
    for step in range(STEPS):
        for name, param in params.items():
            param.grad = given[f"grad.{step}.{name}"] * scaler.get_scale()
        if case == "clipped":
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params.values(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        trace["scale"].append(torch.tensor(scaler.get_scale()))
        trace["tracker"].append(torch.tensor(float(scaler._get_growth_tracker())))
        trace["steps"].append(optimizer.state[params["w"]].get("step", torch.zeros(())).clone().float())
        for name, param in params.items():
            trace[name].append(param.detach().clone())
    return {f"{case}.{name}": torch.stack(values) for name, values in trace.items()}


def main():
    torch.set_num_threads(1)
    given = inputs()
    tensors = dict(given)
    for case in CASES:
        tensors.update(run(given, case))
    save_file(tensors, GOLDEN / "amp.safetensors")


if __name__ == "__main__":
    main()
