"""One of several ranks of PyTorch beside Drumline's sharded training: loads what ZeRO 3 saved with HuggingFaceStorageReader, and writes a model with FSDP2.

Arguments: a plan as JSON (ranks, store, expected: a file with whole tensors, read: folders, write: a folder), and the rank.
"""
import json
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
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

plan, rank = json.loads(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + plan["store"], rank=rank, world_size=plan["ranks"])
mesh = init_device_mesh("cpu", (plan["ranks"],))
expected = safetensors.torch.load_file(plan["expected"])
assert any(name.endswith(".exp_avg_sq") for name in expected), list(expected)

for folder in plan["read"]:
    state = {}
    for name, tensor in expected.items():
        zeros = torch.zeros_like(tensor)
        state[name] = distribute_tensor(zeros, mesh, [Shard(0)]) if tensor.dim() > 0 else zeros
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    for name, tensor in expected.items():
        found = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
        assert found.dtype == tensor.dtype and torch.equal(found, tensor), f"{folder}: {name}: {found}"

# A model of the same names and shapes, whose values are the negatives.
model = torch.nn.Module()
for name in sorted({name.split(".")[0] for name in expected}):
    weight, bias = expected[f"{name}.weight"], expected[f"{name}.bias"]
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(-weight)
        layer.bias.copy_(-bias)
    setattr(model, name, layer)
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
dcp.save(get_model_state_dict(model), storage_writer=HuggingFaceStorageWriter(plan["write"], save_distributed=True))
dist.barrier()
dist.destroy_process_group()
# The interpreter's end sometimes aborts in a thread of gloo, after everything was checked.
sys.stderr.flush()
os._exit(0)
