"""mamba_ssm.ops.triton.layer_norm: norms that add a residual and drop values on the way, in plain PyTorch."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "RMSNorm",
    "layer_norm_fn",
    "layer_norm_linear_fn",
    "layer_norm_ref",
    "rms_norm_fn",
    "rms_norm_ref",
]


def _check(x: Tensor, residual, x1, weight1, bias1, dropout_p: float, rowscale) -> None:
    for name, t in (("residual", residual), ("x1", x1)):
        if t is not None and t.shape != x.shape:
            raise ValueError(f"{name}: expected the shape of x, {tuple(x.shape)}, got {tuple(t.shape)}")
    if rowscale is not None and x1 is not None:
        raise ValueError("rowscale: expected to be absent when x1 is given, got both")
    if rowscale is not None and rowscale.shape != x.shape[:-1]:
        raise ValueError(f"rowscale: expected {tuple(x.shape[:-1])}, got {tuple(rowscale.shape)}")
    if bias1 is not None and weight1 is None:
        raise ValueError("bias1: expected weight1 with it, got none")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: expected a probability in [0, 1), got {dropout_p}")


def _drop(x: Tensor, mask: Tensor | None, dropout_p: float) -> Tensor:
    return x if mask is None else x.masked_fill(~mask, 0) / (1 - dropout_p)


def _sum(x, residual, x1, dropout_p, rowscale, masks, acc) -> Tensor:
    """What is normalised: dropout(x * rowscale) + dropout(x1) + residual."""
    r = x.to(acc)
    if rowscale is not None:
        r = r * rowscale.to(acc).unsqueeze(-1)
    r = _drop(r, masks[0], dropout_p)
    if x1 is not None:
        r = r + _drop(x1.to(acc), masks[1], dropout_p)
    return r if residual is None else r + residual.to(acc)


def _affine(normed: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = normed * weight.to(normed.dtype)
    return (y if bias is None else y + bias.to(normed.dtype)).to(dtype)


def _normalise(r: Tensor, eps: float, is_rms_norm: bool) -> Tensor:
    r = r if is_rms_norm else r - r.mean(-1, keepdim=True)
    return r * (r.square().mean(-1, keepdim=True) + eps).rsqrt()


def _compute(
    x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, masks, r_dtype, is_rms_norm, acc
) -> tuple[Tensor, ...]:
    _check(x, residual, x1, weight1, bias1, dropout_p, rowscale)
    r = _sum(x, residual, x1, dropout_p, rowscale, masks, acc)
    normed = _normalise(r, eps, is_rms_norm)
    out = [_affine(normed, weight, bias, x.dtype)]
    if weight1 is not None:
        out.append(_affine(normed, weight1, bias1, x.dtype))
    return (*out, r.to(r_dtype)) if prenorm else tuple(out)


def _residual_dtype(x: Tensor, residual: Tensor | None, residual_in_fp32: bool) -> torch.dtype:
    if residual is not None:
        return residual.dtype
    return torch.promote_types(x.dtype, torch.float32) if residual_in_fp32 else x.dtype


def _draw_masks(x: Tensor, x1: Tensor | None, dropout_p: float) -> tuple[Tensor | None, Tensor | None]:
    """True where a value is kept."""
    if dropout_p == 0:
        return None, None
    kept = [None if t is None else torch.rand(t.shape, device=t.device) >= dropout_p for t in (x, x1)]
    return kept[0], kept[1]


def _one_or_all(out: tuple) -> Tensor | tuple:
    return out[0] if len(out) == 1 else out


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    *,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple:
    """Layer norm (or RMS norm) of ``r = dropout(x * rowscale) + dropout(x1) + residual``, summed in float32 at least.

    What follows `residual` is accepted by keyword alone: its order changed between versions of mamba_ssm.

    Args:
        x: [..., D]; residual, x1: the same shape; rowscale: [...].
        weight, bias, weight1, bias1: [D]; with `weight1` a second result from the same statistics.
        dropout_p: applied whenever > 0.
        prenorm: return r too, in the dtype of residual, else float32 if `residual_in_fp32`, else that of x.
        return_dropout_mask: append the masks of x and x1 (True: kept; None without dropout or without x1).

    Returns:
        y in the dtype of x, or a tuple: (y, y1 with `weight1`, r with `prenorm`, both masks if wanted).
    """
    masks = _draw_masks(x, x1, dropout_p)
    out = _compute(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, masks,
        _residual_dtype(x, residual, residual_in_fp32), is_rms_norm, torch.promote_types(x.dtype, torch.float32),
    )  # fmt: skip
    return _one_or_all((*out, *masks) if return_dropout_mask else out)


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    *,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Tensor | tuple:
    """`layer_norm_fn` with the RMS norm."""
    return layer_norm_fn(
        x, weight, bias, residual, x1=x1, weight1=weight1, bias1=bias1, eps=eps, dropout_p=dropout_p,
        rowscale=rowscale, prenorm=prenorm, residual_in_fp32=residual_in_fp32, is_rms_norm=True,
        return_dropout_mask=return_dropout_mask,
    )  # fmt: skip


def layer_norm_linear_fn(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The norm followed by a linear map: out, or (out, r) with `prenorm`."""
    y, *r = layer_norm_fn(
        x, norm_weight, norm_bias, residual, eps=eps, prenorm=True, residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
    )  # fmt: skip
    out = F.linear(y, linear_weight, linear_bias)
    return (out, r[0]) if prenorm else out


def _ref(
    x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, masks, upcast, is_rms_norm
) -> Tensor | tuple:
    if dropout_p > 0 and (masks[0] is None or (x1 is not None and masks[1] is None)):
        drawn = _draw_masks(x, x1, dropout_p)
        masks = tuple(given if given is not None else own for given, own in zip(masks, drawn, strict=True))
    acc = torch.promote_types(x.dtype, torch.float32) if upcast else x.dtype
    out = _compute(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, masks,
        acc, is_rms_norm, acc,
    )  # fmt: skip
    return _one_or_all(out)


def layer_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None,
    upcast: bool = False,
) -> Tensor | tuple:
    """`layer_norm_fn` with given masks, computed in the dtype of x (float32 at least if `upcast`), which r has too."""
    masks = (dropout_mask, dropout_mask1)
    return _ref(x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, masks, upcast, False)


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None,
    upcast: bool = False,
) -> Tensor | tuple:
    """`layer_norm_ref` with the RMS norm."""
    masks = (dropout_mask, dropout_mask1)
    return _ref(x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, masks, upcast, True)


class RMSNorm(nn.Module):
    """RMS norm of the sum of an input and a residual; one parameter, `weight` [D].

    Args:
        hidden_size: D, channels.
        eps: > 0; it keeps a row of zeros finite.
        dropout_p: of the input, in training alone.
        device, dtype: of the weight.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, dropout_p: float = 0.0, device=None, dtype=None) -> None:
        super().__init__()
        self.eps = eps
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        """Weight 1."""
        nn.init.ones_(self.weight)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Tensor | tuple:
        """y, or (y, r) with `prenorm`; see `layer_norm_fn`."""
        return rms_norm_fn(
            x, self.weight, None, residual, eps=self.eps, prenorm=prenorm, residual_in_fp32=residual_in_fp32,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
        )  # fmt: skip
