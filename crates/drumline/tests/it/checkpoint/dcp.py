"""One of several ranks of PyTorch beside Drumline's checkpoints: loads what Drumline wrote with HuggingFaceStorageReader, and writes folders with HuggingFaceStorageWriter.

Arguments: a plan as JSON (ranks, store, tensors, read, write), and the rank.
"""
import json
import math
import os
import sys

try:
    import safetensors.torch
    import torch.distributed.checkpoint as dcp
except ImportError:
    sys.exit(77)
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

plan, rank = json.loads(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + plan["store"], rank=rank, world_size=plan["ranks"])
mesh = init_device_mesh("cpu", (plan["ranks"],))


def values(shape, first, dtype):
    numbers = torch.arange(math.prod(shape), dtype=torch.float64) * 0.25 + first
    return numbers.to(getattr(torch, dtype)).reshape(shape)


def tensors():
    return {one["name"]: values(one["shape"], one["first"], one["dtype"]) for one in plan["tensors"]}


def distributed():
    """Along the dim that the plan names, or whole on each rank."""
    dims = {one["name"]: one["dim"] for one in plan["tensors"]}
    place = lambda name, tensor: tensor if dims[name] is None else distribute_tensor(tensor, mesh, [Shard(dims[name])])
    return {name: place(name, tensor) for name, tensor in tensors().items()}


def assert_same(state, words):
    for name, expected in tensors().items():
        found = state[name]
        found = found.full_tensor() if isinstance(found, DTensor) else found
        assert found.dtype == expected.dtype and torch.equal(found, expected), f"{words}: {name}: {found}"


for folder in plan["read"]:
    state = {name: torch.zeros_like(tensor) for name, tensor in distributed().items()}
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    assert_same(state, folder)
    if plan["ranks"] == 1 and folder == plan["read"][-1]:
        # PyTorch's consolidation knows the sizes of floating point types only.
        floats = {name: 1 for name, tensor in tensors().items() if tensor.is_floating_point()}
        out = plan["write"] + "-consolidated"
        os.mkdir(out)
        consolidate_safetensors_files(folder, out, floats)
        whole = safetensors.torch.load_file(out + "/model-00001-of-00001.safetensors")
        for name in floats:
            assert torch.equal(whole[name], tensors()[name]), name

dcp.save(distributed(), storage_writer=HuggingFaceStorageWriter(plan["write"], save_distributed=True))
model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 7))
with torch.no_grad():
    for first, parameter in enumerate(model.parameters()):
        parameter.copy_(values(parameter.shape, first, "float32"))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
writer = HuggingFaceStorageWriter(plan["write"] + "-fsdp", save_distributed=True)
dcp.save(get_model_state_dict(model), storage_writer=writer)
dist.barrier()
dist.destroy_process_group()
# The interpreter's end sometimes aborts in a thread of gloo, after everything was checked.
sys.stderr.flush()
os._exit(0)
