"""The torch backend of causal_conv1d in blocks: wherever they end, the values are those of one convolution."""

import pytest
import torch
import torch.nn.functional as F

from vmamba_npu.ops import causal_conv1d
from vmamba_npu.ops.causal_conv1d import torch as blocks
from vmamba_npu.testing import error_ratio


def inputs(B, channels, L, W, dtype, channels_last, seed=0):
    g = torch.Generator().manual_seed(seed)
    wide = torch.randn(B, L, channels + 3, generator=g, dtype=torch.float64).to(dtype)  # x is a part of a wider tensor
    x = wide[..., :channels].mT if channels_last else wide.mT.contiguous()[:, :channels]
    others = [
        torch.randn(*s, generator=g, dtype=torch.float64) for s in ((channels, W), (channels,), (B, channels, W - 1))
    ]
    return [t.to(dtype).requires_grad_() for t in (x.detach(), *others)]


def convolution(x, weight, bias, initial, seq_idx):
    """(out, final_states) with PyTorch's own convolution of each sequence."""
    W, L = weight.shape[1], x.shape[2]
    if seq_idx is None:
        X = torch.cat([initial, x], 2)
        return F.silu(F.conv1d(X, weight[:, None], bias, groups=x.shape[1])), X[:, :, L:]
    rows, states = [], []
    for row, index in zip(x, seq_idx, strict=True):
        parts = [
            F.pad(part, (W - 1, 0)) for part in row.split(index.unique_consecutive(return_counts=True)[1].tolist(), 1)
        ]
        rows.append(torch.cat([F.conv1d(part, weight[:, None], bias, groups=x.shape[1]) for part in parts], 1))
        states.append(parts[-1][:, -(W - 1) :])
    return F.silu(torch.stack(rows)), torch.stack(states)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("elements", [1, 12, 40, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_do_not_depend_on_blocks(monkeypatch, dtype, elements, packed, channels_last):
    """From one token a block (fewer than W - 1) to several rows a block."""
    monkeypatch.setitem(blocks.BLOCK_ELEMENTS, "cpu", elements)
    tensors = inputs(5, 4, 23, 4, dtype, channels_last)
    seq_idx = (torch.arange(23) >= torch.arange(2, 22, 4)[:, None]).int() if packed else None
    x, weight, bias, initial = tensors
    got = causal_conv1d(x, weight, bias, seq_idx, None if packed else initial, "silu", "torch")
    wide = [t.detach().double().requires_grad_() for t in tensors]
    want = convolution(*wide, seq_idx)
    d = [torch.randn(t.shape, generator=torch.Generator().manual_seed(1), dtype=t.dtype) for t in want]
    got_d = torch.autograd.grad(got, tensors[: 3 if packed else 4], [t.to(dtype) for t in d])
    want_d = torch.autograd.grad(want, wide[: 3 if packed else 4], d)
    limit = 1e-12 if dtype == torch.float64 else 2e-5
    for a, b in zip((*got, *got_d), (*want, *want_d), strict=True):
        assert error_ratio(a, b) <= limit


def test_blocks_of_the_size_in_use():
    """Rows longer than a block, so that the weight's gradient adds up over blocks and rows."""
    tensors = inputs(2, 256, 2500, 4, torch.float32, True)
    assert tensors[0][0].numel() > blocks.BLOCK_ELEMENTS["cpu"]
    got = causal_conv1d(*tensors[:3], None, tensors[3], "silu", "torch")
    wide = [t.detach().double().requires_grad_() for t in tensors]
    want = convolution(*wide, None)
    got_d = torch.autograd.grad(got[0].square().mean(), tensors)
    want_d = torch.autograd.grad(want[0].square().mean(), wide)
    for a, b in zip((*got, *got_d), (*want, *want_d), strict=True):
        assert error_ratio(a, b) <= 2e-5


def test_no_sequence_sees_another_one():
    """Not even a NaN of the other: what does not count is left out, not multiplied by 0."""
    x = torch.ones(1, 2, 6)
    x[0, :, :3] = float("nan")
    leaves = [x.requires_grad_(), torch.ones(2, 3, requires_grad=True)]
    out, final_states = causal_conv1d(*leaves, None, torch.tensor([[0, 0, 0, 1, 1, 1]]), None, None, "torch")
    torch.testing.assert_close(out[:, :, 3:].detach(), torch.tensor([1.0, 2, 3]).expand(1, 2, 3))
    torch.testing.assert_close(final_states.detach(), torch.ones(1, 2, 2))
    (dx,) = torch.autograd.grad(out[:, :, 3:].sum(), leaves[:1])
    torch.testing.assert_close(dx, torch.tensor([0.0, 0, 0, 3, 2, 1]).expand(1, 2, 6))
