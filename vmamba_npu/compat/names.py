"""The table of names: which object of this package answers to which dotted name, and what is not covered."""

VERSIONS = {"mamba_ssm": "2.3.2", "causal_conv1d": "1.6.1"}  # the interfaces followed

_HERE = "vmamba_npu.compat"
_LAYER_NORM = (
    f"{_HERE}.layer_norm",
    "RMSNorm layer_norm_fn rms_norm_fn layer_norm_linear_fn layer_norm_ref rms_norm_ref",
)

# module -> (where its objects are, their names)
_COVERED = {
    "mamba_ssm": ("vmamba_npu.layers", "Mamba2"),
    "mamba_ssm.modules.mamba2": ("vmamba_npu.layers", "Mamba2"),
    "mamba_ssm.modules.mamba2_simple": ("vmamba_npu.layers", "Mamba2Simple"),
    "mamba_ssm.modules.ssd_minimal": (f"{_HERE}.ssd_minimal", "segsum ssd_minimal_discrete"),
    "mamba_ssm.ops.triton.ssd_combined": (
        f"{_HERE}.ssd_combined",
        "mamba_chunk_scan mamba_chunk_scan_combined mamba_conv1d_scan_ref mamba_split_conv1d_scan_combined "
        "mamba_split_conv1d_scan_ref ssd_chunk_scan_combined_ref",
    ),
    "mamba_ssm.ops.triton.selective_state_update": (
        f"{_HERE}.selective_state_update",
        "selective_state_update selective_state_update_ref",
    ),
    "mamba_ssm.ops.triton.layernorm_gated": (
        f"{_HERE}.layernorm_gated",
        "LayerNorm RMSNorm layernorm_fn rms_norm_ref rmsnorm_fn",
    ),
    "mamba_ssm.ops.triton.layer_norm": _LAYER_NORM,
    "mamba_ssm.ops.triton.layernorm": _LAYER_NORM,  # its name in versions 1.x
    "mamba_ssm.utils.generation": (f"{_HERE}.inference", "InferenceParams"),
    "causal_conv1d": (f"{_HERE}.causal_conv1d", "causal_conv1d_fn causal_conv1d_update"),
    "causal_conv1d.causal_conv1d_interface": (
        f"{_HERE}.causal_conv1d",
        "causal_conv1d_fn causal_conv1d_ref causal_conv1d_update causal_conv1d_update_ref",
    ),
    "causal_conv1d.causal_conv1d_varlen": (
        f"{_HERE}.causal_conv1d",
        "causal_conv1d_varlen_states causal_conv1d_varlen_states_ref",
    ),
}

OBJECTS = {f"{module}.{name}": (target, name) for module, (target, names) in _COVERED.items() for name in names.split()}

# every module that exists, packages among them: all prefixes
MODULES = sorted({".".join(m.split(".")[: n + 1]) for m in _COVERED for n in range(m.count(".") + 1)})

_ELSEWHERE = "run this code where mamba_ssm itself is installed"
_MAMBA1 = ("Mamba-1", f"use Mamba2, or {_ELSEWHERE}")
_MAMBA3 = ("Mamba-3", f"use Mamba2, or {_ELSEWHERE}")
_MODELS = ("language models", f"build the model of Mamba2 layers, or {_ELSEWHERE}")
_GENERATION = ("generation", "call the layers with InferenceParams token by token")
_STAGES = ("single stages of the scan", "use mamba_chunk_scan_combined, which computes them all")
_KERNELS = ("CUDA and Triton internals", "use the public function that calls it")
_PARALLEL = ("tensor parallelism", "use data parallelism (DDP, FSDP2)")
_SETTINGS = ("determinism switches", "use torch.use_deterministic_algorithms")

# dotted name -> (area, what to do); it stands for all below it
NOT_COVERED = {
    "mamba_ssm.Mamba": _MAMBA1,
    "mamba_ssm.selective_scan_fn": _MAMBA1,
    "mamba_ssm.mamba_inner_fn": _MAMBA1,
    "mamba_ssm.modules.mamba_simple": _MAMBA1,
    "mamba_ssm.ops.selective_scan_interface": _MAMBA1,
    "mamba_ssm.ops.triton.ssd_combined.ssd_selective_scan": _MAMBA1,
    "mamba_ssm.Mamba3": _MAMBA3,
    "mamba_ssm.modules.mamba3": _MAMBA3,
    "mamba_ssm.ops.triton.mamba3": _MAMBA3,
    "mamba_ssm.ops.triton.angle_cumsum": _MAMBA3,
    "mamba_ssm.ops.tilelang": _MAMBA3,
    "mamba_ssm.ops.cute": _MAMBA3,
    "mamba_ssm.MambaLMHeadModel": _MODELS,
    "mamba_ssm.models": _MODELS,
    "mamba_ssm.modules.block": _MODELS,
    "mamba_ssm.modules.mlp": _MODELS,
    "mamba_ssm.modules.mha": _MODELS,
    "mamba_ssm.utils.hf": _MODELS,
    "mamba_ssm.utils.generation": _GENERATION,
    "mamba_ssm.utils.determinism": _SETTINGS,
    "mamba_ssm.utils.torch": _KERNELS,
    "mamba_ssm.distributed": _PARALLEL,
    "mamba_ssm.ops.triton.ssd_bmm": _STAGES,
    "mamba_ssm.ops.triton.ssd_chunk_scan": _STAGES,
    "mamba_ssm.ops.triton.ssd_chunk_state": _STAGES,
    "mamba_ssm.ops.triton.ssd_state_passing": _STAGES,
    "mamba_ssm.ops.triton.ssd_combined._mamba_chunk_scan_combined_fwd": _STAGES,
    "mamba_ssm.ops.triton.ssd_combined._mamba_chunk_scan_combined_bwd": _STAGES,
    "mamba_ssm.ops.triton.k_activations": _KERNELS,
    "mamba_ssm.ops.triton.softplus": _KERNELS,
    "mamba_ssm.ops.triton.layernorm_gated._layer_norm_fwd": _KERNELS,
    "mamba_ssm.ops.triton.layernorm_gated._layer_norm_bwd": _KERNELS,
    "causal_conv1d.cpp_functions": _KERNELS,
}


def refusal(dotted: str) -> str | None:
    """Why a name of mamba_ssm or causal_conv1d is not offered, and what to do; None if it is not known either."""
    known = dotted
    while known and known not in NOT_COVERED:
        known = known.rpartition(".")[0]
    if not known:
        return None
    area, remedy = NOT_COVERED[known]
    return f"{dotted} ({area}) is not in this version of vmamba_npu.compat: {remedy}"
