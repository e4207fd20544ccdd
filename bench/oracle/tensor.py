"""The language model of crates/drumline-parallel/tests/it/tensor_model.rs in PyTorch 2.11, on one process in f64.

    python bench/oracle/tensor.py     # writes bench/oracle/golden/tensor.json

10 steps of SGD with momentum on a loss with label smoothing and ignored targets, gradients clipped by norm. The file has
the losses, the norms and the parameters.
"""

import json
import pathlib

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, SIZE, HEADS, INNER, PLACES, IGNORED, STEPS = 13, 24, 12, 50, 7, -100, 10
GOLDEN = pathlib.Path(__file__).resolve().parent / "golden" / "tensor.json"


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, xs):
        texts, places, _ = xs.shape
        heads = [part.view(texts, places, HEADS, -1).transpose(1, 2) for part in self.qkv(xs).chunk(3, 2)]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.proj(seen.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(SIZE), Attention(), nn.LayerNorm(SIZE)
        self.fc, self.back = nn.Linear(SIZE, INNER), nn.Linear(INNER, SIZE)

    def forward(self, xs):
        xs = xs + self.attn(self.ln_1(xs))
        return xs + self.back(F.gelu(self.fc(self.ln_2(xs)), approximate="tanh"))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, SIZE), nn.Embedding(PLACES, SIZE)
        self.h, self.ln = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(SIZE)

    def forward(self, tokens):
        xs = self.wte(tokens) + self.wpe.weight
        for block in self.h:
            xs = block(xs)
        return self.ln(xs) @ self.wte.weight.T


def values(name, size):
    shift = sum(name.encode())
    wave = (torch.arange(size.numel(), dtype=torch.float64) * 0.7 + shift).sin().view(size) * 0.3
    return wave + 1 if "ln" in name and name.endswith("weight") else wave


def batch(step):
    every = torch.arange(3 * (PLACES + 1)).view(3, -1)
    every = (every * every * 5 + every * 3 + step * 7) % VOCAB
    targets = every[:, 1:].clone()
    targets[1, 2:4] = IGNORED
    return every[:, :-1], targets


def main():
    torch.set_num_threads(1)
    model = Model().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values(name, parameter.shape))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        tokens, targets = batch(step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())
    parameters = {name: parameter.flatten().tolist() for name, parameter in model.named_parameters()}
    golden = {"torch": torch.__version__, "losses": losses, "norms": norms, "parameters": parameters}
    GOLDEN.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
