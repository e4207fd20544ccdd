"""GPT-2 in plain PyTorch with Hugging Face's names and layout; filled by the formula of resnet18.py."""
import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Operations whose results selective checkpointing keeps, as PyTorch's documentation shows it.
KEPT = {
    "mm", "addmm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
}


def keep_products(_context, operation, *_args, **_kwargs):
    is_kept = operation.overloadpacket.__name__ in KEPT
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    """A block with torch.utils.checkpoint: full, or selective."""

    def __init__(self, block, how):
        super().__init__()
        self.block = block
        selective = functools.partial(create_selective_checkpoint_contexts, keep_products)
        self.options = {"context_fn": selective} if how == "selective" else {}

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False, **self.options)


def checkpointed(model, how):
    """Wraps the blocks: none, full, selective, or every second one. Fill the model before, since parameters get other names."""
    for index, block in enumerate(model.h):
        every = {"second": "full" if index % 2 == 1 else "none"}.get(how, how)
        model.h[index] = block if every == "none" else Checkpointed(block, every)
    return model


class Conv1D(nn.Module):
    """A linear layer whose weight is inputs x outputs, as GPT-2's files have it."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return F.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    def __init__(self, size, heads, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.c_attn = Conv1D(size, 3 * size)
        self.c_proj = Conv1D(size, size)

    def forward(self, x):
        batch, length, size = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(size, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, size))


class Mlp(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.c_fc = Conv1D(size, 4 * size)
        self.c_proj = Conv1D(4 * size, size)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, size, heads, dropout=0.0):
        super().__init__()
        self.ln_1 = nn.LayerNorm(size)
        self.attn = Attention(size, heads, dropout)
        self.ln_2 = nn.LayerNorm(size)
        self.mlp = Mlp(size)
        self.dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()

    def forward(self, x):
        x = x + self.dropout(self.attn(self.ln_1(x)))
        return x + self.dropout(self.mlp(self.ln_2(x)))


class Gpt2(nn.Module):
    """124 million parameters; the vocabulary is padded to 50304 rows, as those who train it fast do."""

    def __init__(self, layers=12, heads=12, size=768, positions=1024, vocabulary=50304, dropout=0.0):
        super().__init__()
        self.dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()
        self.wte = nn.Embedding(vocabulary, size)
        self.wpe = nn.Embedding(positions, size)
        self.h = nn.ModuleList([Block(size, heads, dropout) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(size)

    def forward(self, tokens):
        x = self.dropout(self.wte(tokens) + self.wpe.weight[: tokens.shape[1]])
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


def tokens(texts, length, vocabulary=50257):
    place = torch.arange(texts * (length + 1))
    every = ((place * place * 31 + place * 7919) % 1_000_003 % vocabulary).view(texts, length + 1)
    return every[:, :-1].contiguous(), every[:, 1:].contiguous()
