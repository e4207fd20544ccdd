"""What DeepSpeed itself does in training, for the tests of `drumline::deepspeed`.

    DS_ACCELERATOR=cpu python bench/oracle/deepspeed_engine.py      # with torch 2.11 and deepspeed; writes golden/deepspeed.json

- schedules: the learning rates of the cases of golden/schedules.json, by DeepSpeed's own classes
- cycles: the betas that OneCycle gives to Adam, and its learning rates
- loss_scales: the scale after each step with or without an overflow
- trainings: two ranks train a small network for 20 steps of two micro-batches; losses, learning rates, norms, weights
"""

import json
import math
import os
import pathlib

import torch
from torch import multiprocessing, nn

GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"
RANKS, STEPS, ACCUMULATION, SAMPLES, PORT = 2, 20, 2, 3, 29741


def learning_rates(case):
    from deepspeed.runtime import lr_schedules

    policy, base_lr = case["schedule"]["policy"], case["schedule"]["base_lr"]
    # DeepSpeed's schedules with a cycle set the momentum as well, unless they are asked not to.
    more = {"cycle_momentum": False} if policy["type"] == "OneCycle" else {}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=base_lr)
    schedule = getattr(lr_schedules, policy["type"])(optimizer, **policy["params"], **more)
    lrs = []
    for _ in case["lr"]:
        lrs.append(float(optimizer.param_groups[0]["lr"]))
        schedule.step()
    return {**case, "lr": lrs}


def schedules():
    from deepspeed.runtime import lr_schedules

    names = {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"}
    cases = json.loads((GOLDEN / "schedules.json").read_text())
    return [learning_rates(case) for case in cases if case["schedule"]["policy"]["type"] in names and lr_schedules]


def cycle(steps, **params):
    """Each step's learning rate and betas."""
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.Adam([torch.zeros(1)], lr=1.0)
    schedule = lr_schedules.OneCycle(optimizer, **params)
    lrs, betas = [], []
    for _ in range(steps):
        lrs.append(float(optimizer.param_groups[0]["lr"]))
        betas.append([float(beta) for beta in optimizer.param_groups[0]["betas"]])
        schedule.step()
    return {"params": params, "lr": lrs, "betas": betas}


def cycles():
    lr = dict(cycle_min_lr=0.1, cycle_max_lr=0.9)
    momentum = dict(cycle_min_mom=0.7, cycle_max_mom=0.95)
    return [
        cycle(20, **lr, cycle_first_step_size=5),
        cycle(20, **lr, **momentum, cycle_first_step_size=4, cycle_second_step_size=6),
        cycle(16, **lr, **momentum, cycle_first_step_size=6, cycle_first_stair_count=3, cycle_second_stair_count=2),
        cycle(16, **lr, **momentum, cycle_first_step_size=3, decay_step_size=2, decay_lr_rate=0.5, decay_mom_rate=-0.1),
    ]


OVERFLOWS = [0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]


def loss_scale(initial_scale_power, loss_scale_window, hysteresis, consecutive_hysteresis, min_loss_scale):
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(
        init_scale=2**initial_scale_power,
        scale_window=loss_scale_window,
        min_scale=min_loss_scale,
        delayed_shift=hysteresis,
        consecutive_hysteresis=consecutive_hysteresis,
        raise_error_at_min_scale=False,
    )
    scales = []
    for overflow in OVERFLOWS:
        scaler.update_scale(bool(overflow))
        scales.append(scaler.cur_scale)
    rule = dict(
        initial_scale_power=initial_scale_power,
        loss_scale_window=loss_scale_window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive_hysteresis,
        min_loss_scale=min_loss_scale,
    )
    return {"rule": rule, "overflows": OVERFLOWS, "scales": scales}


def sample(step, micro_batch, rank):
    """Inputs and targets that another program can compute with the same bits: small fractions of powers of two."""
    number = (step * ACCUMULATION + micro_batch) * RANKS + rank
    x = [[((number * 7 + row * 5 + column * 3) % 16 - 8) / 8 for column in range(5)] for row in range(SAMPLES)]
    y = [[((number * 3 + row * 11 + column * 7) % 16 - 8) / 16 for column in range(2)] for row in range(SAMPLES)]
    return torch.tensor(x), torch.tensor(y)


def first_weights(shape, place):
    numel = math.prod(shape)
    values = [((index * 13 + place * 5) % 32 - 16) / 32 for index in range(numel)]
    return torch.tensor(values).view(shape)


def config(optimizer, **more):
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.5,
        "optimizer": optimizer,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.05, "warmup_num_steps": 8}},
        "zero_allow_untested_optimizer": True,
        **more,
    }


ADAMW = {"type": "AdamW", "params": {"lr": 0.05, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 0.01, "torch_adam": True}}
ADAM_L2 = {"type": "Adam", "params": {"lr": 0.05, "weight_decay": 0.1, "adam_w_mode": False, "torch_adam": True}}
ADAM = {"type": "Adam", "params": {"lr": 0.05, "weight_decay": 0.1, "torch_adam": True}}
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}}
ADAGRAD = {"type": "Adagrad", "params": {"lr": 0.05, "lr_decay": 0.01, "weight_decay": 0.1, "initial_accumulator_value": 0.1}}
AMSGRAD = {"type": "AdamW", "params": {"lr": 0.05, "betas": [0.5, 0.6], "amsgrad": True, "torch_adam": True}}
ONE_CYCLE = {
    "type": "OneCycle",
    "params": {
        "cycle_min_lr": 0.001,
        "cycle_max_lr": 0.05,
        "cycle_first_step_size": 6,
        "cycle_second_step_size": 8,
        "cycle_min_mom": 0.5,
        "cycle_max_mom": 0.95,
        "decay_step_size": 2,
        "decay_mom_rate": -0.1,
    },
}
TRAININGS = {
    "stage1_adamw": config(ADAMW, zero_optimization={"stage": 1}),
    "stage2_adamw": config(ADAMW, zero_optimization={"stage": 2}),
    "stage2_adam_l2": config(ADAM_L2, zero_optimization={"stage": 2}),
    "stage1_adam": config(ADAM, zero_optimization={"stage": 1}),
    "stage0_sgd": config(SGD),
    "stage1_adagrad": config(ADAGRAD, zero_optimization={"stage": 1}),
    "stage0_amsgrad": config(AMSGRAD),
    "stage2_amsgrad": config(AMSGRAD, zero_optimization={"stage": 2}),
    "stage1_one_cycle": config(ADAMW, zero_optimization={"stage": 1}, scheduler=ONE_CYCLE),
    "stage0_one_cycle_sgd": config(SGD, scheduler=ONE_CYCLE),
}


def run(rank, folder):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT)
    )
    import deepspeed

    torch.set_num_threads(1)
    # Its shared memory for gloo would be compiled now, and changes no number.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    for name in TRAININGS:
        train(rank, name, folder)
    if rank == 0:
        # The scaler logs on rank 0, and needs to know which rank it is on.
        cases = [(8, 3, 1, False, 1.0), (8, 3, 2, False, 1.0), (8, 4, 2, True, 1.0), (5, 2, 3, False, 4.0)]
        (pathlib.Path(folder) / "scales.json").write_text(json.dumps([loss_scale(*case) for case in cases]))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def train(rank, name, folder):
    import deepspeed

    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    with torch.no_grad():
        for place, parameter in enumerate(net.parameters()):
            parameter.copy_(first_weights(tuple(parameter.shape), place))
    engine, *_ = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=TRAININGS[name])
    history = []
    for step in range(STEPS):
        losses = []
        for micro_batch in range(ACCUMULATION):
            x, y = sample(step, micro_batch, rank)
            loss = nn.functional.mse_loss(engine(x), y)
            losses.append(float(loss))
            engine.backward(loss)
            engine.step()
        norm = engine.get_global_grad_norm()
        history.append(dict(losses=losses, norm=None if norm is None else float(norm), lr=float(engine.get_lr()[0])))
    weights = {key: value.detach().float().reshape(-1).tolist() for key, value in engine.module.state_dict().items()}
    result = dict(config=TRAININGS[name], history=history, weights=weights, global_steps=engine.global_steps)
    (pathlib.Path(folder) / f"{name}.{rank}.json").write_text(json.dumps(result))


def trainings(folder):
    multiprocessing.spawn(run, args=(folder,), nprocs=RANKS)
    for name in TRAININGS:
        ranks = [json.loads((pathlib.Path(folder) / f"{name}.{rank}.json").read_text()) for rank in range(RANKS)]
        losses = [[step["losses"] for step in rank["history"]] for rank in ranks]
        lrs = [step["lr"] for step in ranks[0]["history"]]
        norms = [step["norm"] for step in ranks[0]["history"]]
        assert ranks[0]["weights"] == ranks[1]["weights"]
        yield dict(name=name, config=ranks[0]["config"], losses=losses, lrs=lrs, norms=norms, weights=ranks[0]["weights"])


def main():
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        trained = list(trainings(folder))
        scales = json.loads((pathlib.Path(folder) / "scales.json").read_text())
    written = dict(schedules=schedules(), cycles=cycles(), loss_scales=scales, trainings=trained)
    sections = [f'"{name}": [\n' + ",\n".join(json.dumps(case) for case in cases) + "\n]" for name, cases in written.items()]
    (GOLDEN / "deepspeed.json").write_text("{\n" + ",\n".join(sections) + "\n}\n")


if __name__ == "__main__":
    main()
