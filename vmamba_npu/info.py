"""`python -m vmamba_npu.info`: which backend runs which operator on this machine, and why the others do not."""

import argparse
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import timm
import torch
import torch.nn as nn

from . import __version__
from .backends import choose, explain, operators, probes
from .backends.tensors import FLOATS

PACKAGES = ("torch", "torchvision", "timm", "torch_npu", "triton", "triton-ascend", "mamba_ssm", "causal_conv1d")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what `arguments` (by default those of the command line) ask for."""
    parser = argparse.ArgumentParser(prog="python -m vmamba_npu.info", description=__doc__)
    parser.add_argument(
        "what", nargs="*", metavar="OPERATOR | model=NAME",
        help=f"operators to show ({', '.join(operators())}; all by default), or model=NAME: a table of the stages of a "
        f"model ({', '.join(timm.list_models('*vmamba*'))})",
    )  # fmt: skip
    parser.add_argument(
        "--img-size", type=int, metavar="PIXELS", help="for model=: side of the image (the model's own)"
    )
    options = parser.parse_args(arguments)
    if options.img_size is not None and options.img_size < 1:
        parser.error(f"--img-size: expected at least 1, got {options.img_size}")
    known = {name.removesuffix("_npu"): name for name in timm.list_models("*vmamba*")}
    models: list[str] = []
    wanted: list[str] = []
    for word in options.what:
        name = word.removeprefix("model=")
        if name == word and word not in operators():
            parser.error(f"{word!r} is not an operator; there are {', '.join(operators())}")
        if name != word and name.removesuffix("_npu") not in known:
            parser.error(f"{name!r} is not a model; there are {', '.join(known.values())}")
        (wanted if name == word else models).append(name)
    if wanted or not models:
        print(*_versions(), "", *_devices(), "", *_backends(wanted or list(operators())), sep="\n")
    for name in models:
        print(*_stages(known[name.removesuffix("_npu")], options.img_size), sep="\n")


def _versions() -> Iterator[str]:
    yield f"vmamba_npu {__version__}, Python {platform.python_version()}, {platform.platform()}"
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            pass
    yield ", ".join(found)


def available_devices() -> dict[str, str | None]:
    """Device type to None if tensors can live there on this machine, else the reason that they cannot."""
    no_cuda = "this PyTorch is built without CUDA" if torch.version.cuda is None else "no NVIDIA GPU or driver is found"
    return {"cpu": None, "cuda": None if torch.cuda.is_available() else no_cuda, "npu": probes.torch_npu()}


def _devices() -> Iterator[str]:
    for kind, reason in available_devices().items():
        if reason is not None:
            yield f"{kind:5} no: {reason}"
        elif kind == "cpu":
            yield f"{kind:5} {_cpu_name()}, {torch.get_num_threads()} threads"
        else:
            device = torch.get_device_module(kind)
            names = [device.get_device_name(i) for i in range(device.device_count())]
            yield f"{kind:5} {', '.join(names)}"


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _backends(ops: Sequence[str]) -> Iterator[str]:
    """One row for each device, operator and backend: the dtypes it serves or the reason that it serves none."""
    rows = []
    for device in (kind for kind, reason in available_devices().items() if reason is None):
        for op in ops:
            probe = {dtype: torch.empty(1, dtype=dtype, device=device) for dtype in FLOATS}
            answers = {dtype: explain(op, x) for dtype, x in probe.items()}
            picks = {dtype: choose(op, "auto", x) for dtype, x in probe.items()}
            for backend, impl in operators()[op].items():
                why = {dtype: answers[dtype][backend] for dtype in impl.dtypes if dtype in answers}
                auto = [dtype for dtype, pick in picks.items() if pick == backend]
                rows.append((device, op, backend, _names(auto, "-"), _verdict(why)))
    header = ("device", "operator", "backend", "auto picks it for", "serves")
    yield from _table([header, *rows])
    yield ""
    yield "serves: for tensors of that device, by dtype; a single call may still break a limit, which its error names."


def _verdict(why: dict[torch.dtype, str | None]) -> str:
    """From the answers for the dtypes that an implementation knows."""
    served = [dtype for dtype, reason in why.items() if reason is None]
    return _names(served) if served else f"no: {next(iter(why.values()))}"


def _names(dtypes: Sequence[torch.dtype], none: str = "") -> str:
    if len(dtypes) == len(FLOATS):
        return "every float dtype"
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes) or none


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _stages(name: str, img_size: int | None) -> Iterator[str]:
    """Stages of a model: their maps, parameters and the sizes of the one SSD call of each block."""
    model: Any = timm.create_model(name, device="meta").eval()
    channels, *size = model.pretrained_cfg["input_size"]
    height, width = size if img_size is None else (img_size, img_size)
    rows = [("stage", "map [H, W, C]", "blocks", "parameters", "SSD call [L, H, P, N], G, chunk")]
    x = torch.empty(1, channels, height, width, device="meta")
    rows.append(("patch_embed", "", "", f"{_parameters(model.patch_embed):,}", ""))
    for i, stage in enumerate(model.stages):
        x = stage(model.patch_embed(x) if i == 0 else x)
        rows.append((
            f"stages.{i}", str(list(x.shape[1:])), str(len(stage.blocks)), f"{_parameters(stage):,}",
            _ssd_sizes(stage.blocks[0].mixer, x.shape[1] * x.shape[2]),
        ))  # fmt: skip
    rows.append(("norm, head", "", "", f"{_parameters(model.norm) + _parameters(model.head):,}", ""))
    yield f"{name} at {height} x {width}: {_parameters(model):,} parameters"
    yield from _table(rows)


def _ssd_sizes(mixer: Any, tokens: int) -> str:
    heads, groups = mixer.directions * mixer.nheads, mixer.directions * mixer.ngroups
    return f"{[tokens, heads, mixer.headdim, mixer.d_bc // mixer.ngroups]}, {groups}, {mixer.chunk_size}"


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


if __name__ == "__main__":
    main()
