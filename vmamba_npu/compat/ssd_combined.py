"""mamba_ssm.ops.triton.ssd_combined: the scan alone, and with the convolution, norm and projection around it."""

from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import causal_conv1d, gated_rms_norm, ssd
from .causal_conv1d import refuse_text

__all__ = [
    "mamba_chunk_scan",
    "mamba_chunk_scan_combined",
    "mamba_conv1d_scan_ref",
    "mamba_split_conv1d_scan_combined",
    "mamba_split_conv1d_scan_ref",
    "ssd_chunk_scan_combined_ref",
]


def _check_state_dtype(state_dtype: torch.dtype | None) -> None:
    if state_dtype is not None and not (isinstance(state_dtype, torch.dtype) and state_dtype.is_floating_point):
        raise TypeError(f"state_dtype: expected a floating-point torch.dtype or None, got {state_dtype!r}")


def _check_agreement(seq_idx: Tensor, cu_seqlens: Tensor, L: int) -> None:
    """Compares values, so on devices it waits for them; the two together are rare."""
    places = torch.arange(1, L, device=seq_idx.device)
    borders = torch.isin(places, cu_seqlens.to(seq_idx.device))
    if tuple(seq_idx.shape) != (1, L) or not torch.equal(seq_idx[0].diff() != 0, borders):
        raise ValueError("seq_idx: expected to change at the borders of cu_seqlens and nowhere else")


def _packed(
    x: Tensor, initial_states: Tensor | None, seq_idx: Tensor | None, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor | None]:
    """cu_seqlens on the device of x, and a state for each sequence: one given state is that of sequence 0."""
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens: expected [sequences + 1], got shape {tuple(cu_seqlens.shape)}")
    if seq_idx is not None and not torch.compiler.is_compiling():  # a graph cannot depend on values
        _check_agreement(seq_idx, cu_seqlens, x.shape[1])
    others = cu_seqlens.shape[0] - 2
    if initial_states is not None and initial_states.ndim == 4 and initial_states.shape[0] == 1 and others:
        zeros = initial_states.new_zeros(others, *initial_states.shape[1:])
        initial_states = torch.cat([initial_states, zeros])
    return cu_seqlens.to(x.device), initial_states


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`vmamba_npu.ops.ssd`, returning what is asked for.

    Args:
        x, dt, A, B, C, chunk_size, D, z, dt_bias, dt_softplus, dt_limit: as `ssd`.
        initial_states: [B, H, P, N]. With `cu_seqlens` [1, H, P, N], which reaches the first sequence alone, or
            [sequences, H, P, N], one for each.
        seq_idx: [B, L] integer. With `cu_seqlens` too, both must have the same borders.
        cu_seqlens: [sequences + 1] integer; sequences are always kept apart.
        state_dtype: a floating-point dtype; states are float32 at least whatever it is.

    Returns:
        out [B, L, H, P] in the dtype of x, or a tuple (out, final_states if wanted, varlen_states if wanted):
        final_states [B, H, P, N] after the last token of each row, varlen_states [sequences, H, P, N].

    Raises:
        ValueError: an argument differs from the above, or varlen states are wanted without `cu_seqlens`.
        TypeError: a tensor has a dtype that differs from the above, or `state_dtype` is no such dtype.
    """
    _check_state_dtype(state_dtype)
    refuse_text(seq_idx)
    if return_varlen_states and cu_seqlens is None:
        raise ValueError("return_varlen_states: expected cu_seqlens with it, got none")
    if cu_seqlens is not None:
        cu_seqlens, initial_states = _packed(x, initial_states, seq_idx, cu_seqlens)
        seq_idx = None
    y, states = ssd(
        x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, cu_seqlens, dt_softplus, dt_limit
    )
    out = [y]
    if return_final_states and cu_seqlens is not None:
        # the first sequence that ends with the last token; those after it are empty
        last = (cu_seqlens[1:] < x.shape[1]).sum().unsqueeze(0)
        out.append(states.index_select(0, last))
    elif return_final_states:
        out.append(states)
    if return_varlen_states:
        out.append(states)
    return y if len(out) == 1 else tuple(out)


def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """The scan without states and packing; steps are not clamped."""
    return ssd(x, dt, A, B, C, chunk_size, D, z, dt_bias, dt_softplus=dt_softplus, dt_limit=(-inf, inf))[0]


def ssd_chunk_scan_combined_ref(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """`mamba_chunk_scan` by its definition, token after token."""
    return ssd(
        x, dt, A, B, C, chunk_size, D, z, dt_bias, dt_softplus=dt_softplus, dt_limit=(-inf, inf), backend="reference"
    )[0]


def _headdim(D: Tensor | None, headdim: int | None) -> int:
    """P: the second size of D, else what the caller says."""
    if D is not None and D.ndim == 2:
        if headdim is not None and headdim != D.shape[1]:
            raise ValueError(f"headdim: expected {D.shape[1]}, the second size of D, got {headdim}")
        return D.shape[1]
    if headdim is None:
        raise ValueError("headdim: expected the size of a head when D is not [H, P], got None")
    return headdim


def _conv_scan(
    xBC, weight, bias, seq_idx, dt, A, chunk_size, D, z, dt_bias, initial_states, dt_softplus, dt_limit, activation,
    headdim, ngroups, backend,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Convolution and scan: out [B, L, H, P], final_states [B, H, P, N]."""
    dim, channels = dt.shape[-1] * headdim, weight.shape[0]
    if channels <= dim or (channels - dim) % (2 * ngroups):
        raise ValueError(
            f"conv1d_weight: expected H * P + 2 * ngroups * N = {dim} + {2 * ngroups} * N channels, got {channels}"
        )
    if xBC.shape[-1] != channels:
        raise ValueError(f"xBC: expected {channels} channels, those of conv1d_weight, got {xBC.shape[-1]}")
    width = (channels - dim) // 2
    xBC = causal_conv1d(xBC.mT, weight, bias, seq_idx, activation=activation, backend=backend)[0].mT
    x, B, C = xBC.split([dim, width, width], -1)
    B, C = B.unflatten(-1, (ngroups, -1)), C.unflatten(-1, (ngroups, -1))  # [B, L, G, N]
    x, z = x.unflatten(-1, (-1, headdim)), None if z is None else z.unflatten(-1, (-1, headdim))  # [B, L, H, P]
    return ssd(x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, None, dt_softplus, dt_limit, backend)


def mamba_conv1d_scan_ref(
    xBC: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt: Tensor,
    A: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf),
    activation: str | None = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
) -> Tensor:
    """Convolution and scan by their definitions: out [B, L, H * P]. xBC [B, L, H * P + 2 G N], z [B, L, H * P]."""
    if dt.ndim != 3 or A.ndim != 1:
        raise NotImplementedError("dt, A: expected [B, L, H] and [H]; steps for each channel are Mamba-1's scan")
    if z is not None:
        headdim = z.shape[-1] // dt.shape[-1]
    out, _ = _conv_scan(
        xBC, conv1d_weight, conv1d_bias, None, dt, A, chunk_size, D, z, dt_bias, None, dt_softplus, dt_limit,
        activation, _headdim(D, headdim), ngroups, "reference",
    )  # fmt: skip
    return out.flatten(-2)


def _split_conv_scan(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states, seq_idx, dt_limit, activation,
    rmsnorm_weight, rmsnorm_eps, outproj_weight, outproj_bias, headdim, ngroups, norm_before_gate, backend,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    refuse_text(seq_idx)
    headdim = _headdim(D, headdim)
    nheads, channels, width = A.shape[0], conv1d_weight.shape[0], zxbcdt.shape[-1]
    dim = nheads * headdim
    d_mlp, odd = divmod(width - dim - channels - nheads, 2)
    if d_mlp < 0 or odd:
        raise ValueError(
            f"zxbcdt: expected 2 * d_mlp + {dim} (z) + {channels} (xBC) + {nheads} (dt) channels, got {width}"
        )
    z0, x0, z, xBC, dt = zxbcdt.split([d_mlp, d_mlp, dim, channels, nheads], -1)
    y, final_states = _conv_scan(
        xBC, conv1d_weight, conv1d_bias, seq_idx, dt, A, chunk_size, D, z if rmsnorm_weight is None else None, dt_bias,
        initial_states, True, dt_limit, activation, headdim, ngroups, backend,
    )  # fmt: skip
    y = y.flatten(-2)  # [B, L, H * P]
    if rmsnorm_weight is not None:
        y = gated_rms_norm(y, rmsnorm_weight, None, z, rmsnorm_eps, dim // ngroups, norm_before_gate, backend)
    if d_mlp:
        y = torch.cat([F.silu(z0) * x0, y], -1)
    return (y if outproj_weight is None else F.linear(y, outproj_weight, outproj_bias)), final_states


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor | None,
    A: Tensor,
    D: Tensor | None,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, inf),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A Mamba-2 layer after its input projection: convolution, scan, norm or gate, output projection.

    Args:
        zxbcdt: [B, L, 2 d_mlp + 2 H P + 2 G N + H], in the order z0, x0 (d_mlp each), z, x, B, C, dt; softplus is
            applied to dt.
        conv1d_weight, conv1d_bias: [H P + 2 G N, W], [H P + 2 G N].
        dt_bias, A: [H]; D: [H] (then headdim is needed) or [H, P]; initial_states: [B, H, P, N]; seq_idx: [B, L].
        rmsnorm_weight: [H P], of a norm over groups of H P / G channels, gated by z; without it z gates the scan.
        outproj_weight, outproj_bias: [out, d_mlp + H P], [out]; silu(z0) * x0 comes before the scan's part.
        state_dtype: a floating-point dtype; states are float32 at least whatever it is.

    Returns:
        out [B, L, out], or (out, final_states [B, H, P, N]) on request.
    """
    _check_state_dtype(state_dtype)
    out, final_states = _split_conv_scan(
        zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states, seq_idx, dt_limit, activation,
        rmsnorm_weight, rmsnorm_eps, outproj_weight, outproj_bias, headdim, ngroups, norm_before_gate, "auto",
    )  # fmt: skip
    return (out, final_states) if return_final_states else out


def mamba_split_conv1d_scan_ref(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor | None,
    A: Tensor,
    D: Tensor | None,
    chunk_size: int,
    dt_limit: tuple[float, float] = (0.0, inf),
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    """`mamba_split_conv1d_scan_combined` by the definitions of its parts, token after token."""
    return _split_conv_scan(
        zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, None, None, dt_limit, activation,
        rmsnorm_weight, rmsnorm_eps, outproj_weight, outproj_bias, headdim, ngroups, norm_before_gate, "reference",
    )[0]  # fmt: skip
