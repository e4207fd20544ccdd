"""All-reduce and all-gather of PyTorch's gloo backend between the ranks that a launcher started, checked.

    all_reduce.py env        init_method env://
    all_reduce.py tcp        init_method tcp://MASTER_ADDR:MASTER_PORT, rank and world size from the environment
"""

import datetime
import os
import sys

import torch
import torch.distributed as dist


def join(way):
    timeout = datetime.timedelta(seconds=50)
    if way == "env":
        dist.init_process_group("gloo", timeout=timeout)
        return
    meeting = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group("gloo", init_method=meeting, timeout=timeout, **place)


def main():
    join(sys.argv[1])
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.full((1001,), float(rank + 1))
    dist.all_reduce(mine)
    assert mine.eq(world * (world + 1) / 2).all(), mine
    nodes = [None] * world
    dist.all_gather_object(nodes, (int(os.environ["GROUP_RANK"]), int(os.environ["LOCAL_RANK"])))
    assert nodes == sorted(nodes), nodes
    print(f"rank {rank} of {world}: sum {mine[0].item():g}, nodes {[node for node, _ in nodes]}")
    dist.destroy_process_group()


main()
