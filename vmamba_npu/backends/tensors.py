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
