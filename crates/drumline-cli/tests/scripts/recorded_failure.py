"""Rank 1 fails inside PyTorch's @record; the others wait to be stopped."""

import os
import time

from torch.distributed.elastic.multiprocessing.errors import record


def load(layer):
    raise ValueError(f"no such layer: {layer}")


@record
def main():
    if os.environ["RANK"] == "1":
        load("Größe")
    time.sleep(60)


main()
