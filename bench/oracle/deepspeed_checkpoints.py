"""Checkpoints that DeepSpeed itself writes, for the tests of `drumline export --from-deepspeed`.

    DS_ACCELERATOR=cpu python bench/oracle/deepspeed_checkpoints.py      # with torch 2.11, deepspeed and safetensors

For each case two ranks train a tiny network with a tied weight, a frozen layer and buffers for three steps, and call
`save_checkpoint`. Beside the folder, CASE.safetensors has the weights as DeepSpeed's own zero_to_fp32 puts them together,
and the moments as DeepSpeed's `safe_get_full_optimizer_state` gathers them. DeepSpeed refuses fp16 on CPUs without fast
float16; PyTorch computes in it on any, so `is_fp16_supported` is replaced.
"""

import os
import pathlib
import shutil
import sys

import torch
from torch import multiprocessing, nn

GOLDEN = pathlib.Path(__file__).resolve().parent / "golden" / "deepspeed"
RANKS, STEPS, PORT = 2, 3, 29731

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
CASES = {
    "stage0_fp32": dict(stage=0),
    "stage0_fp16": dict(stage=0, precision=FP16),
    "stage1_fp32": dict(stage=1),
    "stage1_bf16": dict(stage=1, precision=BF16),
    "stage2_bf16": dict(stage=2, precision=BF16),
    "stage2_groups": dict(stage=2, groups=True),
    "stage1_fp16": dict(stage=1, precision=FP16),
    "stage2_fp16": dict(stage=2, precision=FP16, groups=True),
    "stage3_fp16": dict(stage=3, precision=FP16),
    "stage3_groups": dict(stage=3, groups=True, zero={"sub_group_size": 40}),
    "stage3_fp32": dict(stage=3),
    "stage3_bf16": dict(stage=3, precision=BF16, zero={"sub_group_size": 60}),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.hidden = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 5))
        self.register_buffer("count", torch.tensor(0))
        self.frozen = nn.Linear(5, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, tokens):
        self.count += 1
        hidden = self.norm(self.hidden(self.embedding(tokens))).tanh() * self.scale
        return self.head(self.frozen(hidden.to(self.frozen.weight.dtype)))


def config(stage, precision=None, zero=None, **_):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.99], "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **(zero or {})},
        "zero_allow_untested_optimizer": True,
        **(precision or {}),
    }


def groups_of(net, groups):
    trained = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    if not groups:
        return [p for _, p in trained]
    decayed = [p for _, p in trained if p.dim() > 1]
    others = [p for _, p in trained if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def run(rank, names):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT)
    )
    import deepspeed

    torch.set_num_threads(1)
    type(deepspeed.get_accelerator()).is_fp16_supported = lambda self: True
    # Its shared memory for gloo would be compiled now, and changes no number.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    for name in names:
        train(rank, name, CASES[name])
        torch.distributed.barrier()
        if rank == 0:
            keep(name)
    torch.distributed.destroy_process_group()


def train(rank, name, case):
    import deepspeed
    from deepspeed.utils import safe_get_full_optimizer_state

    torch.manual_seed(1)
    net = Net()
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=groups_of(net, case.get("groups")), config=config(**case)
    )
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS):
        tokens = torch.randint(0, 7, (4,), generator=generator)
        loss = nn.functional.cross_entropy(engine(tokens).float(), (tokens + 1) % 7)
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(str(GOLDEN / name), tag=name, client_state={"note": name, "seen": [1, 2, 3]})
    moments = {}
    if case["stage"] == 0:
        # No converter of DeepSpeed reads these folders: the weights are those of the model.
        weights = {key: value.detach().clone() for key, value in engine.module.state_dict().items()}
        torch.save(weights, GOLDEN / name / f"weights{rank}.tmp")
    for param_name, parameter in engine.module.named_parameters():
        # In stages 1 and 2 DeepSpeed does not find the moments of a second group.
        is_lost = case.get("groups") and case["stage"] < 3 and parameter.dim() <= 1
        if parameter.requires_grad and not is_lost and case["stage"] > 0:
            for slot in ["exp_avg", "exp_avg_sq"]:
                value = safe_get_full_optimizer_state(parameter, slot)
                moments[f"{param_name}.{slot}"] = value.detach().float().clone().reshape(-1)
    if rank == 0:
        torch.save(moments, GOLDEN / name / "moments.tmp")


def keep(name):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    from safetensors.torch import save_file

    folder, file = GOLDEN / name, GOLDEN / f"{name}.safetensors"
    if CASES[name]["stage"] == 0:
        weights = torch.load(folder / "weights0.tmp")
        [part.unlink() for part in folder.glob("weights*.tmp")]
    else:
        weights = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    expected = {key: value.float().contiguous().clone() for key, value in weights.items()}
    expected.update(torch.load(folder / "moments.tmp"))
    save_file(expected, file)
    file.chmod(0o644)
    (folder / "moments.tmp").unlink()
    # DeepSpeed puts its own converters beside the files.
    for script in folder.glob("*.py"):
        script.unlink()


def main():
    names = sys.argv[1:] or list(CASES)
    for name in names:
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
        (GOLDEN / name).mkdir(parents=True)
    multiprocessing.spawn(run, args=(names,), nprocs=RANKS)


if __name__ == "__main__":
    main()
