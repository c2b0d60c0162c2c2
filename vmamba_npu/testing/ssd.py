"""SSD for tests: seeded inputs with every option, and the recurrence of its definition in float64."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

# Floating-point arguments, in the order of the public function.
FLOATING = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
SUMMED = ("A", "D", "dt_bias")  # their gradients are sums over all tokens


def draw(
    seed: int = 0,
    batch: int = 1,
    L: int = 8,
    H: int = 2,
    P: int = 3,
    N: int = 4,
    G: int = 1,
    D: str | None = None,
    z: bool = False,
    dt_bias: bool = False,
    states: bool = False,
    packed: str | None = None,
    softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    dtype: torch.dtype = torch.float64,
) -> dict:
    """Keyword arguments of `ssd` except backend and chunk_size, absent options left out.

    Args:
        D: None, "head" ([H]) or "channel" ([H, P]).
        packed: None, "seq_idx", or "cu_seqlens" (then batch is 1, and some sequences are empty).
        dtype: of x, dt, B, C, z; parameters and states are float32, or float64 for float64.
    """
    g = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    batch = 1 if packed == "cu_seqlens" else batch
    # Steps of about 0.3 either way; without softplus some are negative, so that the clamp acts.
    step = torch.randn(batch, L, H, generator=g, dtype=torch.float64) * 0.5 + (-1.0 if softplus else 0.3)
    call: dict = {
        "x": normal(batch, L, H, P),
        "dt": step.to(dtype).requires_grad_(),
        "A": (-torch.rand(H, generator=g, dtype=torch.float64) * 2).to(wide).requires_grad_(),
        "B": normal(batch, L, G, N),
        "C": normal(batch, L, G, N),
        "dt_softplus": softplus,
        "dt_limit": dt_limit,
    }
    sequences = batch
    if packed == "seq_idx":
        call["seq_idx"] = (torch.rand(batch, L, generator=g) < 0.2).cumsum(1).int()
    elif packed == "cu_seqlens":
        cuts = torch.randint(0, L + 1, (3,), generator=g).tolist()
        borders = sorted([0, 0, *cuts, cuts[0], L])  # the first sequence, and one inside, are empty
        call["cu_seqlens"] = torch.tensor(borders, dtype=torch.int32)
        sequences = len(borders) - 1
    if D is not None:
        call["D"] = normal(*((H,) if D == "head" else (H, P)), dtype=wide)
    if z:
        call["z"] = normal(batch, L, H, P)
    if dt_bias:
        call["dt_bias"] = normal(H, dtype=wide)
    if states:
        call["initial_states"] = normal(sequences, H, P, N, dtype=wide)
    return call


def leaves(call: dict) -> dict[str, Tensor]:
    """The floating-point tensors of a call by name."""
    return {name: call[name] for name in FLOATING if call.get(name) is not None}


def in_float64(call: dict) -> dict:
    """The same call with float64 copies of its floating-point tensors, as fresh leaves."""
    return call | {name: t.detach().double().requires_grad_() for name, t in leaves(call).items()}


def definition(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> tuple[Tensor, Tensor]:
    """(y, final_states) token after token; autograd differentiates it."""
    batch, L, H, P = x.shape
    r = dt if dt_bias is None else dt + dt_bias
    step = -F.logsigmoid(-r) if dt_softplus else r
    # Not clamp(): whether that has a gradient on its limits, as ours has, depends on the version of torch.
    step = torch.where(step < dt_limit[0], dt_limit[0], torch.where(step > dt_limit[1], dt_limit[1], step))
    B, C = (torch.stack([t[:, :, h // (H // t.shape[2])] for h in range(H)], 2) for t in (B, C))  # [B, L, H, N]
    if cu_seqlens is None:
        spans = [(slice(None), 0, L)]
    else:
        borders = cu_seqlens.tolist()
        spans = [(slice(i, i + 1), a, b) for i, (a, b) in enumerate(pairwise(borders))]
    if initial_states is None:
        initial_states = x.new_zeros(batch if cu_seqlens is None else len(spans), H, P, B.shape[3])
    rows, final = [x.new_zeros(batch, 0, H, P)], []
    for sequence, first, end in spans:
        S = initial_states[sequence]
        for t in range(first, end):
            if seq_idx is not None:
                before = seq_idx[:, t - 1] if t else torch.zeros_like(seq_idx[:, 0])
                S = torch.where((seq_idx[:, t] == before)[:, None, None, None], S, 0.0)
            decay = (step[:, t] * A).exp()[:, :, None, None]
            S = decay * S + (step[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
            rows.append((S * C[:, t, :, None, :]).sum(-1)[:, None])
        final.append(S)
    y = torch.cat(rows, 1)
    if D is not None:
        y = y + (D if D.ndim == 2 else D[:, None]) * x
    if z is not None:
        y = y * z / (1 + (-z).exp())
    return y, torch.cat(final)
