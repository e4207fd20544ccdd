"""ResNet-18 in plain PyTorch with torchvision's names, filled by a formula, so that both sides begin with the same weights.

Used by peers/ddp.py and by the oracles; needs nothing but torch.
"""
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        kept = x if self.downsample is None else self.downsample(x)
        x = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(x)) + kept)


class ResNet18(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Block(64, 64, 1), Block(64, 64, 1))
        self.layer2 = nn.Sequential(Block(64, 128, 2), Block(128, 128, 1))
        self.layer3 = nn.Sequential(Block(128, 256, 2), Block(256, 256, 1))
        self.layer4 = nn.Sequential(Block(256, 512, 2), Block(512, 512, 1))
        self.fc = nn.Linear(512, num_classes)

    def forward(self, x):
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


@torch.no_grad()
def fill(model):
    """Weights of convolutions and of the classifier by a formula of their place; norms begin as always, biases at zero."""
    for place, (name, parameter) in enumerate(sorted(model.named_parameters())):
        if parameter.dim() < 2:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            continue
        fan_in = parameter[0].numel()
        index = torch.arange(parameter.numel(), dtype=torch.float64)
        values = torch.sin(index * 0.7 + index * index * 1e-5 + place) * (2.0 / fan_in) ** 0.5
        parameter.copy_(values.to(parameter.dtype).view_as(parameter))
    return model


def batch(step, rank, world, size, num_classes=10, edge=32):
    """Images and labels of one rank at one step: waves whose direction, length and colour depend on the class."""
    first = (step * world + rank) * size
    sample = torch.arange(first, first + size, dtype=torch.float64)
    labels = (sample * 7 + (sample / 3).floor()) % num_classes
    y, x = torch.meshgrid(torch.arange(edge, dtype=torch.float64), torch.arange(edge, dtype=torch.float64), indexing="ij")
    angle = (labels * 0.31).view(-1, 1, 1, 1)
    colour = torch.arange(3, dtype=torch.float64).view(1, 3, 1, 1)
    phase = (sample * 0.37).view(-1, 1, 1, 1)
    waves = torch.sin((x * torch.cos(angle) + y * torch.sin(angle)) * (0.5 + 0.1 * angle) + phase + colour * (1 + angle))
    return waves.to(torch.float32), labels.to(torch.int64)
