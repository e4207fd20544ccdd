"""Golden files for GPT-2: logits, loss and gradients of a model in plain PyTorch, and its weights by Hugging Face's names.

    python bench/oracle/gpt.py        # writes bench/oracle/golden/gpt.json and gpt.safetensors; needs torch 2.11, numpy and safetensors

Weights come from `fill`, by their place among the sorted names. `gpt.safetensors` holds them as `GPT2LMHeadModel.save_pretrained` does: with the
prefix `transformer.`, matrices as inputs × outputs, the buffers of masks that older files have, and the head beside the embedding it is tied to.
"""
import json
import math
import pathlib

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

FOLDER = pathlib.Path(__file__).resolve().parent / "golden"
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


def shapes():
    named = {"wte.weight": (WORDS, SIZE), "wpe.weight": (POSITIONS, SIZE), "ln_f.weight": (SIZE,), "ln_f.bias": (SIZE,)}
    for layer in range(LAYERS):
        matrices = {"attn.c_attn": (SIZE, 3 * SIZE), "attn.c_proj": (SIZE, SIZE), "mlp.c_fc": (SIZE, 4 * SIZE), "mlp.c_proj": (4 * SIZE, SIZE)}
        for name, shape in matrices.items():
            named[f"h.{layer}.{name}.weight"], named[f"h.{layer}.{name}.bias"] = shape, shape[1:]
        for name in ["ln_1", "ln_2"]:
            named[f"h.{layer}.{name}.weight"] = named[f"h.{layer}.{name}.bias"] = (SIZE,)
    return named


def weights():
    filled = {}
    for index, (name, shape) in enumerate(sorted(shapes().items())):
        shift = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
        filled[name] = (fill(index, shape) + shift).float().requires_grad_()
    return filled


def forward(w, tokens):
    """Logits of each next token: batch × places × words."""
    places = tokens.shape[1]
    x = w["wte.weight"][tokens] + w["wpe.weight"][:places]
    norm = lambda x, name: F.layer_norm(x, (SIZE,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)
    dense = lambda x, name: x @ w[f"{name}.weight"] + w[f"{name}.bias"]
    hidden = torch.full((places, places), -math.inf).triu(1)
    for layer in range(LAYERS):
        h = f"h.{layer}"
        parts = dense(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").split(SIZE, 2)
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(2, 3) / math.sqrt(SIZE // HEADS) + hidden
        x = x + dense((scores.softmax(3) @ v).transpose(1, 2).flatten(2), f"{h}.attn.c_proj")
        x = x + dense(F.gelu(dense(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc"), approximate="tanh"), f"{h}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def brief(tensor):
    """Two figures that tell a tensor from another: its length and its product with a pattern."""
    x = tensor.detach().double().flatten()
    return [x.norm().item(), (x * fill(1, x.shape)).sum().item()]


def greedy(w, tokens, count):
    """The likeliest continuation, computed anew at each token."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(forward(w, torch.tensor([tokens]))[0, -1].argmax().item())
    return tokens


def main():
    torch.set_num_threads(1)
    w = weights()
    logits = forward(w, TOKENS[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())
    loss.backward()
    golden = {
        "torch": torch.__version__,
        "names": sorted(w),
        "tokens": TOKENS.tolist(),
        "logits": logits.flatten().tolist(),
        "loss": loss.item(),
        "gradients": {name: brief(tensor.grad) for name, tensor in w.items()},
        "greedy": greedy(w, [3, 7], 10),
    }
    (FOLDER / "gpt.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")
    saved = {f"transformer.{name}": tensor.detach().clone() for name, tensor in w.items()}
    for layer in range(LAYERS):
        saved[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, POSITIONS, POSITIONS).tril()
        saved[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    saved["lm_head.weight"] = w["wte.weight"].detach().clone()
    save_file(saved, FOLDER / "gpt.safetensors", metadata={"format": "pt"})


main()
