from .api import causal_conv1d, causal_conv1d_update, causal_conv1d_varlen_states

__all__ = ["causal_conv1d", "causal_conv1d_update", "causal_conv1d_varlen_states"]
