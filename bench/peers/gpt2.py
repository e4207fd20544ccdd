"""GPT-2 in plain PyTorch with Hugging Face's names and layout; filled by the formula of resnet18.py."""
import torch
import torch.nn.functional as F
from torch import nn


class Conv1D(nn.Module):
    """A linear layer whose weight is inputs x outputs, as GPT-2's files have it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return F.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.heads = heads
        self.c_attn = Conv1D(size, 3 * size)
        self.c_proj = Conv1D(size, size)

    def forward(self, x):
        batch, length, size = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(size, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, size))


class Mlp(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.c_fc = Conv1D(size, 4 * size)
        self.c_proj = Conv1D(4 * size, size)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, size, heads):
        super().__init__()
        self.ln_1 = nn.LayerNorm(size)
        self.attn = Attention(size, heads)
        self.ln_2 = nn.LayerNorm(size)
        self.mlp = Mlp(size)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt2(nn.Module):
    """124 million parameters; the vocabulary is padded to 50304 rows, as those who train it fast do."""

    def __init__(self, layers=12, heads=12, size=768, positions=1024, vocabulary=50304):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, size)
        self.wpe = nn.Embedding(positions, size)
        self.h = nn.ModuleList([Block(size, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(size)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


def tokens(texts, length, vocabulary=50257):
    place = torch.arange(texts * (length + 1))
    every = ((place * place * 31 + place * 7919) % 1_000_003 % vocabulary).view(texts, length + 1)
    return every[:, :-1].contiguous(), every[:, 1:].contiguous()
