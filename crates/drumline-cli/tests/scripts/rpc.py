"""PyTorch's RPC between the ranks that a launcher started: each asks the next to add for it."""

import os

import torch
import torch.distributed.rpc as rpc


def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=50)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world, rpc_backend_options=options)
    added = rpc.rpc_sync(f"rank{(rank + 1) % world}", torch.add, args=(torch.full((3,), float(rank)), 1))
    assert added.eq(rank + 1).all(), added
    print(f"rank {rank}: the next one added {added[0].item():g}")
    rpc.shutdown()


main()
