"""A timm model by name, fitted to a data set and to a backend; and the lines that say what runs and why."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
import torch.nn as nn
from torch.utils.flop_counter import FlopCounterMode

from .. import backends
from ..data import Preparation
from .refusals import one_of


@dataclass(frozen=True)
class Model:
    """The values of the model group.

    Attributes:
        name: name of a timm model, ours included.
        pretrained: load the weights that timm knows for it.
        kwargs: further arguments of timm.create_model.
    """

    name: str
    pretrained: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        architecture, _, tag = self.name.partition(".")
        one_of("model.name", architecture, timm.list_models())
        if tag:
            one_of("model.name", self.name, timm.list_pretrained())

    def build(self, num_classes: int, prepare: Preparation, backend: str) -> nn.Module:
        """The model, with random weights unless `pretrained`, computing by a backend.

        Raises:
            TypeError, ValueError: an entry of `kwargs` is not known or does not fit.
            ValueError: a backend is named for a model that has none of our operators.
        """
        kwargs = dict(self.kwargs)
        cfg = timm.models.get_pretrained_cfg(self.name)
        if cfg is not None and cfg.fixed_input_size:
            kwargs.setdefault("img_size", prepare.img_size)
        model = timm.create_model(
            self.name, pretrained=self.pretrained, num_classes=num_classes, in_chans=prepare.in_chans, **kwargs
        )
        use_backend(model, backend)
        return model


def use_backend(model: nn.Module, backend: str) -> None:
    """Switch a model to a backend; a model without our operators takes "auto" alone."""
    one_of("backend.name", backend, backends.known())
    switch: Callable[[str], None] | None = getattr(model, "set_backend", None)
    if switch is not None:
        switch(backend)
    elif backend != "auto":
        raise ValueError(
            f"backend.name: {type(model).__name__} has no operator of vmamba_npu for {backend!r} to compute"
        )


def explain_backend(model: nn.Module, backend: str, device: torch.device) -> str:
    """Which backend serves each operator for tensors of a device, and why not the others."""
    if not hasattr(model, "set_backend"):
        return "none (the model has no operator of vmamba_npu)"
    probe = torch.empty(1, device=device)
    chosen: dict[str, list[str]] = {}
    reasons: dict[str, list[str]] = {}
    for op in backends.operators():
        try:
            chosen.setdefault(backends.choose(op, backend, probe), []).append(op)
        except (backends.BackendUnavailable, ValueError) as error:
            reasons.setdefault(str(error), []).append(op)
            continue
        for name, why in backends.explain(op, probe).items():
            if why is not None:
                reasons.setdefault(f"{name}: {why}", []).append(op)
    serves = "; ".join(f"{name} ({', '.join(ops)})" for name, ops in chosen.items())
    why = "chosen by the device" if backend == "auto" else "asked for"
    return f"{serves}, {why}" + "".join(f"; not {reason}" for reason in reasons)


def parameters(model: nn.Module) -> int:
    """Number of the model's parameters."""
    return sum(p.numel() for p in model.parameters())


@torch.no_grad()
def macs(model: nn.Module, prepare: Preparation, device: torch.device) -> int:
    """Multiply-accumulates of one image in matrix products and convolutions; scans of our operators are not counted."""
    was_training = model.training
    x = torch.zeros(1, prepare.in_chans, *prepare.img_size, device=device)
    with FlopCounterMode(display=False) as counter:
        model.eval()(x)
    model.train(was_training)
    return counter.get_total_flops() // 2
