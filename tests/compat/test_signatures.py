"""Signatures: names, order and defaults of mamba_ssm 2.3.2 and causal_conv1d 1.6.1, written out here."""

import importlib
import inspect
from math import inf

import pytest

from vmamba_npu.compat.names import OBJECTS

SSD = "mamba_ssm.ops.triton.ssd_combined."
GATED = "mamba_ssm.ops.triton.layernorm_gated."
NORM = "mamba_ssm.ops.triton.layer_norm."
UPDATE = "mamba_ssm.ops.triton.selective_state_update."
CONV = "causal_conv1d.causal_conv1d_interface."
VARLEN = "causal_conv1d.causal_conv1d_varlen."

STATE = "state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None"
MODULE = "hidden_size, eps=1e-5, group_size=None, norm_before_gate=True, device=None, dtype=None"
RESIDUAL = "x, weight, bias, residual=None, x1=None, weight1=None, bias1=None, eps=1e-6, dropout_p=0.0, rowscale=None, "
REF = RESIDUAL + "prenorm=False, dropout_mask=None, dropout_mask1=None, upcast=False"
PLAIN = "x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, dt_softplus=False"

SIGNATURES = {
    SSD + "mamba_chunk_scan_combined": "x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, "
    "initial_states=None, seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, inf), "
    "return_final_states=False, return_varlen_states=False, state_dtype=None",
    SSD + "mamba_chunk_scan": PLAIN,
    SSD + "ssd_chunk_scan_combined_ref": PLAIN,
    SSD + "mamba_split_conv1d_scan_combined": "zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, "
    "initial_states=None, seq_idx=None, dt_limit=(0.0, inf), return_final_states=False, activation='silu', "
    "rmsnorm_weight=None, rmsnorm_eps=1e-6, outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, "
    "norm_before_gate=True, state_dtype=None",
    SSD + "mamba_split_conv1d_scan_ref": "zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, "
    "dt_limit=(0.0, inf), activation='silu', rmsnorm_weight=None, rmsnorm_eps=1e-6, outproj_weight=None, "
    "outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True",
    SSD + "mamba_conv1d_scan_ref": "xBC, conv1d_weight, conv1d_bias, dt, A, chunk_size, D=None, z=None, dt_bias=None, "
    "dt_softplus=False, dt_limit=(0.0, inf), activation='silu', headdim=None, ngroups=1",
    "mamba_ssm.modules.ssd_minimal.ssd_minimal_discrete": "X, A, B, C, block_len, initial_states=None",
    "mamba_ssm.modules.ssd_minimal.segsum": "x",
    UPDATE + "selective_state_update": STATE,
    UPDATE + "selective_state_update_ref": STATE,
    GATED + "RMSNorm": MODULE,
    GATED + "LayerNorm": MODULE,
    GATED + "rmsnorm_fn": "x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True",
    GATED + "layernorm_fn": "x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True, "
    "is_rms_norm=False",
    GATED + "rms_norm_ref": "x, weight, bias, z=None, eps=1e-6, group_size=None, norm_before_gate=True, upcast=True",
    NORM + "RMSNorm": "hidden_size, eps=1e-5, dropout_p=0.0, device=None, dtype=None",
    NORM + "layer_norm_fn": RESIDUAL + "prenorm=False, residual_in_fp32=False, is_rms_norm=False, "
    "return_dropout_mask=False",
    NORM + "rms_norm_fn": RESIDUAL + "prenorm=False, residual_in_fp32=False, return_dropout_mask=False",
    NORM + "layer_norm_linear_fn": "x, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, eps=1e-6, "
    "prenorm=False, residual_in_fp32=False, is_rms_norm=False",
    NORM + "layer_norm_ref": REF,
    NORM + "rms_norm_ref": REF,
    CONV + "causal_conv1d_fn": "x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, "
    "final_states_out=None, activation=None",
    CONV + "causal_conv1d_ref": "x, weight, bias=None, initial_states=None, return_final_states=False, "
    "final_states_out=None, activation=None",
    CONV + "causal_conv1d_update": "x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, "
    "conv_state_indices=None",
    CONV + "causal_conv1d_update_ref": "x, conv_state, weight, bias=None, activation=None, cache_seqlens=None",
    VARLEN + "causal_conv1d_varlen_states": "x, cu_seqlens, state_len",
    VARLEN + "causal_conv1d_varlen_states_ref": "x, cu_seqlens, state_len",
    "mamba_ssm.utils.generation.InferenceParams": "max_seqlen, max_batch_size, seqlen_offset=0, batch_size_offset=0, "
    "key_value_memory_dict=None, lengths_per_sample=None",
    "mamba_ssm.modules.mamba2.Mamba2": "d_model, d_state=128, d_conv=4, conv_init=None, expand=2, headdim=64, "
    "d_ssm=None, ngroups=1, A_init_range=(1, 16), D_has_hdim=False, rmsnorm=True, norm_before_gate=False, "
    "dt_min=0.001, dt_max=0.1, dt_init_floor=1e-4, dt_limit=(0.0, inf), bias=False, conv_bias=True, chunk_size=256, "
    "use_mem_eff_path=True, layer_idx=None, process_group=None, sequence_parallel=True, device=None, dtype=None",
    "mamba_ssm.modules.mamba2_simple.Mamba2Simple": "d_model, d_state=64, d_conv=4, conv_init=None, expand=2, "
    "headdim=128, ngroups=1, A_init_range=(1, 16), dt_min=0.001, dt_max=0.1, dt_init_floor=1e-4, dt_limit=(0.0, inf), "
    "learnable_init_states=False, activation='swish', bias=False, conv_bias=True, chunk_size=256, "
    "use_mem_eff_path=True, layer_idx=None, device=None, dtype=None",
}
OURS = {"backend"}  # documented additions at the end of the classes and of one function
FACTORY = {"key_value_memory_dict"}  # a new dict for each object: no default value to compare
KEYWORD_ONLY = {NORM + n for n in ("layer_norm_fn", "rms_norm_fn", "layer_norm_linear_fn")}


def resolved(dotted: str):
    module, name = OBJECTS[dotted]
    return getattr(importlib.import_module(module), name)


def arguments(parameters, skipped=()) -> list[tuple]:
    return [(p.name, p.name in FACTORY or p.default) for p in parameters if p.name not in skipped]


@pytest.mark.parametrize("dotted", SIGNATURES, ids=lambda name: name.rpartition(".")[2])
def test_signature(dotted):
    scope: dict = {}
    exec(f"def wanted({SIGNATURES[dotted]}): pass", {"inf": inf}, scope)
    got = list(inspect.signature(resolved(dotted)).parameters.values())
    want = list(inspect.signature(scope["wanted"]).parameters.values())
    assert arguments(got, OURS) == arguments(want)
    added = [p.name for p in got if p.name in OURS]
    assert not added or [p.name for p in got][-1:] == added, "additions come last"
    for p in got:  # unknown keywords are errors, and positions are those of the original
        named = dotted in KEYWORD_ONLY and [q.name for q in got].index(p.name) > [q.name for q in got].index("residual")
        assert p.kind is (p.KEYWORD_ONLY if named else p.POSITIONAL_OR_KEYWORD), p


def test_every_object_of_the_table_has_its_signature_above():
    listed = {resolved(dotted) for dotted in SIGNATURES}
    assert {resolved(dotted) for dotted in OBJECTS} == listed


@pytest.mark.parametrize("dotted", sorted(KEYWORD_ONLY))
def test_arguments_whose_order_changed_are_taken_by_keyword_alone(dotted):
    with pytest.raises(TypeError, match="positional"):
        resolved(dotted)(None, None, None, None, None, None, None, None)
