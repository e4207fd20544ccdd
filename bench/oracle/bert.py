"""Golden files for BERT: logits, loss, gradients and steps of AdamW of a model of torch.nn's own layers, and its weights by Hugging Face's names.

    python bench/oracle/bert.py       # writes bench/oracle/golden/bert.json and bert.safetensors; needs torch 2.11, numpy and safetensors

Everything is computed in float64. Weights come from `fill`, by their place among the sorted names. `bert.safetensors` holds them as older files of
`BertForPreTraining` do: norms as `gamma` and `beta`, the decoder beside the tensors it is tied to, the pooler, the second head and `position_ids`.
"""
import json
import pathlib

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

FOLDER = pathlib.Path(__file__).resolve().parent / "golden"
LAYERS, HEADS, SIZE, INNER, POSITIONS, WORDS, PAD, EPS = 2, 4, 16, 24, 12, 27, 0, 1e-12
# Two texts of one part and two parts, a single word, padded to the longest; 26 is the mask.
TOKENS = torch.tensor([[2, 7, 26, 9, 4, 20, 1, 0, 0], [2, 26, 5, 1, 13, 19, 26, 8, 1], [2, 11, 1, 0, 0, 0, 0, 0, 0]])
TYPES = torch.tensor([[0] * 9, [0, 0, 0, 0, 1, 1, 1, 1, 1], [0] * 9])
PLACES = torch.tensor([2, 5, 10, 15, 19])
TARGETS = torch.tensor([7, 20, 12, 4, 25])
ADAMW = {"lr": 0.01, "betas": [0.9, 0.999], "weight_decay": 0.1, "steps": 6}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        own = nn.Module()
        own.query, own.key, own.value = (nn.Linear(SIZE, SIZE) for _ in range(3))
        self.add_module("self", own)
        self.output = Output(SIZE)

    def forward(self, xs, seen):
        own = getattr(self, "self")
        heads = [layer(xs).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (own.query, own.key, own.value)]
        scores = heads[0] @ heads[1].transpose(-1, -2) / (SIZE // HEADS) ** 0.5
        weights = scores.masked_fill(~seen[:, None, None, :], -torch.inf).softmax(-1)
        return self.output((weights @ heads[2]).transpose(1, 2).flatten(2), xs)


class Output(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(inputs, SIZE), nn.LayerNorm(SIZE, EPS)

    def forward(self, xs, base):
        return self.LayerNorm(self.dense(xs) + base)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.intermediate, self.output = Attention(), nn.Module(), Output(INNER)
        self.intermediate.dense = nn.Linear(SIZE, INNER)

    def forward(self, xs, seen):
        xs = self.attention(xs, seen)
        return self.output(F.gelu(self.intermediate.dense(xs)), xs)


class BertForMaskedLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert, self.cls = nn.Module(), nn.Module()
        self.bert.embeddings, self.bert.encoder = nn.Module(), nn.Module()
        embeddings = self.bert.embeddings
        embeddings.word_embeddings = nn.Embedding(WORDS, SIZE, padding_idx=PAD)
        embeddings.position_embeddings = nn.Embedding(POSITIONS, SIZE)
        embeddings.token_type_embeddings = nn.Embedding(2, SIZE)
        embeddings.LayerNorm = nn.LayerNorm(SIZE, EPS)
        self.bert.encoder.layer = nn.ModuleList(Layer() for _ in range(LAYERS))
        predictions = self.cls.predictions = nn.Module()
        predictions.transform = nn.Module()
        predictions.transform.dense, predictions.transform.LayerNorm = nn.Linear(SIZE, SIZE), nn.LayerNorm(SIZE, EPS)
        predictions.bias = nn.Parameter(torch.zeros(WORDS))

    def forward(self, tokens, types):
        embeddings, predictions = self.bert.embeddings, self.cls.predictions
        places = torch.arange(tokens.shape[1])
        xs = embeddings.word_embeddings(tokens) + embeddings.token_type_embeddings(types) + embeddings.position_embeddings(places)
        xs = embeddings.LayerNorm(xs)
        for layer in self.bert.encoder.layer:
            xs = layer(xs, tokens != PAD)
        xs = predictions.transform.LayerNorm(F.gelu(predictions.transform.dense(xs)))
        return F.linear(xs, embeddings.word_embeddings.weight, predictions.bias)


def fill(index, shape):
    """Numbers between -0.5 and 0.5 that look random, from the place of the tensor and of the element alone."""
    x = np.arange(int(np.prod(shape)), dtype=np.uint32) + np.uint32(index * 7919)
    x = x * np.uint32(2654435761)
    x ^= x >> np.uint32(15)
    x = x * np.uint32(2246822519)
    x ^= x >> np.uint32(13)
    return torch.from_numpy(x.astype(np.float64) / 2.0**32 - 0.5).reshape(shape)


def filled():
    model = BertForMaskedLM().double()
    with torch.no_grad():
        for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
            shift = 1.0 if name.endswith("LayerNorm.weight") else 0.0
            parameter.copy_((fill(index, parameter.shape) + shift).float())
    return model


def brief(tensor):
    """Two figures that tell a tensor from another: its length and its product with a pattern."""
    x = tensor.detach().double().flatten()
    return [x.norm().item(), (x * fill(1, x.shape)).sum().item()]


def loss_of(model):
    return F.cross_entropy(model(TOKENS, TYPES).flatten(0, 1)[PLACES], TARGETS)


def trained(model):
    """The losses of some steps of AdamW, in which biases and norms do not decay, and the weights after them."""
    kept = [p for name, p in model.named_parameters() if p.dim() < 2 or name.endswith("bias")]
    decaying = [p for name, p in model.named_parameters() if not (p.dim() < 2 or name.endswith("bias"))]
    groups = [{"params": decaying}, {"params": kept, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=ADAMW["lr"], betas=ADAMW["betas"], weight_decay=ADAMW["weight_decay"])
    losses = []
    for _ in range(ADAMW["steps"]):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {**ADAMW, "losses": losses, "weights": {name: brief(p) for name, p in sorted(model.named_parameters())}}


def older(name):
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def main():
    torch.set_num_threads(1)
    model = filled()
    named = dict(model.named_parameters())
    saved = {older(name): parameter.detach().float().clone() for name, parameter in named.items()}
    saved["cls.predictions.decoder.weight"] = saved["bert.embeddings.word_embeddings.weight"].clone()
    saved["cls.predictions.decoder.bias"] = saved["cls.predictions.bias"].clone()
    saved["bert.embeddings.position_ids"] = torch.arange(POSITIONS)[None]
    for name, rows in [("bert.pooler.dense", SIZE), ("cls.seq_relationship", 2)]:
        saved[f"{name}.weight"], saved[f"{name}.bias"] = torch.ones(rows, SIZE), torch.ones(rows)
    save_file(saved, FOLDER / "bert.safetensors", metadata={"format": "pt"})
    loss = loss_of(model)
    loss.backward()
    golden = {
        "torch": torch.__version__,
        "names": sorted(named),
        "tokens": TOKENS.tolist(),
        "types": TYPES.tolist(),
        "places": PLACES.tolist(),
        "words": TARGETS.tolist(),
        "logits": model(TOKENS, TYPES)[TOKENS != PAD].flatten().tolist(),
        "loss": loss.item(),
        "gradients": {name: brief(parameter.grad) for name, parameter in sorted(named.items())},
        "adamw": trained(filled()),
    }
    (FOLDER / "bert.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")


main()
