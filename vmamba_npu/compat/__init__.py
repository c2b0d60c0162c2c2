"""Names of mamba_ssm and causal_conv1d for the layers and operators of this package: one call, `install()`."""

from .finder import install

__all__ = ["install"]
