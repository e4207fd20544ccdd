"""Golden steps of PyTorch 2.11's optimizers, of others from their formulas, and clipped gradients, for the tests of
drumline-torch.

    python bench/oracle/optim.py        # with torch 2.11; writes bench/oracle/golden/optim.safetensors and clip.safetensors

Three parameters make ten steps under a changing learning rate; `b` has no gradient in some of them, the first included. The
file holds what goes in (`param.*`, `grad.<step>.*`, `lr`) and, for each case, the parameters after each step
(`<case>.*`, steps first) and the state at the end (`<case>.state.*`). The Rust tests name the same cases.
"""

import pathlib

import torch
from formulas import Lamb, Lion, TransformersAdafactor
from safetensors.torch import save_file

GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"
SHAPES = {"w": (4, 3), "b": (5,), "conv": (2, 3, 2, 2)}
STEPS = 10
WITHOUT = {0, 3, 6, 7}  # steps in which `b` has no gradient
SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
Adafactor, Adagrad = torch.optim.Adafactor, torch.optim.Adagrad
CASES = {
    "sgd": (SGD, {}),
    "sgd_momentum": (SGD, dict(momentum=0.9)),
    "sgd_dampening": (SGD, dict(momentum=0.8, dampening=0.3)),
    "sgd_nesterov": (SGD, dict(momentum=0.9, nesterov=True)),
    "sgd_weight_decay": (SGD, dict(weight_decay=0.1)),
    "sgd_nesterov_all": (SGD, dict(momentum=0.95, nesterov=True, weight_decay=5e-2, maximize=True)),
    "sgd_dampening_all": (SGD, dict(momentum=0.7, dampening=0.5, weight_decay=5e-2, maximize=True)),
    "adam": (Adam, {}),
    "adam_odd": (Adam, dict(betas=(0.7, 0.9), eps=1e-3, weight_decay=0.2, maximize=True)),
    "adam_amsgrad": (Adam, dict(betas=(0.5, 0.6), weight_decay=0.1, amsgrad=True)),
    "adamw": (AdamW, {}),
    "adamw_odd": (AdamW, dict(betas=(0.7, 0.9), eps=1e-3, weight_decay=0.2, maximize=True)),
    "adamw_amsgrad": (AdamW, dict(betas=(0.5, 0.6), weight_decay=0.1, amsgrad=True)),
    "lion": (Lion, {}),
    "lion_odd": (Lion, dict(betas=(0.7, 0.9), weight_decay=0.2, maximize=True)),
    "lamb": (Lamb, dict(weight_decay=0.1)),
    "lamb_unbounded": (Lamb, dict(betas=(0.7, 0.9), eps=1e-3, min_coeff=0.0, max_coeff=float("inf"), maximize=True)),
    "lamb_deepspeed": (Lamb, dict(weight_decay=0.1, correction="step")),
    "adafactor": (Adafactor, {}),
    "adafactor_odd": (Adafactor, dict(beta2_decay=-0.5, eps=(1e-3, 1e-2), d=1.5, weight_decay=0.2, maximize=True)),
    "adafactor_warmup": (TransformersAdafactor, dict(warmup_init=True)),
    "adafactor_fixed": (TransformersAdafactor, dict(relative_step=False, scale_parameter=False)),
    "adagrad": (Adagrad, {}),
    "adagrad_odd": (
        Adagrad,
        dict(lr_decay=0.1, weight_decay=0.2, initial_accumulator_value=0.5, eps=1e-3, maximize=True),
    ),
}


def inputs():
    torch.manual_seed(4)
    given = {f"param.{name}": torch.randn(shape) for name, shape in SHAPES.items()}
    for step in range(STEPS):
        for name, shape in SHAPES.items():
            if name != "b" or step not in WITHOUT:
                given[f"grad.{step}.{name}"] = torch.randn(shape) * 10 ** ((step % 4) - 2)
    given["lr"] = torch.tensor([0.1 * 0.8**step for step in range(STEPS)], dtype=torch.float64)
    return given


def run(given, make, options):
    params = {name: given[f"param.{name}"].clone().requires_grad_() for name in SHAPES}
    # The plain loop is the definition; foreach and fused are faster ways to the same.
    optimizer = make(params.values(), lr=1.0, foreach=False, **options)
    after = {name: [] for name in SHAPES}
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = given["lr"][step].item()
        for name, param in params.items():
            grad = given.get(f"grad.{step}.{name}")
            param.grad = None if grad is None else grad.clone()
        optimizer.step()
        for name, param in params.items():
            after[name].append(param.detach().clone())
    result = {name: torch.stack(steps) for name, steps in after.items()}
    for name, param in params.items():
        for slot, tensor in optimizer.state[param].items():
            if isinstance(tensor, torch.Tensor):
                result[f"state.{name}.{slot}"] = tensor.clone()
    return result


def clipped(given):
    """Gradients of step 5 after clipping, by norm (the norm before it, too) and by value."""
    result = {}
    for norm_type, norm_name in [(2.0, "l2"), (float("inf"), "inf")]:
        for max_norm in [0.5, 1e3]:
            params = with_grads(given)
            norm = torch.nn.utils.clip_grad_norm_(params.values(), max_norm, norm_type=norm_type)
            case = f"{norm_name}.{max_norm:g}"
            result[f"{case}.norm"] = norm
            result.update({f"{case}.{name}": param.grad for name, param in params.items()})
    params = with_grads(given)
    torch.nn.utils.clip_grad_value_(params.values(), 0.25)
    result.update({f"value.{name}": param.grad for name, param in params.items()})
    result.update({f"grad.{name}": given[f"grad.5.{name}"] for name in SHAPES})
    return result


def with_grads(given):
    params = {name: given[f"param.{name}"].clone().requires_grad_() for name in SHAPES}
    for name, param in params.items():
        param.grad = given[f"grad.5.{name}"].clone()
    return params


def main():
    torch.set_num_threads(1)
    GOLDEN.mkdir(exist_ok=True)
    given = inputs()
    tensors = dict(given)
    for case, (make, options) in CASES.items():
        tensors.update({f"{case}.{name}": tensor for name, tensor in run(given, make, options).items()})
    save_file(tensors, GOLDEN / "optim.safetensors")
    save_file(clipped(given), GOLDEN / "clip.safetensors")


if __name__ == "__main__":
    main()
