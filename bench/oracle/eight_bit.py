"""Golden steps of AdamW with moments in 8 bits (`formulas.py`), for the tests of drumline-torch.

    python bench/oracle/eight_bit.py        # with torch 2.11; writes bench/oracle/golden/eight_bit.safetensors

`whole` has rows of whole blocks, `rest` rows that end in a shorter block, `small` and `vector` keep f32 moments. The file
holds what goes in, the parameters after each step (steps first), the state at the end, and the two maps.
"""

import torch
from formulas import EightBitAdamW, dynamic_map
from optim import GOLDEN
from safetensors.torch import save_file

SHAPES = {"whole": (9, 512), "rest": (14, 3, 100), "small": (8, 9), "vector": (300,)}
STEPS = 6
OPTIONS = dict(betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(7)
    params = {name: torch.randn(shape).requires_grad_() for name, shape in SHAPES.items()}
    tensors = {f"param.{name}": param.detach().clone() for name, param in params.items()}
    tensors |= {"map.signed": dynamic_map(True), "map.unsigned": dynamic_map(False)}
    optimizer = EightBitAdamW(params.values(), lr=0.02, **OPTIONS)
    after = {name: [] for name in SHAPES}
    for step in range(STEPS):
        for name, param in params.items():
            # Magnitudes of several decades in a block, and some zeros.
            grad = torch.randn(param.shape) * 10 ** (torch.rand(param.shape) * 4 - 3)
            param.grad = torch.where(torch.rand(param.shape) < 0.1, 0.0, grad)
            tensors[f"grad.{step}.{name}"] = param.grad.clone()
        optimizer.step()
        for name, param in params.items():
            after[name].append(param.detach().clone())
    tensors |= {f"after.{name}": torch.stack(steps) for name, steps in after.items()}
    for name, param in params.items():
        tensors |= {f"state.{name}.{slot}": tensor.clone() for slot, tensor in optimizer.state[param].items()}
    save_file(tensors, GOLDEN / "eight_bit.safetensors")


if __name__ == "__main__":
    main()
