"""The processes of a run and their device: one, or those that torchrun started."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from timm.utils.distributed import init_distributed_device_so
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from .refusals import one_of

DEVICES = ("auto", "cpu", "cuda", "npu")


def available(kind: str) -> bool:
    """True if this machine has a device of a kind that torch can use."""
    module = getattr(torch, kind, None)
    return kind == "cpu" or (module is not None and module.is_available())


def pick_device(name: str, argument: str = "trainer.device") -> str:
    """The device that a name means here: "auto" prefers an NPU, then a GPU.

    Raises:
        ValueError: the name is not known, or there is no such device.
    """
    kind = one_of(argument, name.partition(":")[0], DEVICES)
    if kind == "auto":
        return next((kind for kind in ("npu", "cuda") if available(kind)), "cpu")
    if not available(kind):
        here = ", ".join(kind for kind in DEVICES[1:] if available(kind))
        remedy = {"npu": "torch_npu, its driver and toolkit", "cuda": "a build of torch for CUDA, and a driver"}[kind]
        raise ValueError(f"{argument}: torch finds no {kind} device on this machine (needed: {remedy}); here: {here}")
    return name


@dataclass(frozen=True)
class Processes:
    """This process among those of the run."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def first(self) -> bool:
        """True in the one process that writes files and speaks."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all processes."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The value of every process, in every process."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Return once all processes have come here."""
        if self.world > 1:
            dist.barrier()


@contextmanager
def processes(device: str, argument: str = "trainer.device") -> Iterator[Processes]:
    """This process among those of the run, joined by hccl, nccl or gloo by the device, and parted at the end."""
    info = init_distributed_device_so(pick_device(device, argument))
    try:
        yield Processes(torch.device(info["device"]), info["global_rank"], info["world_size"])
    finally:
        if info["distributed"]:
            dist.destroy_process_group()


def distribute(model: nn.Module, strategy: str, precision: str, here: Processes) -> nn.Module:
    """The model as several processes train it; itself if there is one process."""
    if here.world == 1:
        return model
    if strategy == "fsdp":
        return shard(model, precision, here)
    # about strides of dimensions of size 1, as depthwise convolutions have them: no copy is made for those
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
    return DistributedDataParallel(model, device_ids=None if here.device.type == "cpu" else [here.device.index])


def shard(model: nn.Module, precision: str, here: Processes) -> nn.Module:
    """Shard the parameters over the processes: each module of a list called `blocks`, then the rest."""
    mesh = init_device_mesh(here.device.type, (here.world,))
    low = precision == "bf16"
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
    for name, module in list(model.named_modules()):
        head, _, last = name.rpartition(".")
        if last.isdigit() and head.rpartition(".")[2] == "blocks":
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # in place
    return model


def keep_gradients_local(model: nn.Module, last: bool) -> AbstractContextManager[None]:
    """Context of one accumulated part: gradients are averaged over the processes after the last part alone."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    return nullcontext()


def plain(model: nn.Module) -> nn.Module:
    """The model inside its wrapper."""
    return model.module if isinstance(model, DistributedDataParallel) else model
