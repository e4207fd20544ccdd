"""PyTorch's side of `cargo xtask bench transformer`: nn.Transformer's layers, one thread a rank, with our weights and batches.

  transformer.py --work train|decode --size small|middle|base --batches FILE [--steps 5] [--warm-up 2] [--dropout 0.1] [--tuned]
                 [--sentences 16] [--beam 5] [--words 30]

`train` is started by a launcher (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and makes steps of DistributedDataParallel with gloo and Adam.
`--tuned` is what PyTorch's guides advise on a CPU: gradients as views of buckets, a static graph, the fused optimizer, denormals flushed.
`decode` is a plain loop: the decoder runs over all words so far at each step. Rank 0 prints one JSON line.
"""
import argparse
import json
import math
import os
import resource
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from resnet18 import fill  # noqa: E402

PAD, EOS, BOS = 0, 1, 2
# Layers, heads, size, inner size, words.
SIZES = {"small": (2, 4, 128, 512, 300), "middle": (3, 4, 256, 1024, 8000), "base": (6, 8, 512, 2048, 8000)}


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


def padded(rows):
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def train(args, model, steps):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    options = {"gradient_as_bucket_view": True, "static_graph": True} if args.tuned else {}
    replica = DistributedDataParallel(model.train(), **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-9, **({"fused": True} if args.tuned else {}))
    times, losses, total, cpu = [], [], 0, 0.0
    for step in range(args.warm_up + args.steps):
        ranks = steps[step % len(steps)]
        words = sum(len(row) + 1 for batch in ranks[:world] for row in batch["targets"])
        source = padded(ranks[rank]["sources"])
        begun = padded([[BOS] + row for row in ranks[rank]["targets"]])
        ended = padded([row + [EOS] for row in ranks[rank]["targets"]])
        dist.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        optimizer.zero_grad(set_to_none=True)
        logits = replica(source, begun)
        share = nn.functional.cross_entropy(logits.flatten(0, 1), ended.flatten(), ignore_index=PAD, label_smoothing=0.1, reduction="sum") / words
        # The mean of gradients over ranks becomes their sum.
        (share * world).backward()
        optimizer.step()
        if step >= args.warm_up:
            times.append((time.perf_counter() - began) * 1e3)
            cpu += time.process_time() - cpu_began
            total += words
        losses.append(share.detach())
    slowest, losses, cpu = torch.tensor(times), torch.stack(losses), torch.tensor(cpu)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(losses)
    dist.all_reduce(cpu)
    if rank == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        figures = {"step_ms": statistics.median(slowest.tolist()), "tokens_per_s": total / slowest.sum().item() * 1e3, "cpu_ms": cpu.item() / args.steps * 1e3}
        print(json.dumps({**figures, "losses": losses.tolist(), "peak_bytes": peak}), flush=True)
    # Gloo's threads sometimes abort the process while the interpreter is taken down.
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


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


def decode(args, model, steps):
    model.eval()
    sources = [row for ranks in steps for batch in ranks for row in batch["sources"]][: args.sentences]
    source, times = padded(sources), []
    for _ in range(1 + args.steps):
        began = time.perf_counter()
        words, scores = search(model, source, args.beam, args.words)
        times.append((time.perf_counter() - began) * 1e3)
    step = statistics.median(times[1:])
    print(json.dumps({"step_ms": step, "tokens_per_s": words / step * 1e3, "words": words, "scores": scores}), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", choices=["train", "decode"], required=True)
    parser.add_argument("--size", choices=list(SIZES), required=True)
    parser.add_argument("--batches", required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--sentences", type=int, default=16)
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--words", type=int, default=30)
    parser.add_argument("--tuned", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.tuned:
        torch.set_flush_denormal(True)
    with open(args.batches) as file:
        steps = json.load(file)["steps"]
    model = fill(Transformer(*SIZES[args.size], args.dropout))
    {"train": train, "decode": decode}[args.work](args, model, steps)


main()
