"""Indices of torch 2.11's DistributedSampler over a grid, for the tests of ours.

    python bench/oracle/sampler.py            # with torch 2.11; writes bench/oracle/golden/sampler.json

A case holds what each rank gets: the indices themselves where the data set is short, else how many there are and the
CRC-32 of them as little-endian 64-bit numbers. `large` is one permutation from the length on where torch draws 64 bits
a step; it takes 4 GB and a minute, so only its checksum is kept.
"""

import itertools
import json
import pathlib
import zlib

import numpy
import torch
from torch.utils.data.distributed import DistributedSampler

PATH = pathlib.Path(__file__).resolve().parent / "golden" / "sampler.json"
LENGTHS = [0, 1, 2, 7, 50, 1000, 50000]
WORLDS = [1, 2, 3, 4, 5]
SEEDS = [0, 42, 2**32 + 5, 2**63]
EPOCHS = [0, 1, 300]
PADDED_OFTEN = (7, 64)
LONGEST_LISTED = 7
LARGE = (2**32 - 1) // 20


def crc(values):
    return zlib.crc32(numpy.asarray(values, dtype="<u8").tobytes())


def share(length, world, rank, options, epoch):
    sampler = DistributedSampler(range(length), num_replicas=world, rank=rank, **options)
    sampler.set_epoch(epoch)
    return list(sampler)


def case(length, world, options, epoch):
    ranks = [share(length, world, rank, options, epoch) for rank in range(world)]
    told = {"length": length, "world": world, "epoch": epoch, **options}
    if length <= LONGEST_LISTED:
        return {**told, "indices": ranks}
    return {**told, "counts": [len(r) for r in ranks], "crcs": [crc(r) for r in ranks]}


def cases():
    for length, world in [*itertools.product(LENGTHS, WORLDS), PADDED_OFTEN]:
        for drop_last in [False, True]:
            yield case(length, world, {"shuffle": False, "seed": 0, "drop_last": drop_last}, 3)
            for seed, epoch in itertools.product(SEEDS, EPOCHS):
                yield case(length, world, {"shuffle": True, "seed": seed, "drop_last": drop_last}, epoch)


def permutation(length, seed):
    generator = torch.Generator()
    generator.manual_seed(seed)
    order = torch.randperm(length, generator=generator).numpy()
    return {"length": length, "seed": seed, "first": order[:5].tolist(), "crc": crc(order)}


def main():
    lines = ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases())
    large = [permutation(length, 7) for length in [LARGE - 1, LARGE]]
    PATH.write_text(f'{{"torch":"{torch.__version__}","large":{json.dumps(large)},"cases":[\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
