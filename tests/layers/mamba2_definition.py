"""Mamba-2 layers by their recurrences, token by token in float64: what the tests of the layers compare with."""

import math
from itertools import pairwise

import torch
from torch import Tensor


def silu(t: Tensor) -> Tensor:
    return t / (1 + (-t).exp())


def softplus(t: Tensor) -> Tensor:
    return t.clamp(min=0) + (1 + (-t.abs()).exp()).log()


def gated_norm(y: Tensor, z: Tensor, weight: Tensor, groups: int, norm_before_gate: bool) -> Tensor:
    """One token: y, z [E]."""
    u = y if norm_before_gate else y * silu(z)
    size = u.shape[0] // groups
    parts = [u[g * size : (g + 1) * size] for g in range(groups)]
    v = torch.cat([p / ((p * p).sum() / size + 1e-5).sqrt() for p in parts]) * weight
    return v * silu(z) if norm_before_gate else v


class Sequence:
    """One sequence of a layer: feed it tokens [d_model], get outputs; keeps the state and the last W conv inputs."""

    def __init__(self, layer, weights: dict[str, Tensor], S: Tensor | None = None):
        self.m, self.w = layer, weights
        self.H, self.P, self.N, self.G = layer.nheads, layer.headdim, layer.d_state, layer.ngroups
        zero = next(iter(weights.values())).new_zeros
        self.S = zero(self.H, self.P, self.N) if S is None else S
        self.window = [zero(layer.d_ssm + 2 * self.G * self.N)] * layer.d_conv
        self.norm_groups = self.G if type(layer).__name__ != "Mamba2Simple" else 1

    def token(self, u: Tensor) -> Tensor:
        w, m, E, GN = self.w, self.m, self.m.d_ssm, self.G * self.N
        p = w["in_proj.weight"] @ u + w.get("in_proj.bias", 0)
        sizes = [m.d_inner - E, m.d_inner - E, E, E + 2 * GN, self.H]
        starts = [sum(sizes[:i]) for i in range(6)]
        z0, x0, z, xBC, dt = (p[a:b] for a, b in pairwise(starts))
        self.window = [*self.window[1:], xBC]
        conv = w.get("conv1d.bias", 0) + sum(w["conv1d.weight"][:, 0, j] * self.window[j] for j in range(m.d_conv))
        conv = silu(conv)
        x, B, C = conv[:E], conv[E : E + GN], conv[E + GN :]
        step = softplus(dt + w["dt_bias"]).clamp(*m.dt_limit)
        y, S = [], []
        for h in range(self.H):
            g = h // (self.H // self.G)
            xh, Bh, Ch = x[h * self.P : (h + 1) * self.P], B[g * self.N :][: self.N], C[g * self.N :][: self.N]
            decay = (-step[h] * w["A_log"][h].exp()).exp()
            S.append(decay * self.S[h] + step[h] * xh[:, None] * Bh[None, :])
            D = w["D"][h * self.P : (h + 1) * self.P] if w["D"].shape[0] != self.H else w["D"][h]
            y.append((S[-1] * Ch).sum(1) + D * xh)
        self.S, y = torch.stack(S), torch.cat(y)
        if "norm.weight" in w:
            y = gated_norm(y, z, w["norm.weight"], self.norm_groups, m.norm_before_gate)
        else:
            y = y * silu(z)
        return w["out_proj.weight"] @ torch.cat([silu(z0) * x0, y]) + w.get("out_proj.bias", 0)

    def conv_state(self) -> Tensor:  # [conv_dim, W]
        return torch.stack(self.window, 1)


def run(layer, weights: dict[str, Tensor], tokens: Tensor, S: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(outputs [L, d_model], conv_state, ssm_state) of one sequence [L, d_model]."""
    sequence = Sequence(layer, weights, S)
    outputs = [sequence.token(u) for u in tokens]
    return torch.stack(outputs) if outputs else tokens[:0], sequence.conv_state(), sequence.S


def rows(layer, weights: dict[str, Tensor], u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`run` of every row of [B, L, d_model]."""
    return tuple(torch.stack(part) for part in zip(*(run(layer, weights, row) for row in u), strict=True))


def weights_of(layer) -> dict[str, Tensor]:
    """float64 leaves of a layer's parameters."""
    return {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def disturb(layer, seed: int = 1):
    """Move the parameters off their initial values (D and the norm's weight start as ones), and grow the steps."""
    with torch.no_grad():
        for i, (name, p) in enumerate(layer.named_parameters()):
            p.add_(0.1 * draw(*p.shape, seed=seed + i).to(p.dtype))
            if name == "dt_bias":
                p.add_(math.log(20))
    return layer
