"""Synchronised batch normalisation, held against PyTorch 2.11.

    python bench/oracle/sync_batch_norm.py             # writes bench/oracle/golden/sync_batch_norm.safetensors

PyTorch's own SyncBatchNorm runs on GPUs only. What it computes is defined by ordinary batch normalisation of all ranks' batches
laid end to end, so that is what runs here, in double precision. Of it each rank sees its own rows: of the output, and of the
gradient of the input under the sum of all ranks' losses. The gradients of weight and bias are those of the rank's own loss, as
in PyTorch, where DDP averages them. A rank's loss is the sum of its output times given numbers (`dy`).

Names in the file: CASE/x.RANK, dy, y, dx, dweight, dbias, evaluated; CASE/weight, bias, mean_before, var_before, mean_after, var_after.
"""

import pathlib

import torch
from safetensors.torch import save_file

OUT = pathlib.Path(__file__).resolve().parent / "golden" / "sync_batch_norm.safetensors"
EPS, MOMENTUM = 1e-5, 0.1

# Rows of each rank, the rest of the size, affine or not.
CASES = {
    "images": ([3, 3], (4, 5, 5), True),
    "uneven": ([4, 1], (4, 3, 3), True),
    "one_empty": ([2, 0, 3], (4, 3, 3), True),
    "two_dims": ([5, 3], (4,), True),
    "three_dims": ([2, 3], (4, 7), True),
    "five_dims": ([1, 2], (3, 2, 3, 2), True),
    "single": ([1, 1], (4,), True),
    "no_affine": ([2, 3], (4, 3, 3), False),
}


def case(rows, rest, affine):
    channels, double = rest[0], torch.float64
    x = torch.randn(sum(rows), *rest, dtype=double) * 2 + torch.arange(channels, dtype=double).view(-1, *[1] * (len(rest) - 1))
    x.requires_grad_()
    dy = torch.randn(sum(rows), *rest, dtype=double)
    weight = torch.rand(channels, dtype=double) + 0.5 if affine else None
    bias = torch.randn(channels, dtype=double) if affine else None
    params = [p.requires_grad_() for p in (weight, bias) if p is not None]
    mean, var = torch.randn(channels, dtype=double), torch.rand(channels, dtype=double) + 0.5
    out = {"mean_before": mean.clone(), "var_before": var.clone()}
    y = torch.nn.functional.batch_norm(x, mean, var, weight, bias, training=True, momentum=MOMENTUM, eps=EPS)
    out |= {"mean_after": mean, "var_after": var}
    evaluated = torch.nn.functional.batch_norm(x, mean, var, weight, bias, training=False, eps=EPS)
    (dx,) = torch.autograd.grad((y * dy).sum(), x, retain_graph=True)
    parts = zip(*[t.split(rows) for t in (x, dy, y, dx, evaluated)])
    for rank, (x_part, dy_part, y_part, dx_part, evaluated_part) in enumerate(parts):
        found = {"x": x_part, "dy": dy_part, "y": y_part, "dx": dx_part, "evaluated": evaluated_part}
        if affine:
            grads = torch.autograd.grad((y_part * dy_part).sum(), params, retain_graph=True)
            found |= dict(zip(("dweight", "dbias"), grads))
        out |= {f"{name}.{rank}": tensor for name, tensor in found.items()}
    if affine:
        out |= {"weight": weight, "bias": bias}
    return out


def main():
    torch.manual_seed(20)
    tensors = {f"{name}/{key}": value.detach().clone().contiguous() for name, spec in CASES.items() for key, value in case(*spec).items()}
    OUT.parent.mkdir(exist_ok=True)
    save_file(tensors, OUT)
    print(f"{len(tensors)} tensors, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
