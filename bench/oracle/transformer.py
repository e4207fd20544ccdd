"""Golden file for the nets for text: the Transformer, its beam search, and the classifiers, made of PyTorch's own layers.

    python bench/oracle/transformer.py             # writes bench/oracle/golden/transformer.json; needs torch 2.11 and numpy

All weights come from `fill`, by their place among the sorted names, so that the file holds only what comes out. Parts of it:
    translation  by case: sizes, names, the batch, and the outputs at real words, loss with label smoothing 0.1, gradients
    beam         a plain search without a cache, over one model or the mean of two, with NJUNMT's rules
    text         by case: outputs, loss, gradients
"""
import json
import math
import pathlib

import numpy as np
import torch
from torch import nn

OUT = pathlib.Path(__file__).resolve().parent / "golden" / "transformer.json"
PAD, EOS, BOS = 0, 1, 2
SIZES = dict(n_layers=2, n_head=4, d_model=16, d_inner_hid=24, src_vocab=14, tgt_vocab=14)


def fill(index, shape):
    """Numbers between -0.5 and 0.5 that look random, from the place of the tensor and of the element alone."""
    x = np.arange(int(np.prod(shape)), dtype=np.uint32) + np.uint32(index * 7919)
    x = x * np.uint32(2654435761)
    x ^= x >> np.uint32(15)
    x = x * np.uint32(2246822519)
    x ^= x >> np.uint32(13)
    return torch.from_numpy(x.astype(np.float64) / 2.0**32 - 0.5).reshape(shape)


@torch.no_grad()
def fill_model(model, first=0):
    for index, (name, parameter) in enumerate(sorted(model.named_parameters()), first):
        shift = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        parameter.copy_(fill(index, parameter.shape) + shift)
    return model.eval()


def brief(tensor):
    """Two figures that tell a tensor from another: its length and its product with a pattern."""
    x = tensor.detach().double().flatten()
    return [x.norm().item(), (x * fill(1, x.shape)).sum().item()]


def waves(places, size):
    place = torch.arange(places).unsqueeze(1)
    element = torch.arange(size).unsqueeze(0)
    angle = place / 10000.0 ** ((element // 2 * 2) / size)
    return torch.where(element % 2 == 0, angle.sin(), angle.cos())


def encoder(n_layers, n_head, size, inner, norm_first):
    layer = nn.TransformerEncoderLayer(size, n_head, inner, dropout=0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, n_layers, nn.LayerNorm(size) if norm_first else None, enable_nested_tensor=False)


def placed(table, tokens):
    size = table.weight.shape[1]
    return table(tokens) * math.sqrt(size) + waves(tokens.shape[1], size)


class Transformer(nn.Module):
    def __init__(self, share_embeddings, proj_share_weight, norm_first):
        super().__init__()
        size, inner, heads, layers = (SIZES[key] for key in ["d_model", "d_inner_hid", "n_head", "n_layers"])
        self.tgt_embed = nn.Embedding(SIZES["tgt_vocab"], size, padding_idx=PAD)
        self.src_embed = self.tgt_embed if share_embeddings else nn.Embedding(SIZES["src_vocab"], size, padding_idx=PAD)
        self.encoder = encoder(layers, heads, size, inner, norm_first)
        layer = nn.TransformerDecoderLayer(size, heads, inner, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.decoder = nn.TransformerDecoder(layer, layers, nn.LayerNorm(size) if norm_first else None)
        self.generator = nn.Linear(size, SIZES["tgt_vocab"], bias=False)
        if proj_share_weight:
            self.generator.weight = self.tgt_embed.weight

    def named_parameters(self, *args, **kwargs):
        """Shared ones once, by the name that they have in the target."""
        names = {id(p): n for n, p in super().named_parameters(*args, remove_duplicate=False, **kwargs)}
        names.update({id(self.tgt_embed.weight): "tgt_embed.weight"})
        return [(name, p) for p in self.parameters() for name in [names[id(p)]]]

    def parameters(self, *args, **kwargs):
        return list({id(p): p for _, p in super().named_parameters(*args, **kwargs)}.values())

    def forward(self, source, target):
        hidden = source == PAD
        memory = self.encoder(placed(self.src_embed, source), src_key_padding_mask=hidden)
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        out = self.decoder(placed(self.tgt_embed, target), memory, tgt_mask=causal, memory_key_padding_mask=hidden)
        return self.generator(out)


class TextNet(nn.Module):
    """Embedding, BiLSTM or encoder, and a linear layer; `tags` asks for each word."""

    def __init__(self, net, tags):
        super().__init__()
        self.net, self.tags = net, tags
        self.embed = nn.Embedding(14, 16, padding_idx=PAD)
        if net == "bilstm":
            self.lstm = nn.LSTM(16, 10, 2, batch_first=True, bidirectional=True)
        else:
            self.encoder = encoder(2, 4, 16, 24, False)
        self.fc = nn.Linear(20 if net == "bilstm" else 16, 5)

    def forward(self, tokens):
        lengths = (tokens != PAD).sum(1)
        if self.net == "bilstm":
            packed = nn.utils.rnn.pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
            out, (hidden, _) = self.lstm(packed)
            if not self.tags:
                return self.fc(torch.cat([hidden[-2], hidden[-1]], 1))
            return self.fc(nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0])
        states = self.encoder(placed(self.embed, tokens), src_key_padding_mask=tokens == PAD)
        if self.tags:
            return self.fc(states)
        if self.net == "first":
            return self.fc(states[:, 0])
        there = (tokens != PAD).unsqueeze(2)
        return self.fc((states * there).sum(1) / lengths.unsqueeze(1))


def padded(rows):
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


SOURCES = [[4, 5, 6, 7, 13], [8], [9, 9, 10, 11]]
TARGETS = [[5, 4], [12, 11, 10, 9, 8], [7]]


def outcome(model, logits, target, smoothing):
    real = target.flatten() != PAD
    logits = logits.flatten(0, -2)
    loss = nn.functional.cross_entropy(logits, target.flatten(), ignore_index=PAD, label_smoothing=smoothing, reduction="sum")
    loss.backward()
    return {
        "names": [name for name, _ in sorted(model.named_parameters())],
        "logits": logits[real].flatten().tolist(),
        "loss": loss.item(),
        "gradients": {name: brief(p.grad) for name, p in model.named_parameters()},
    }


def translation(**options):
    model = fill_model(Transformer(**options))
    logits = model(padded(SOURCES), padded([[BOS] + row for row in TARGETS]))
    return {**options, **outcome(model, logits, padded([row + [EOS] for row in TARGETS]), 0.1)}


def text(net, tags):
    model = fill_model(TextNet(net, tags))
    target = padded([[1 + word % 4 for word in row] for row in SOURCES]) if tags else torch.tensor([1, 4, 2])
    return {"net": net, "tags": tags, **outcome(model, model(padded(SOURCES)), target, 0.0)}


@torch.no_grad()
def search(models, source, beam_size, alpha, max_steps):
    """All rows of one sentence are computed anew at each step."""
    penalty = lambda length: ((5 + length) / 6) ** max(alpha, 0)
    beam = [([], 0.0, False)]
    for _ in range(max_steps):
        grown = []
        for words, total, finished in beam:
            if finished:
                grown.append((total / penalty(len(words)), words, total, True))
                continue
            mean = 0
            for model in models:
                logits = model(torch.tensor([source]), torch.tensor([[BOS] + words]))[0, -1].double()
                logits[PAD] = -math.inf
                mean = mean + logits.softmax(0) / len(models)
            for word, score in enumerate(mean.log().tolist()):
                rest = words if word == EOS else words + [word]
                grown.append(((total + score) / penalty(len(words) + 1), rest, total + score, word == EOS))
        grown.sort(key=lambda entry: -entry[0])
        beam = [entry[1:] for entry in grown[:beam_size]]
        if all(finished for _, _, finished in beam):
            break
    by = lambda words: penalty(len(words)) if alpha > 0 else len(words) or math.nan
    ranked = [{"tokens": words, "score": total / by(words)} for words, total, _ in beam if words or alpha > 0]
    return sorted(ranked, key=lambda entry: -entry["score"])


def searches():
    options = dict(share_embeddings=False, proj_share_weight=True, norm_first=False)
    models = [fill_model(Transformer(**options), first) for first in (0, 100)]
    cases = []
    for count, beam_size, alpha in [(1, 1, -1.0), (1, 4, -1.0), (1, 5, 0.6), (2, 4, 1.0), (2, 3, 0.0)]:
        found = [search(models[:count], source, beam_size, alpha, 8)[:2] for source in SOURCES]
        cases.append({"models": count, "beam_size": beam_size, "alpha": alpha, "max_steps": 8, "found": found})
    return cases


def main():
    torch.set_num_threads(1)
    golden = {
        "translation": {
            "apart": translation(share_embeddings=False, proj_share_weight=False, norm_first=False),
            "output_shared": translation(share_embeddings=False, proj_share_weight=True, norm_first=False),
            "all_shared": translation(share_embeddings=True, proj_share_weight=True, norm_first=False),
            "norm_first": translation(share_embeddings=False, proj_share_weight=True, norm_first=True),
        },
        "beam": searches(),
        "text": [text(net, tags) for net, tags in [("bilstm", False), ("bilstm", True), ("mean", False), ("first", False), ("mean", True)]],
    }
    OUT.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


main()
