"""Muon, for all matrices of a shape at once: many times fewer kernels than torch.optim.Muon."""

import torch


def orthogonal(x, steps=5, epsilon=1e-7):
    """About the nearest orthogonal matrices to x [n, rows, columns], by Newton and Schulz."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.size(1) > x.size(2)
    x = x.bfloat16()
    x = x.transpose(1, 2) if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=epsilon)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        gram_update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram_update, x, beta=a)
    return x.transpose(1, 2) if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, matrices, lr, momentum=0.95, weight_decay=0.01):
        super().__init__(
            list(matrices), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for shape, matrices in shapes.items():
                self.step_shape(shape, matrices, group)

    def step_shape(self, shape, matrices, group):
        for p in matrices:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        gradients = [p.grad for p in matrices]
        kept = [self.state[p]["momentum"] for p in matrices]
        torch._foreach_lerp_(kept, gradients, 1 - group["momentum"])
        ahead = torch.stack(torch._foreach_lerp(gradients, kept, group["momentum"]))
        updates = orthogonal(ahead).to(matrices[0].dtype).unbind(0)
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        size = 0.2 * max(shape) ** 0.5  # the root mean square of AdamW's updates
        torch._foreach_add_(matrices, updates, alpha=-group["lr"] * size)
