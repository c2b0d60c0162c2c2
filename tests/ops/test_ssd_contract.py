"""ssd as an operator: opcheck, compile, script, trace and export; what it refuses, and in which words."""

import re

import pytest
import torch
from torch import Tensor, nn

from vmamba_npu.backends import BackendUnavailable, Implementation, operators, register, registry
from vmamba_npu.ops import ssd
from vmamba_npu.testing import serving
from vmamba_npu.testing.ssd import definition, draw, leaves

BACKENDS = serving("ssd", torch.float64)
FULL = {"batch": 2, "H": 4, "G": 2, "D": "channel", "z": True, "dt_bias": True, "states": True, "softplus": True}
ORDER = ("x dt A B C chunk_size D z dt_bias initial_states seq_idx cu_seqlens dt_softplus").split()


def operator_arguments(call, backend, chunk_size=64):
    low, high = call["dt_limit"]
    return (*((call | {"chunk_size": chunk_size}).get(name) for name in ORDER), low, high, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [
        {"L": 5},
        {"L": 0, "states": True},
        {"L": 7, **FULL},
        {"L": 67, "packed": "seq_idx", **FULL},
        {"L": 7, "packed": "cu_seqlens", **FULL},
        {"L": 5, "dtype": torch.bfloat16, **FULL},
    ],
    ids=["plain", "empty", "full", "seq_idx", "cu_seqlens", "bfloat16"],
)
def test_opcheck(backend, options):
    call = draw(**options)
    torch.library.opcheck(torch.ops.vmamba_npu.ssd_fwd.default, operator_arguments(call, backend))
    y, final = (t.detach() for t in ssd(**call, backend=backend))
    plain = {k: v.detach() if isinstance(v, Tensor) else v for k, v in call.items()}
    backward = (torch.ones_like(y), torch.ones_like(final), *operator_arguments(plain, backend))
    torch.library.opcheck(torch.ops.vmamba_npu.ssd_bwd.default, backward, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("packed", [None, "seq_idx", "cu_seqlens"])
def test_compiled_equals_eager(backend, packed):
    call = draw(L=7, packed=packed, **FULL)

    def loss(**call):
        y, final = ssd(**call, backend=backend)
        return (y * y).sum() + final.sin().sum()

    inputs = list(leaves(call).values())
    torch.compiler.reset()
    got, want = torch.compile(loss, fullgraph=True, backend="aot_eager")(**call), loss(**call)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs))


class Scan(nn.Module):
    """The smallest layer around ssd."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.linspace(-1, 1, 2, dtype=torch.float64))
        self.D = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
        y, _ = ssd(x, dt, -self.A_log.exp(), B, C, 16, D=self.D, dt_softplus=True, dt_limit=(0.0, 2.0), backend="torch")
        return y + x


def scan_and_inputs(L=7, batch=2):
    call = draw(batch=batch, L=L)
    return Scan(), tuple(call[name].detach() for name in ("x", "dt", "B", "C"))


def wanted(module, x, dt, B, C):
    return definition(x, dt, -module.A_log.exp(), B, C, module.D, dt_softplus=True, dt_limit=(0.0, 2.0))[0] + x


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("how", ["script", "fx", "export"])
def test_module_is_scripted_traced_and_exported(how, tmp_path):
    module, inputs = scan_and_inputs()
    if how == "script":
        torch.jit.script(module).save(tmp_path / "scan.pt")
        made = torch.jit.load(tmp_path / "scan.pt")
    elif how == "fx":
        made = torch.fx.symbolic_trace(module)
    else:
        made = torch.export.export(module, inputs).module()
    torch.testing.assert_close(made(*inputs), wanted(module, *inputs))
    if how != "export":
        _, longer = scan_and_inputs(L=70, batch=1)
        torch.testing.assert_close(made(*longer), wanted(module, *longer))
    parameters = list(made.parameters())
    got = torch.autograd.grad(made(*inputs).sum(), parameters)
    names = [name for name, _ in made.named_parameters()]
    want = torch.autograd.grad(wanted(module, *inputs).sum(), [module.get_parameter(name) for name in names])
    torch.testing.assert_close(got, want)


def test_export_with_dynamic_batch_and_length():
    module, inputs = scan_and_inputs()
    free = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("tokens", min=1)}
    made = torch.export.export(module, inputs, dynamic_shapes=(free,) * 4).module()
    for L, batch in ((5, 3), (130, 2)):
        _, other = scan_and_inputs(L, batch)
        torch.testing.assert_close(made(*other), wanted(module, *other))


def valid():
    return draw(L=6, **FULL)


def with_shape(name, *shape):
    return lambda call: {name: torch.zeros(shape, dtype=torch.float64)}


def on_meta(name):
    return lambda call: {name: call[name].detach().to("meta")}


def in_dtype(name, dtype):
    return lambda call: {name: call[name].detach().to(dtype)}


def one_row(call):
    """The same call with a batch of one, as cu_seqlens wants it."""
    rows = ("x", "dt", "B", "C", "z")
    return {name: call[name][:1] for name in rows} | {"initial_states": None}


def borders(*values, dtype=torch.int32):
    return lambda call: one_row(call) | {"cu_seqlens": torch.tensor(values, dtype=dtype)}


def no_batch(call):
    return {name: call[name][:0] for name in ("x", "dt", "B", "C", "z", "initial_states")}


INDICES = torch.zeros(2, 6, dtype=torch.int32)
# argument named by the message, the change to a valid call, error, what else the message says
BAD = [
    ("x", with_shape("x", 2, 6, 12), ValueError, "(2, 6, 12)"),
    ("dt", with_shape("dt", 2, 6, 3), ValueError, "(2, 6, 3)"),
    ("dt", with_shape("dt", 2, 5, 4), ValueError, "(2, 6, 4)"),
    ("dt", with_shape("dt", 2, 6, 4, 1), ValueError, "(2, 6, 4, 1)"),
    ("A", with_shape("A", 3), ValueError, "(3,)"),
    ("A", with_shape("A", 4, 4), ValueError, "(4,)"),
    ("B", with_shape("B", 2, 6, 2), ValueError, "(2, 6, 2)"),
    ("B", with_shape("B", 2, 6, 3, 4), ValueError, "3"),
    ("B", with_shape("B", 2, 5, 2, 4), ValueError, "(2, 5, 2, 4)"),
    ("C", with_shape("C", 2, 6, 2, 5), ValueError, "(2, 6, 2, 5)"),
    ("C", with_shape("C", 2, 6, 1, 4), ValueError, "(2, 6, 2, 4)"),
    ("D", with_shape("D", 3), ValueError, "(4, 3)"),
    ("D", with_shape("D", 4, 1), ValueError, "(4, 1)"),
    ("z", with_shape("z", 2, 6, 4, 1), ValueError, "(2, 6, 4, 3)"),
    ("dt_bias", with_shape("dt_bias", 4, 3), ValueError, "(4, 3)"),
    ("initial_states", with_shape("initial_states", 1, 4, 3, 4), ValueError, "(2, 4, 3, 4)"),
    ("initial_states", with_shape("initial_states", 2, 4, 4, 3), ValueError, "(2, 4, 4, 3)"),
    ("seq_idx", lambda call: {"seq_idx": INDICES[:, :5]}, ValueError, "(2, 5)"),
    ("seq_idx", lambda call: {"seq_idx": INDICES[:1]}, ValueError, "(1, 6)"),
    *(
        (name, on_meta(name), ValueError, "meta")
        for name in ("dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
    ),
    ("seq_idx", lambda call: {"seq_idx": INDICES.to("meta")}, ValueError, "meta"),
    *((name, in_dtype(name, torch.int64), TypeError, "int64") for name in leaves(draw(**FULL))),
    ("B", in_dtype("B", torch.float32), TypeError, "float32"),
    ("C", in_dtype("C", torch.float32), TypeError, "float32"),
    ("z", in_dtype("z", torch.float32), TypeError, "float32"),
    ("seq_idx", lambda call: {"seq_idx": INDICES.double()}, TypeError, "float64"),
    ("seq_idx", lambda call: {"seq_idx": INDICES.bool()}, TypeError, "bool"),
    ("cu_seqlens", borders(0, 6, dtype=torch.float32), TypeError, "float32"),
    ("batch", no_batch, ValueError, "0"),
    ("P", lambda call: {name: call[name][..., :0] for name in ("x", "z")}, ValueError, "0"),
    ("N", lambda call: {name: call[name][..., :0] for name in ("B", "C", "initial_states")}, ValueError, "0"),
    ("G", lambda call: {name: call[name][:, :, :0] for name in ("B", "C")}, ValueError, "0"),
    ("H", lambda call: {name: call[name][:, :, :0] for name in ("x", "dt", "z")}, ValueError, "0"),
    ("chunk_size", lambda call: {"chunk_size": 0}, ValueError, "0"),
    ("chunk_size", lambda call: {"chunk_size": -64}, ValueError, "-64"),
    ("dt_limit", lambda call: {"dt_limit": (1.0, 0.5)}, ValueError, "(1.0, 0.5)"),
    ("dt_limit", lambda call: {"dt_limit": (float("nan"), 0.5)}, ValueError, "nan"),
    ("cu_seqlens", lambda call: {"cu_seqlens": torch.tensor([0, 6]), "initial_states": None}, ValueError, "B = 2"),
    ("seq_idx", lambda call: borders(0, 6)(call) | {"seq_idx": INDICES[:1]}, ValueError, "cu_seqlens"),
    ("cu_seqlens", borders(1, 6), ValueError, "[1, 6]"),
    ("cu_seqlens", borders(0, 5), ValueError, "L = 6"),
    ("cu_seqlens", borders(0, 7), ValueError, "[0, 7]"),
    ("cu_seqlens", borders(0, 4, 3, 6), ValueError, "[0, 4, 3, 6]"),
    ("cu_seqlens", borders(0, -1, 6), ValueError, "[0, -1, 6]"),
    ("cu_seqlens", borders(0), ValueError, "0"),
    ("cu_seqlens", borders([0, 6]), ValueError, "(1, 2)"),
    ("cu_seqlens", lambda call: one_row(call) | {"cu_seqlens": torch.tensor([0, 6]).to("meta")}, ValueError, "meta"),
    (
        "initial_states",
        lambda call: borders(0, 3, 6)(call) | {"initial_states": call["initial_states"][:1]},
        ValueError,
        "(2, 4, 3, 4)",
    ),
    ("backend", lambda call: {"backend": "cuda"}, ValueError, "'cuda'"),
    ("backend", lambda call: {"backend": "Torch"}, ValueError, "reference, torch"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("name", "change", "error", "says"), BAD, ids=[f"{i}-{row[0]}" for i, row in enumerate(BAD)])
def test_bad_input_is_named(backend, name, change, error, says):
    call = valid() | {"backend": backend}
    ssd(**call)  # without the change it is served
    with pytest.raises(error, match=f"^{name}: .*{re.escape(says)}"):
        ssd(**(call | change(call)))


def test_unknown_keyword_and_missing_argument_are_errors():
    with pytest.raises(TypeError, match="return_final_states"):
        ssd(**valid(), return_final_states=True)
    call = valid()
    del call["dt"]
    with pytest.raises(TypeError, match="dt"):
        ssd(**call)


@pytest.mark.parametrize("name", ["dt", "B"])
def test_bad_shape_is_named_while_compiling_too(name):
    call = valid()
    call[name] = call[name][:, :5]
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(ValueError, match=f"^{name}: "):
        ssd(**{k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in call.items()})


@pytest.fixture
def absent_backend(monkeypatch):
    """A backend of ssd that this machine does not have, until the test ends."""
    monkeypatch.setattr(registry, "_TABLE", operators())
    register(
        Implementation("ssd", "absent", "no.such.module", None, (torch.float64,), lambda: "its driver is not installed")
    )
    return "absent"


def test_named_backend_never_falls_back(absent_backend):
    with pytest.raises(
        BackendUnavailable, match=r"ssd: backend 'absent' .*its driver is not installed.*reference, torch"
    ):
        ssd(**valid(), backend=absent_backend)
    with pytest.raises(BackendUnavailable, match="float32"):
        ssd(**draw(dtype=torch.float32), backend=absent_backend)
