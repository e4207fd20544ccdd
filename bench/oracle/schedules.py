"""Golden learning rates, for the tests of drumline's schedules.

    python bench/oracle/schedules.py        # with torch 2.11; writes bench/oracle/golden/{schedules,plateau}.json

PyTorch's schedulers are run as they are. Distribuuuu's, DeepSpeed's (as of its commit 22779f2) and NJUNMT's are written down here as
formulas: the learning rate of step k is what the program would have set before step k.
"""

import json
import math
import pathlib

import torch
from torch.optim import lr_scheduler

GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"


def torch_lrs(make, base_lr, counts):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=base_lr)
    scheduler = make(optimizer)
    lrs = []
    for _ in range(counts):
        lrs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return lrs


def torch_case(name, params, base_lr, counts, per="epoch", steps_per_epoch=3):
    lrs = torch_lrs(lambda optimizer: getattr(lr_scheduler, name)(optimizer, **params), base_lr, counts)
    if per == "epoch":
        lrs = [lr for lr in lrs for _ in range(steps_per_epoch)]
    return case(name, {**params, "per": per}, base_lr, lrs, steps_per_epoch)


def case(name, params, base_lr, lrs, steps_per_epoch=3):
    policy = {"type": name} if params is None else {"type": name, "params": params}
    return {
        "schedule": {"base_lr": base_lr, "policy": policy},
        "steps_per_epoch": steps_per_epoch,
        "lr": lrs,
    }


DISTRIBUUUU = dict(lr_policy="cos", max_epoch=100, min_lr=0.0, steps=[], lr_mult=0.1, warmup_factor=0.1, warmup_epochs=5)


def distribuuuu_case(base_lr, epochs, **params):
    p = {**DISTRIBUUUU, **params}

    def lr(epoch):
        if p["lr_policy"] == "cos":
            factor = p["min_lr"] + (1 - p["min_lr"]) * (1 + math.cos(math.pi * epoch / p["max_epoch"])) / 2
        else:
            factor = p["lr_mult"] ** (sum(epoch >= step for step in p["steps"]) - 1)
        if epoch < p["warmup_epochs"]:
            done = epoch / p["warmup_epochs"]
            factor *= p["warmup_factor"] + (1 - p["warmup_factor"]) * done
        return base_lr * factor

    return case("Distribuuuu", params, base_lr, [lr(epoch) for epoch in range(epochs) for _ in range(2)], 2)


def rise(i, warmup, kind):
    return i / warmup if kind == "linear" else math.log(i + 1) / math.log(warmup)


def formula_case(name, formula, base_lr, steps, **params):
    return case(name, params, base_lr, [formula(k, base_lr, **params) for k in range(steps)])


def warmup_lr(k, base_lr, warmup_min_lr=0.0, warmup_max_lr=None, warmup_num_steps=1000, warmup_type="log"):
    top = base_lr if warmup_max_lr is None else warmup_max_lr
    warmup, i = max(2, warmup_num_steps), k - 1
    part = 0 if i < 0 else rise(i, warmup, warmup_type) if i < warmup else 1
    return warmup_min_lr + (top - warmup_min_lr) * part


def warmup_decay_lr(
    k, _, total_num_steps, warmup_min_lr=0.0, warmup_max_lr=0.001, warmup_num_steps=1000, warmup_type="log"
):
    warmup, i = max(2, warmup_num_steps), k - 1
    if i < 0:
        part = 0
    elif i < warmup:
        part = rise(i, warmup, warmup_type)
    else:
        part = max(0.0, (total_num_steps - i) / max(1.0, total_num_steps - warmup))
    return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * part


def warmup_cosine_lr(
    k, base_lr, total_num_steps, warmup_min_ratio=0.0, warmup_num_steps=1000, cos_min_ratio=0.0001, warmup_type="log"
):
    warmup, i = max(2, warmup_num_steps), k - 1
    if i < 0:
        return 0.0
    if i < warmup:
        return base_lr * (warmup_min_ratio + (1 - warmup_min_ratio) * rise(i, warmup, warmup_type))
    progress = min(1.0, (i - warmup + 1) / max(1, total_num_steps - warmup))
    return base_lr * max(0.0, cos_min_ratio + (1 - cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


def one_cycle(
    k,
    _,
    cycle_min_lr,
    cycle_max_lr,
    decay_lr_rate=0.0,
    cycle_first_step_size=2000,
    cycle_second_step_size=None,
    cycle_first_stair_count=0,
    cycle_second_stair_count=None,
    decay_step_size=0,
):
    first = cycle_first_step_size
    second = first if cycle_second_step_size is None else cycle_second_step_size
    stairs_down = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
    total = first + second
    if k > total:
        decay = 0 if decay_step_size == 0 else decay_lr_rate * (k - total) / decay_step_size
        return cycle_min_lr / (1 + decay)
    place = k % total
    height, stairs = (place / first, cycle_first_stair_count) if place <= first else ((total - place) / second, stairs_down)
    if stairs:
        # A little more, so that a whole stair is not lost to rounding.
        height = math.floor(height * stairs + 1e-9) / stairs
    return cycle_min_lr + (cycle_max_lr - cycle_min_lr) * height


def lr_range_test(
    k,
    _,
    lr_range_test_min_lr=1e-3,
    lr_range_test_step_size=2000,
    lr_range_test_step_rate=1.0,
    lr_range_test_staircase=False,
):
    interval = k / lr_range_test_step_size
    if lr_range_test_staircase:
        interval = math.floor(interval)
    return lr_range_test_min_lr * (1 + lr_range_test_step_rate * interval)


def noam(k, base_lr, d_model, warmup_steps=4000, factor=1.0, min_lr=0.0):
    number = k + 1
    rising, falling = number / warmup_steps**1.5, 1 / math.sqrt(number)
    return max(min_lr, factor * base_lr * min(rising, falling) / math.sqrt(d_model))


def inverse_sqrt(k, base_lr, warmup_steps=1, decay_steps=None, init_lr=1e-7, min_lr=0.0):
    number, decay = k + 1, warmup_steps if decay_steps is None else decay_steps
    if number < warmup_steps:
        lr = init_lr + (number - 1) * (base_lr - init_lr) / (warmup_steps - 1)
    else:
        lr = base_lr * math.sqrt(decay / max(decay, number))
    return max(min_lr, lr)


def plateau_case(base_lr, loss, patience, scale=0.5, min_lr=0.0, warmup=0):
    """The learning rate after each evaluation: smaller when one more than `patience` in a row were no better."""
    lrs, lr, best, bad = [], base_lr, math.inf, 0
    for number, value in enumerate(loss):
        if number >= warmup:
            bad = 0 if value < best else bad + 1
            best = min(best, value)
            if bad > patience:
                lr, bad = max(min_lr, lr * scale), 0
        lrs.append(lr)
    return dict(patience=patience, scale=scale, min_lr=min_lr, warmup=warmup, base_lr=base_lr, loss=loss, lr=lrs)


def plateau_cases():
    loss = [5.0, 4.0, 4.0, 4.5, 3.9, 3.95, 3.9, 3.91, 4.2, 3.0, 3.1, 3.2, 3.3, 3.4, 3.5, 3.6, 3.0, 2.9, 3.0, 3.0, 3.0]
    for patience in [0, 1, 2, 5]:
        yield plateau_case(0.4, loss, patience)
    yield plateau_case(0.4, loss, 0, min_lr=0.05)
    yield plateau_case(0.4, [1.0, *loss], 1, scale=0.7, warmup=1)
    yield plateau_case(0.4, loss, 1, warmup=12)


def cases():
    yield case("Constant", None, 0.3, [0.3] * 5)
    yield formula_case("Noam", noam, 1.0, 30, d_model=512, warmup_steps=8)
    yield formula_case("Noam", noam, 0.1, 30, d_model=256, warmup_steps=12, factor=10.0, min_lr=2e-3)
    yield formula_case("Noam", noam, 2.0, 10, d_model=100)
    yield formula_case("InverseSqrt", inverse_sqrt, 5e-4, 40, warmup_steps=10)
    yield formula_case("InverseSqrt", inverse_sqrt, 5e-4, 40, warmup_steps=10, decay_steps=20, init_lr=1e-5, min_lr=4e-4)
    yield formula_case("InverseSqrt", inverse_sqrt, 0.1, 12)
    yield torch_case("StepLR", dict(step_size=3), 0.5, 14)
    yield torch_case("StepLR", dict(step_size=4, gamma=0.5), 0.5, 14, per="step")
    yield torch_case("MultiStepLR", dict(milestones=[2, 5, 5, 9], gamma=0.3), 0.5, 14)
    yield torch_case("CosineAnnealingLR", dict(T_max=10), 0.2, 11)
    yield torch_case("CosineAnnealingLR", dict(T_max=7, eta_min=0.01), 0.2, 30, per="step")
    yield torch_case("LinearLR", {}, 0.2, 9)
    yield torch_case("LinearLR", dict(start_factor=0.1, end_factor=0.7, total_iters=11), 0.2, 15, per="step")
    yield distribuuuu_case(0.2, 100)
    yield distribuuuu_case(0.8, 12, max_epoch=12, min_lr=0.05, warmup_epochs=0)
    yield distribuuuu_case(0.1, 20, max_epoch=20, lr_policy="steps", steps=[0, 6, 12, 18], lr_mult=0.3, warmup_factor=0.01)
    for kind in ["log", "linear"]:
        yield formula_case("WarmupLR", warmup_lr, 0.01, 15, warmup_num_steps=10, warmup_type=kind)
        yield formula_case(
            "WarmupLR", warmup_lr, 0.01, 6, warmup_min_lr=1e-4, warmup_max_lr=0.02, warmup_num_steps=1, warmup_type=kind
        )
        yield formula_case("WarmupDecayLR", warmup_decay_lr, 0.5, 30, total_num_steps=25, warmup_num_steps=8, warmup_type=kind)
        yield formula_case(
            "WarmupCosineLR", warmup_cosine_lr, 0.02, 30, total_num_steps=25, warmup_num_steps=8, warmup_type=kind
        )
    yield formula_case("WarmupLR", warmup_lr, 0.01, 12)
    yield formula_case("WarmupDecayLR", warmup_decay_lr, 0.5, 12, total_num_steps=3, warmup_min_lr=1e-5, warmup_num_steps=5)
    yield formula_case(
        "WarmupCosineLR", warmup_cosine_lr, 1.0, 12, total_num_steps=9, warmup_min_ratio=0.2, warmup_num_steps=3, cos_min_ratio=0.1
    )
    yield formula_case("WarmupCosineLR", warmup_cosine_lr, 1.0, 9, total_num_steps=2, warmup_num_steps=5)
    yield formula_case("OneCycle", one_cycle, 0.0, 25, cycle_min_lr=1e-4, cycle_max_lr=1e-2, cycle_first_step_size=7)
    yield formula_case(
        "OneCycle",
        one_cycle,
        0.0,
        40,
        cycle_min_lr=1e-4,
        cycle_max_lr=1e-2,
        cycle_first_step_size=6,
        cycle_second_step_size=15,
        cycle_first_stair_count=3,
        cycle_second_stair_count=4,
        decay_lr_rate=0.5,
        decay_step_size=3,
    )
    yield formula_case("LRRangeTest", lr_range_test, 0.0, 12, lr_range_test_step_size=5)
    yield formula_case(
        "LRRangeTest", lr_range_test, 0.0, 12, lr_range_test_step_size=5, lr_range_test_step_rate=3.0, lr_range_test_staircase=True
    )


def main():
    GOLDEN.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(case) for case in cases())
    (GOLDEN / "schedules.json").write_text(f"[\n{lines}\n]\n")
    lines = ",\n".join(json.dumps(case) for case in plateau_cases())
    (GOLDEN / "plateau.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
