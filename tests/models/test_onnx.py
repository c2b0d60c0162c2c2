"""ONNX: the exported model in onnxruntime gives what the model gives, for any batch and any size of image."""

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from torch import Tensor

import vmamba_npu  # noqa: F401  (makes timm know the models)

SMALL = dict(num_classes=7, dims=(16, 32), depths=(1, 1), ngroups=(1, 2), chunk_sizes=(64, 64))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    torch.manual_seed(0)
    model = timm.create_model("test_vmamba2_npu", exportable=True, **SMALL).eval()
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    dim = torch.export.Dim
    sizes = {0: dim("batch", min=1, max=64), 2: dim("height", min=16, max=512), 3: dim("width", min=16, max=512)}
    torch.onnx.export(model, (torch.randn(2, 3, 48, 64),), str(path), dynamo=True, dynamic_shapes=(sizes,))
    return model, onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("shape", [(2, 3, 48, 64), (1, 3, 64, 64), (3, 3, 33, 97)], ids=str)
def test_onnxruntime_equals_eager(exported, shape):
    model, session = exported
    x = torch.randn(shape)
    (logits,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        wanted: Tensor = model(x)
    np.testing.assert_allclose(logits, wanted.numpy(), rtol=1e-4, atol=1e-4)


def test_an_exportable_model_equals_one_of_operators():
    """What is exported computes the same as the operators of the registry."""
    torch.manual_seed(0)
    plain = timm.create_model("test_vmamba2_npu", exportable=True, **SMALL).eval()
    model = timm.create_model("test_vmamba2_npu", **SMALL).eval()
    model.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 40, 56)
    with torch.no_grad():
        torch.testing.assert_close(plain(x), model(x), rtol=1e-4, atol=1e-5)
