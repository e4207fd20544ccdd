"""Golden files for GPT-2: logits, loss and gradients of the model in bench/peers/gpt2.py, and its weights by Hugging Face's names.

    python bench/oracle/gpt.py        # writes bench/oracle/golden/gpt.json and gpt.safetensors; needs torch 2.11, numpy and safetensors

Weights come from `fill`, by their place among the sorted names. `gpt.safetensors` holds them as `GPT2LMHeadModel.save_pretrained` does: with the
prefix `transformer.`, matrices as inputs × outputs, the buffers of masks that older files have, and the head beside the embedding it is tied to.
"""
import json
import pathlib
import sys

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "peers"))
from gpt2 import Gpt2  # noqa: E402

FOLDER = HERE / "golden"
LAYERS, HEADS, SIZE, POSITIONS, WORDS = 2, 4, 16, 12, 27
TOKENS = torch.tensor([[3, 7, 7, 0, 26, 11, 5, 9], [1, 2, 3, 4, 5, 6, 7, 8], [26, 0, 13, 20, 20, 2, 19, 6]])


def fill(index, shape):
    """Numbers between -0.5 and 0.5 that look random, from the place of the tensor and of the element alone."""
    x = np.arange(int(np.prod(shape)), dtype=np.uint32) + np.uint32(index * 7919)
    x = x * np.uint32(2654435761)
    x ^= x >> np.uint32(15)
    x = x * np.uint32(2246822519)
    x ^= x >> np.uint32(13)
    return torch.from_numpy(x.astype(np.float64) / 2.0**32 - 0.5).reshape(shape)


def filled():
    model = Gpt2(LAYERS, HEADS, SIZE, POSITIONS, WORDS)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
            shift = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
            parameter.copy_(fill(index, parameter.shape) + shift)
    return model


def brief(tensor):
    """Two figures that tell a tensor from another: its length and its product with a pattern."""
    x = tensor.detach().double().flatten()
    return [x.norm().item(), (x * fill(1, x.shape)).sum().item()]


def greedy(model, tokens, count):
    """The likeliest continuation, computed anew at each token."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(model(torch.tensor([tokens]))[0, -1].argmax().item())
    return tokens


def main():
    torch.set_num_threads(1)
    model = filled()
    named = dict(model.named_parameters())
    logits = model(TOKENS[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())
    loss.backward()
    golden = {
        "torch": torch.__version__,
        "names": sorted(named),
        "tokens": TOKENS.tolist(),
        "logits": logits.flatten().tolist(),
        "loss": loss.item(),
        "gradients": {name: brief(parameter.grad) for name, parameter in sorted(named.items())},
        "greedy": greedy(model, [3, 7], 10),
    }
    (FOLDER / "gpt.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")
    saved = {f"transformer.{name}": parameter.detach().clone() for name, parameter in named.items()}
    for layer in range(LAYERS):
        saved[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, POSITIONS, POSITIONS).tril()
        saved[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    saved["lm_head.weight"] = named["wte.weight"].detach().clone()
    save_file(saved, FOLDER / "gpt.safetensors", metadata={"format": "pt"})


main()
