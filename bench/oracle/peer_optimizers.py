"""Golden steps of other libraries' optimizers, for the tests of drumline-torch: Adafactor of `transformers`, Lion of
`bitsandbytes` and its maps of 8-bit codes, on a CPU.

    pip install transformers bitsandbytes                # beside torch 2.11
    python bench/oracle/peer_optimizers.py               # writes bench/oracle/golden/peer_optimizers.safetensors

The cases have the inputs and the names of `optim.py`, which makes them from formulas. LAMB has no peer here: those of
DeepSpeed and apex need a GPU, and so does the 8-bit Adam of bitsandbytes, whose CPU kernels find the nearest code only
roughly.
"""

import bitsandbytes
import torch
import transformers
from bitsandbytes.functional import create_dynamic_map
from bitsandbytes.optim import Lion
from optim import GOLDEN, inputs, run
from safetensors.torch import save_file
from transformers.optimization import Adafactor


def adafactor(**options):
    def make(params, lr, foreach):
        return Adafactor(params, lr=None if options.get("relative_step", True) else lr, **options)

    return make


def lion(**options):
    def make(params, lr, foreach):
        return Lion(params, lr=lr, optim_bits=32, **options)

    return make


def negated(given):
    return {name: -tensor if name.startswith("grad.") else tensor for name, tensor in given.items()}


def main():
    torch.set_num_threads(1)
    given = inputs()
    cases = {
        "adafactor_warmup": (adafactor(warmup_init=True), given),
        "adafactor_fixed": (adafactor(relative_step=False, scale_parameter=False), given),
        "lion": (lion(), given),
        "lion_odd": (lion(betas=(0.7, 0.9), weight_decay=0.2), negated(given)),
    }
    tensors = dict(given)
    for case, (make, grads) in cases.items():
        steps = run(grads, make, {})
        tensors |= {f"{case}.{name}": tensor for name, tensor in steps.items() if not name.startswith("state.")}
    tensors |= {"map.signed": create_dynamic_map(True), "map.unsigned": create_dynamic_map(False)}
    save_file(tensors, GOLDEN / "peer_optimizers.safetensors")
    print(f"transformers {transformers.__version__}, bitsandbytes {bitsandbytes.__version__}")


if __name__ == "__main__":
    main()
