"""Names of mamba_ssm and causal_conv1d for the layers and operators of this package."""
