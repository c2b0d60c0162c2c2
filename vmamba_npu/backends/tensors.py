"""Dtype and copy helpers that the implementations share."""

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Dtype of states, decays and sums: float64 for float64, float32 for anything narrower."""
    return torch.promote_types(dtype, torch.float32)


def own(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of this dtype that shares no storage with `t`: what a torch.library operator must return."""
    return t.to(dtype=dtype, copy=True, memory_format=torch.contiguous_format)


def put_rows(target: Tensor, rows: Tensor, values: Tensor) -> None:
    """target[rows[i]] = values[i] where rows[i] >= 0; the other rows of values go nowhere.

    Sizes do not depend on values, so no device is waited for: an unused row repeats the write of a used one, and if
    there is none, row 0 is written back as it is.
    """
    used = rows >= 0
    source = torch.where(used, torch.arange(rows.shape[0], device=rows.device), used.int().argmax())
    values = torch.where(used.any(), values[source], target[:1])
    target.index_copy_(0, rows[source].clamp_min(0).long(), values.to(target.dtype))
