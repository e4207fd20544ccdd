"""Golden file for the ResNet family: names, shapes, first weights, and one training step.

Called, with torch 2.11 and torchvision 0.26, as:
    python bench/oracle/resnet_names.py > bench/oracle/golden/resnet_names.json

Parts of the file:
    names   by depth, as torchvision spells and orders them (state_dict)
    shapes  by architecture, in the order of the names
    seeded  sums of a few tensors of resnet18 and resnet50 after manual_seed(7)
    step    resnet18 with 10 classes, all tensors filled by `fill`, on 16 images of 32x32: outputs, loss, gradients, running statistics
"""
import json
import sys

import numpy as np
import torch
import torchvision

ARCHES = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnext50_32x4d", "resnext101_32x8d",
          "resnext101_64x4d", "wide_resnet50_2", "wide_resnet101_2"]


def depth(arch):
    return "".join(c for c in arch.removeprefix("wide_").split("_")[0] if c.isdigit())


def fill(index, shape):
    """Numbers between -0.5 and 0.5 that look random, from the place of the tensor and of the element alone."""
    x = np.arange(int(np.prod(shape)), dtype=np.uint32) + np.uint32(index * 7919)
    x = x * np.uint32(2654435761)
    x ^= x >> np.uint32(15)
    x = x * np.uint32(2246822519)
    x ^= x >> np.uint32(13)
    return torch.from_numpy(x.astype(np.float64) / 2.0**32 - 0.5).reshape(shape)


def fill_model(model):
    for index, (name, tensor) in enumerate(model.state_dict().items()):
        if name.endswith("num_batches_tracked"):
            continue
        x = fill(index, tensor.shape)
        if tensor.dim() > 1:
            x = x * (24.0 / (tensor.numel() / tensor.shape[1])) ** 0.5
        elif name.endswith("running_var") or (name.endswith("weight") and "fc" not in name):
            x = x * 0.4 + 1
        else:
            x = x * 0.2
        tensor.copy_(x.float())


def brief(tensor):
    """Two figures that tell a tensor from another: its length and its product with a pattern."""
    x = tensor.detach().double().flatten()
    return [x.norm().item(), (x * fill(1, x.shape)).sum().item()]


def seeded(arch):
    torch.manual_seed(7)
    state = getattr(torchvision.models, arch)(num_classes=10).state_dict()
    picks = ["conv1.weight", "layer1.0.conv2.weight", "layer2.0.downsample.0.weight", "layer4.1.conv2.weight", "fc.weight", "fc.bias"]
    return {name: brief(state[name]) for name in picks}


def step():
    model = torchvision.models.resnet18(num_classes=10)
    with torch.no_grad():
        fill_model(model)
    images = (fill(1000, (16, 3, 32, 32)) * 4).float()
    labels = torch.arange(16) % 10
    with torch.no_grad():
        evaluated = model.eval()(images)
    output = model.train()(images)
    loss = torch.nn.functional.cross_entropy(output, labels)
    loss.backward()
    return {
        "eval_output": evaluated[:2].flatten().tolist(),
        "output": output[:2].flatten().tolist(),
        "loss": loss.item(),
        "gradients": {name: brief(p.grad) for name, p in model.named_parameters()},
        "buffers": {name: brief(b) for name, b in model.named_buffers() if not name.endswith("tracked")},
        "tracked": model.bn1.num_batches_tracked.item(),
    }


def main():
    torch.set_num_threads(1)
    names, shapes = {}, {}
    for arch in ARCHES:
        with torch.device("meta"):
            state = getattr(torchvision.models, arch)().state_dict()
        assert names.setdefault(depth(arch), list(state)) == list(state)
        shapes[arch] = ["x".join(map(str, t.shape)) for t in state.values()]
    golden = {"names": names, "shapes": shapes, "seeded": {a: seeded(a) for a in ["resnet18", "resnet50"]}, "step": step()}
    json.dump(golden, sys.stdout, separators=(",", ":"))
    print()


main()
