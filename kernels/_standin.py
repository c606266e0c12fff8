from typing import Any

import torch


def fused_adamw(
    params: Any,
    grads: Any,
    mu: Any,
    nu: Any,
    step: Any,
    lr: Any,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: Any,
    decoupled: bool,
) -> Any:
    c1 = 1 - torch.pow(torch.full_like(step, beta1, dtype=torch.float64), step)
    c2 = 1 - torch.pow(torch.full_like(step, beta2, dtype=torch.float64), step)
    us, ms, vs = [], [], []
    for p, g, m, v, w in zip(params, grads, mu, nu, weight_decay, strict=True):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        us.append(
            -lr.to(p.dtype) * (m / c1.to(p.dtype) / ((v / c2.to(p.dtype)).sqrt() + eps) + w * p)
        )
        ms.append(m)
        vs.append(v)
    return us, ms, vs
