"""Operators: public functions of tensors; importing this module registers them."""

from ..backends.registry import known as known_backends
from .causal_conv1d import causal_conv1d, causal_conv1d_update, causal_conv1d_varlen_states
from .gated_rms_norm import gated_rms_norm
from .selective_state_update import selective_state_update
from .ssd import ssd

__all__ = [
    "causal_conv1d",
    "causal_conv1d_update",
    "causal_conv1d_varlen_states",
    "gated_rms_norm",
    "known_backends",
    "selective_state_update",
    "ssd",
]
