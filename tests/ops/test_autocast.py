"""Under autocast every operator computes what it computes without: its dtypes follow from its inputs alone."""

import pytest
import torch

from vmamba_npu.backends import operators
from vmamba_npu.ops import causal_conv1d, causal_conv1d_update, gated_rms_norm, selective_state_update, ssd
from vmamba_npu.testing import serving


def normal(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def run_ssd(backend):
    inputs = [normal(2, 9, 4, 3), normal(2, 9, 4), -normal(4).abs(), normal(2, 9, 2, 5), normal(2, 9, 2, 5)]
    inputs = [t.requires_grad_() for t in inputs]
    y, final_states = ssd(*inputs, z=inputs[0].flip(1), dt_softplus=True, backend=backend)
    return y, final_states, *torch.autograd.grad([y.square().sum() + final_states.sum()], inputs)


def run_causal_conv1d(backend):
    inputs = [t.requires_grad_() for t in (normal(2, 5, 9), normal(5, 4), normal(5))]
    out, final_states = causal_conv1d(*inputs, activation="silu", backend=backend)
    return out, final_states, *torch.autograd.grad(out.square().sum(), inputs)


def run_causal_conv1d_update(backend):
    state = normal(2, 5, 4)
    return causal_conv1d_update(normal(2, 5), state, normal(5, 4), normal(5), "silu", backend=backend), state


def run_gated_rms_norm(backend):
    inputs = [t.requires_grad_() for t in (normal(3, 8), normal(8), normal(8), normal(3, 8).flip(0))]
    y = gated_rms_norm(*inputs, group_size=4, backend=backend)
    return y, *torch.autograd.grad(y.square().sum(), inputs)


def run_selective_state_update(backend):
    state = normal(2, 4, 3, 5)
    token = (normal(2, 4, 3), normal(2, 4, 3), -normal(4, 3, 5).abs(), normal(2, 2, 5), normal(2, 2, 5))
    return selective_state_update(state, *token, dt_softplus=True, backend=backend), state


RUNS = {name.removeprefix("run_"): run for name, run in list(globals().items()) if name.startswith("run_")}


def test_every_operator_is_here():
    assert RUNS.keys() == operators().keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("op", "backend"), [(op, b) for op in RUNS for b in serving(op, torch.float32)])
def test_same_values_and_dtypes(op, backend, dtype):
    want = RUNS[op](backend)
    with torch.autocast("cpu", dtype):
        got = RUNS[op](backend)
    torch.testing.assert_close(got, want, rtol=0, atol=0)  # dtypes too
