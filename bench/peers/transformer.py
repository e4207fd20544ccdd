"""PyTorch's side of `drumline-train bench-transformer`: nn.Transformer's layers on one thread, with the same weights and words.

  transformer.py --work train|decode --size small|base [--batch 32] [--steps 5] [--dropout 0.1] [--beam 5] [--words 40] [--tuned]

`decode` is a plain loop: the decoder runs over all words so far at each step. `--tuned` flushes denormals. Prints one JSON line.
"""
import argparse
import json
import math
import os
import statistics
import sys
import time

import torch
from torch import nn

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from resnet18 import fill  # noqa: E402

PAD, EOS, BOS = 0, 1, 3
WARM_UP = 2
# Layers, heads, size, inner size, words.
SIZES = {"small": (3, 4, 128, 512, 2000), "base": (6, 8, 512, 2048, 10000)}


class Transformer(nn.Module):
    def __init__(self, layers, heads, size, inner, vocab, dropout):
        super().__init__()
        self.tgt_embed = nn.Embedding(vocab, size, padding_idx=PAD)
        self.src_embed = nn.Embedding(vocab, size, padding_idx=PAD)
        shape = dict(d_model=size, nhead=heads, dim_feedforward=inner, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**shape), layers, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**shape), layers)
        self.dropout = nn.Dropout(dropout)
        place = torch.arange(512).unsqueeze(1)
        element = torch.arange(size).unsqueeze(0)
        angle = place / 10000.0 ** ((element // 2 * 2) / size)
        self.register_buffer("waves", torch.where(element % 2 == 0, angle.sin(), angle.cos()))

    def placed(self, table, tokens):
        return self.dropout(table(tokens) * math.sqrt(table.weight.shape[1]) + self.waves[: tokens.shape[1]])

    def encode(self, source):
        return self.encoder(self.placed(self.src_embed, source), src_key_padding_mask=source == PAD)

    def decode(self, memory, hidden, target):
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.decoder(self.placed(self.tgt_embed, target), memory, tgt_mask=causal, memory_key_padding_mask=hidden, tgt_is_causal=True)

    def forward(self, source, target):
        return nn.functional.linear(self.decode(self.encode(source), source == PAD, target), self.tgt_embed.weight)


def sentence(place, vocab):
    return [4 + (place * 31 + word * 17) % (vocab - 4) for word in range(10 + place * 7 % 20)]


def padded(rows):
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def train(args, model, sources, vocab):
    targets = [sentence(place + 3, vocab) for place in range(args.batch)]
    words = sum(len(row) + 1 for row in targets)
    source, begun = padded(sources), padded([[BOS] + row for row in targets])
    ended = padded([row + [EOS] for row in targets])
    model.train()
    times = []
    for _ in range(WARM_UP + args.steps):
        model.zero_grad(set_to_none=True)
        began = time.perf_counter()
        logits = model(source, begun)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ended.flatten(), ignore_index=PAD, label_smoothing=0.1, reduction="sum") / words
        loss.backward()
        times.append(time.perf_counter() - began)
    step = statistics.median(times)
    return {"step_ms": step * 1e3, "tokens_per_s": words / step, "loss": loss.item()}


@torch.no_grad()
def search(model, source, beam, max_words):
    """NJUNMT's search, alpha below 0, over all rows at once."""
    count = len(source)
    memory = model.encode(source).repeat_interleave(beam, 0)
    hidden = (source == PAD).repeat_interleave(beam, 0)
    begun = torch.full((count * beam, 1), BOS)
    sums = torch.full((count, beam), -math.inf)
    sums[:, 0] = 0.0
    live = torch.ones(count * beam, dtype=torch.bool)
    lengths = torch.zeros(count * beam)
    first = (torch.arange(count) * beam).unsqueeze(1)
    for _ in range(max_words):
        last = model.decode(memory, hidden, begun)[:, -1]
        logits = nn.functional.linear(last, model.tgt_embed.weight)
        logits[:, PAD] = -math.inf
        scores = logits.log_softmax(-1)
        scores[~live] = -math.inf
        scores[~live, EOS] = 0.0
        totals = (sums.view(-1, 1) + scores).view(count, -1)
        sums, best = totals.topk(beam, 1)
        rows = (first + best // logits.shape[1]).flatten()
        words = (best % logits.shape[1]).flatten()
        live, lengths = live[rows] & (words != EOS), lengths[rows] + (live[rows] & (words != EOS))
        begun = torch.cat([begun[rows], words.unsqueeze(1)], 1)
        if not live.any():
            break
    scores = sums / lengths.view(count, beam)
    best = scores.argmax(1)
    return lengths.view(count, beam).gather(1, best.unsqueeze(1)).sum().item(), scores.max(1).values.tolist()


def decode(args, model, sources, vocab):
    model.eval()
    source, times = padded(sources), []
    for _ in range(1 + args.steps):
        began = time.perf_counter()
        words, scores = search(model, source, args.beam, args.words)
        times.append(time.perf_counter() - began)
    step = statistics.median(times)
    return {"step_ms": step * 1e3, "tokens_per_s": words / step, "words": words, "scores": scores}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", choices=["train", "decode"], required=True)
    parser.add_argument("--size", choices=list(SIZES), required=True)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--words", type=int, default=40)
    parser.add_argument("--tuned", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.tuned:
        torch.set_flush_denormal(True)
    vocab = SIZES[args.size][-1]
    model = fill(Transformer(*SIZES[args.size], args.dropout))
    sources = [sentence(place, vocab) for place in range(args.batch)]
    print(json.dumps({"train": train, "decode": decode}[args.work](args, model, sources, vocab)), flush=True)


main()
