"""Helpers for tensors that the implementations share."""

import pytest
import torch

from vmamba_npu.backends.tensors import at_least_float32, own, put_rows


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [[2, 0], [-1, 3], [3, -1], [-1, -1], [-7, 1, -1, 0, -1], [0]])
@pytest.mark.parametrize("transposed", [False, True])
def test_put_rows_writes_the_used_rows_and_nothing_else(rows, dtype, transposed):
    target = torch.arange(12.0).view(3, 4).mT.clone() if transposed else torch.arange(12.0).view(4, 3)
    want = target.clone()
    values = torch.full((len(rows), 3), float("nan"), dtype=torch.float64)
    for i, row in enumerate(rows):
        if row >= 0:
            values[i] = want[row] = 100.0 + i
    put_rows(target, torch.tensor(rows, dtype=dtype), values)
    torch.testing.assert_close(target, want, rtol=0, atol=0)


def test_own_shares_nothing():
    t = torch.ones(2, 3).mT
    copy = own(t, torch.float32)
    copy.add_(1)
    assert copy.is_contiguous() and t.max() == 1


def test_at_least_float32():
    assert [at_least_float32(t) for t in (torch.bfloat16, torch.float16, torch.float32)] == [torch.float32] * 3
    assert at_least_float32(torch.float64) == torch.float64
