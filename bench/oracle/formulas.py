"""Optimizers that PyTorch does not have, from their papers and published rules, as plain loops over parameters.

`optim.py` and `eight_bit.py` make golden steps with them. `python bench/oracle/formulas.py` compares them with other
implementations, if those are installed: Adafactor with that of `transformers`, the 8-bit maps with those of `bitsandbytes`.
"""

import math

import torch


class Rule(torch.optim.Optimizer):
    """Applies `update(param, grad, state, group)` to each parameter that has a gradient."""

    def __init__(self, params, lr, foreach=False, **settings):
        super().__init__(params, {"lr": lr, **self.settings, **settings})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad = -param.grad if group.get("maximize") else param.grad
                state = self.state[param]
                if not state:
                    state.update(self.begin(param))
                if "step" in state:
                    state["step"] += 1
                self.update(param, grad, state, group)


class Lion(Rule):
    """Chen and others, "Symbolic Discovery of Optimization Algorithms", algorithm 2."""

    settings = dict(betas=(0.9, 0.99), weight_decay=0.0, maximize=False)

    def begin(self, param):
        return {"exp_avg": torch.zeros_like(param)}

    def update(self, param, grad, state, group):
        beta1, beta2 = group["betas"]
        sign = (state["exp_avg"] * beta1 + grad * (1 - beta1)).sign()
        param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(sign * group["lr"])
        state["exp_avg"].mul_(beta2).add_(grad * (1 - beta2))


class Lamb(Rule):
    """You and others, "Large Batch Optimization for Deep Learning", algorithm 2; `correction` "step" is DeepSpeed's rule."""

    settings = dict(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, min_coeff=0.01, max_coeff=10.0, correction="means",
                    maximize=False)

    def begin(self, param):
        return {"step": torch.zeros(()), "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}

    def update(self, param, grad, state, group):
        (beta1, beta2), step = group["betas"], state["step"].item()
        state["exp_avg"].mul_(beta1).add_(grad * (1 - beta1))
        state["exp_avg_sq"].mul_(beta2).add_(grad * grad * (1 - beta2))
        first, second = 1 - beta1**step, 1 - beta2**step
        mean, square, lr = state["exp_avg"], state["exp_avg_sq"], group["lr"]
        if group["correction"] == "means":
            mean, square = mean / first, square / second
        elif group["correction"] == "step":
            lr = lr * math.sqrt(second) / first
        direction = mean / (square.sqrt() + group["eps"]) + group["weight_decay"] * param
        weights, length = param.double().norm().item(), direction.double().norm().item()
        coeff = 1.0
        if weights != 0 and length != 0:
            coeff = min(max(weights / length, group["min_coeff"]), group["max_coeff"])
        param.sub_(direction * (lr * coeff))


class TransformersAdafactor(Rule):
    """The Adafactor of `transformers`, without a first moment. The state has the names of PyTorch's Adafactor."""

    settings = dict(eps=(1e-30, 1e-3), clip_threshold=1.0, decay_rate=-0.8, scale_parameter=True, relative_step=True,
                    warmup_init=False)

    def begin(self, param):
        state = {"step": torch.zeros(())}
        if param.dim() < 2:
            return state | {"variance": torch.zeros_like(param)}
        rows, columns = param.shape[:-1] + (1,), param.shape[:-2] + (1,) + param.shape[-1:]
        return state | {"row_var": torch.zeros(rows), "col_var": torch.zeros(columns)}

    def update(self, param, grad, state, group):
        step, beta = state["step"].item(), 1 - state["step"].item() ** group["decay_rate"]
        rate = group["lr"]
        if group["relative_step"]:
            rate = min(1e-6 * step if group["warmup_init"] else 1e-2, 1 / math.sqrt(step))
        if group["scale_parameter"]:
            rate *= max(group["eps"][1], rms(param))
        squares = grad * grad + group["eps"][0]
        if param.dim() < 2:
            state["variance"].mul_(beta).add_(squares, alpha=1 - beta)
            update = state["variance"].rsqrt() * grad
        else:
            rows, columns = state["row_var"], state["col_var"]
            rows.mul_(beta).add_(squares.mean(dim=-1, keepdim=True), alpha=1 - beta)
            columns.mul_(beta).add_(squares.mean(dim=-2, keepdim=True), alpha=1 - beta)
            update = (rows / rows.mean(dim=-2, keepdim=True)).rsqrt() * columns.rsqrt() * grad
        update = update / max(1.0, rms(update) / group["clip_threshold"])
        param.sub_(update * rate)


def rms(tensor):
    return (tensor.double().norm() / math.sqrt(tensor.numel())).item()


def dynamic_map(signed):
    """bitsandbytes' map: in decade i of seven, 2**i evenly spaced numbers of each sign, or twice as many of one sign."""
    numbers = [0.0, 1.0]
    for decade in range(7):
        boundaries = torch.linspace(0.1, 1, (1 if signed else 2) * 2**decade + 1)
        means = 10 ** (decade - 6) * ((boundaries[:-1] + boundaries[1:]) / 2)
        numbers += means.tolist() + ((-means).tolist() if signed else [])
    return torch.tensor(sorted(numbers))


class EightBitAdamW(Rule):
    """AdamW with moments in 8 bits: blocks of up to 256 elements of a row, the nearest number of the dynamic map.

    Every operation is one in f32, in the order of the Rust kernel, so that the results are equal to the bit.
    """

    settings = dict(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    maps = {"exp_avg": dynamic_map(True), "exp_avg_sq": dynamic_map(False)}

    def begin(self, param):
        state = {"step": torch.zeros(())}
        for name in self.maps:
            if param.dim() < 2 or param.numel() < 4096:
                state[name] = torch.zeros_like(param)
            else:
                blocks = -(-param[0].numel() // 256)
                state[name] = torch.zeros(param.shape, dtype=torch.uint8)
                state[f"{name}_absmax"] = torch.zeros(param.shape[0], blocks)
        return state

    def load(self, state, name):
        if f"{name}_absmax" not in state:
            return state[name]
        values = self.maps[name][state[name].long()].flatten(1)
        scale = state[f"{name}_absmax"].repeat_interleave(256, dim=1)[:, : values.shape[1]]
        return (values * scale).view(state[name].shape)

    def store(self, state, name, numbers):
        if f"{name}_absmax" not in state:
            state[name].copy_(numbers)
            return
        rows = numbers.flatten(1)
        blocks = state[f"{name}_absmax"].shape[1]
        padded = torch.zeros(rows.shape[0], blocks * 256)
        padded[:, : rows.shape[1]] = rows
        absmax = padded.view(rows.shape[0], blocks, 256).abs().amax(-1)
        divisor = torch.where(absmax == 0, 1.0, absmax).repeat_interleave(256, dim=1)[:, : rows.shape[1]]
        middles = (self.maps[name][:-1] + self.maps[name][1:]) / 2
        state[name].copy_(torch.bucketize(rows / divisor, middles).view(numbers.shape))
        state[f"{name}_absmax"].copy_(absmax)

    def update(self, param, grad, state, group):
        (beta1, beta2), step, lr = group["betas"], state["step"].item(), group["lr"]
        number = lambda value: torch.tensor(value, dtype=torch.float64).float()
        mean, square = self.load(state, "exp_avg"), self.load(state, "exp_avg_sq")
        mean = mean + number(1 - beta1) * (grad - mean)
        square = square * number(beta2) + number(1 - beta2) * grad * grad
        # libtorch's f32 root is not always the nearest number.
        divisor = square.double().sqrt().float() / number(math.sqrt(1 - beta2**step)) + number(group["eps"])
        kept, size = number(1 - lr * group["weight_decay"]), number(lr / (1 - beta1**step))
        param.copy_(param * kept - size * mean / divisor)
        self.store(state, "exp_avg", mean)
        self.store(state, "exp_avg_sq", square)


def compare_with_transformers():
    try:
        from transformers.optimization import Adafactor
    except ImportError:
        return print("transformers is not installed")
    for options in [dict(relative_step=True), dict(relative_step=True, warmup_init=True),
                    dict(relative_step=False, scale_parameter=False)]:
        torch.manual_seed(1)
        params = [torch.randn(shape).requires_grad_() for shape in [(6, 5), (7,), (3, 2, 4)]]
        others = [param.detach().clone().requires_grad_() for param in params]
        lr = None if options["relative_step"] else 0.02
        theirs, ours = Adafactor(others, lr=lr, **options), TransformersAdafactor(params, lr=lr or 0.0, **options)
        for _ in range(10):
            for param, other in zip(params, others):
                param.grad = torch.randn(param.shape)
                other.grad = param.grad.clone()
            theirs.step(), ours.step()
        worst = max((a - b).abs().max().item() for a, b in zip(params, others))
        print(f"transformers, {options}: differs by {worst:.1e}")
        assert worst < 1e-6


def compare_with_bitsandbytes():
    try:
        from bitsandbytes.functional import create_dynamic_map
    except ImportError:
        return print("bitsandbytes is not installed")
    for signed in [True, False]:
        theirs = create_dynamic_map(signed=signed)
        worst = (theirs - dynamic_map(signed)).abs().max().item()
        print(f"bitsandbytes' map, signed {signed}: differs by {worst:.1e}")
        assert worst == 0


if __name__ == "__main__":
    compare_with_transformers()
    compare_with_bitsandbytes()
