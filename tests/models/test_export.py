"""torch.export and torch.compile take the models whole: no graph break, and the results of eager PyTorch."""

import timm
import torch
from torch import nn

import vmamba_npu  # noqa: F401  (makes timm know the models)

SMALL = dict(num_classes=7, dims=(16, 32), depths=(1, 1), ngroups=(1, 2), chunk_sizes=(8, 8))


def small(**kwargs) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("test_vmamba2_npu", **SMALL, **kwargs)


def test_export_with_dynamic_batch_and_size():
    """The operator stays one node, so the program may run on any backend; batch, height and width are free."""
    model = small().eval()
    dims = {axis: torch.export.Dim.DYNAMIC for axis in (0, 2, 3)}
    program = torch.export.export(model, (torch.randn(2, 3, 32, 40),), dynamic_shapes=(dims,))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("vmamba_npu.ssd_fwd.default") == 2
    for shape in ((2, 3, 32, 40), (5, 3, 33, 64), (3, 3, 70, 21)):
        x = torch.randn(shape)
        torch.testing.assert_close(program.module()(x), model(x))


def test_compile_makes_one_graph_forward_and_backward():
    model, x = small(drop_path_rate=0.1), torch.randn(2, 3, 32, 40)
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        graphs.append(graph)
        return graph

    def gradients(run: nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(1)  # of drop path
        run(x).logsumexp(1).sum().backward()
        return [p.grad for p in model.parameters()]

    want = gradients(model)
    torch._dynamo.reset()
    torch.testing.assert_close(gradients(torch.compile(model, fullgraph=True, backend=count)), want)
    assert len(graphs) == 1
    torch._dynamo.reset()
    torch.testing.assert_close(gradients(torch.compile(model, fullgraph=True, backend="aot_eager")), want)


def test_a_compiled_model_follows_a_switch_of_its_backend():
    model, x, named = small(backend="torch").eval(), torch.randn(1, 3, 16, 16), []

    def look(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        named.append([node.args[-1] for node in graph.graph.nodes if "ssd_fwd" in str(node.target)])
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=look)
    with torch.no_grad():
        first = compiled(x)
        model.set_backend("reference")
        second = compiled(x)
    assert named == [["torch"] * 2, ["reference"] * 2]
    torch.testing.assert_close(first, second)
