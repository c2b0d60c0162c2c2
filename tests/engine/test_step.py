"""One update against the formula: parts, clipping, smoothing, averages, low precision, and what is not finite."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn as nn
from timm.utils import ModelEmaV3

from vmamba_npu.engine.options import Trainer
from vmamba_npu.engine.processes import Processes
from vmamba_npu.engine.step import NonFinite, Precision, Stepper

HERE = Processes(torch.device("cpu"))
PLAIN = Trainer(epochs=1, batch_size=8)


def batch(size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 1, 4, 4, generator=generator), torch.arange(size) % 3


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))


def stepper(trainer: Trainer = PLAIN, lr: float = 0.5, average: bool = False) -> Stepper:
    model = network()
    kept = ModelEmaV3(model, decay=0.9) if average else None
    return Stepper(model, torch.optim.SGD(model.parameters(), lr=lr), trainer, 3, HERE, kept)


def by_hand(smoothing: float = 0.0, clip: float | None = None, lr: float = 0.5) -> tuple[list, float, float, float]:
    """Weights after one step of plain gradient descent in float64; loss, norm of the gradient, right predictions."""
    model, (x, y) = network().double(), batch()
    logs = model(x.double()).log_softmax(-1)
    targets = torch.full((8, 3), smoothing / 3, dtype=torch.float64)
    targets[torch.arange(8), y] += 1 - smoothing
    loss = -(targets * logs).sum(-1).mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
    factor = 1.0 if clip is None else min(1.0, clip / norm)
    weights = [p - lr * factor * g for p, g in zip(model.parameters(), gradients, strict=True)]
    return weights, float(loss.detach()), norm, float((logs.argmax(-1) == y).sum())


@pytest.mark.parametrize("accumulate", [1, 2, 4])
@pytest.mark.parametrize(("smoothing", "clip"), [(0.0, None), (0.1, 0.05), (0.0, 100.0)])
def test_update_is_one_step_of_the_whole_batch(accumulate, smoothing, clip):
    made = stepper(replace(PLAIN, accumulate=accumulate, smoothing=smoothing, clip_grad=clip))
    parts = zip(*(tensor.chunk(accumulate) for tensor in batch()), strict=True)
    outcome = made.update(iter(list(parts)), 1, False)
    weights, loss, norm, correct = by_hand(smoothing, clip)
    assert outcome.loss == pytest.approx(loss, rel=1e-5) and outcome.grad_norm == pytest.approx(norm, rel=1e-5)
    assert (outcome.correct, outcome.images, outcome.stop) == (correct, 8, False)
    for got, want in zip(made.model.parameters(), weights, strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-5)


def test_average_follows_the_weights():
    made = stepper(average=True)
    before = [p.detach().clone() for p in made.model.parameters()]
    made.update(iter([batch()]), 2, False)
    after = by_hand()[0]
    for got, old, new in zip(made.average.module.parameters(), before, after, strict=True):
        torch.testing.assert_close(got.double(), 0.9 * old.double() + 0.1 * new, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_stays_near(precision):
    made = stepper(replace(PLAIN, precision=precision))
    outcome = made.update(iter([batch()]), 1, False)
    weights, loss, _, _ = by_hand()
    assert outcome.loss == pytest.approx(loss, rel=2e-2)
    for got, want in zip(made.model.parameters(), weights, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, atol=1e-2, rtol=2e-2)


def test_scaler_skips_an_update_that_overflows():
    made = stepper(replace(PLAIN, precision="fp16"))
    before = [p.detach().clone() for p in made.model.parameters()]
    scale = made.precision.scaler.get_scale()
    x, y = batch()
    with torch.no_grad():
        made.model[3].weight.mul_(0).add_(6e4 / 16 * torch.tensor([[1.0], [-1.0], [0.5]]))
    before = [p.detach().clone() for p in made.model.parameters()]
    outcome = made.update(iter([(x, y)]), 1, False)
    assert math.isfinite(outcome.loss) and not math.isfinite(outcome.grad_norm)
    assert made.precision.scaler.get_scale() == scale / 2
    assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("where", "message"),
    [("loss", r"the loss is (nan|inf)"), ("gradient", "the loss is finite, the norm of the gradient")],
)
def test_nothing_is_updated_by_what_is_not_finite(where, message):
    made = stepper(average=True)
    x, y = batch()
    if where == "loss":
        x[3] = torch.inf
    else:
        made.model[0].weight.register_hook(lambda grad: grad * torch.nan)
    states = [{k: v.clone() for k, v in m.state_dict().items()} for m in (made.model, made.average.module)]
    with pytest.raises(NonFinite, match=message):
        made.update(iter([(x, y)]), 1, False)
    for model, state in zip((made.model, made.average.module), states, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in made.model.parameters())


def test_mixed_images_are_those_of_timm_and_repeat_with_the_seed():
    from vmamba_npu.data.randomness import seed_all

    losses = []
    for _ in range(2):
        made = stepper(replace(PLAIN, mixup=0.8, cutmix=1.0, smoothing=0.1))
        seed_all(5)
        losses.append(made.update(iter([batch()]), 1, False).loss)
    seed_all(5)
    x, targets = made.mix(*batch())
    wanted = -(targets * network()(x).log_softmax(-1)).sum(-1).mean()
    assert losses[0] == losses[1] == pytest.approx(float(wanted), rel=1e-5)
    assert not torch.equal(x, batch()[0])


def test_stop_is_passed_on():
    assert stepper().update(iter([batch()]), 1, True).stop


def test_device_without_bfloat16_is_refused(monkeypatch):
    class Device:
        type = "cuda"

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    with pytest.raises(ValueError, match="no bfloat16; choose fp16 or fp32"):
        Precision("bf16", Device())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 0}, "trainer.epochs"),
        ({"batch_size": 0}, "trainer.batch_size"),
        ({"accumulate": 0}, "trainer.accumulate"),
        ({"clip_grad": 0.0}, "trainer.clip_grad"),
        ({"ema_decay": 1.0}, "trainer.ema_decay"),
        ({"smoothing": 1.0}, "trainer.smoothing"),
        ({"smoothing": -0.1}, "trainer.smoothing"),
        ({"batch_size": 9, "mixup": 0.2}, "even"),
        ({"limit_updates": 0}, "trainer.limit_updates"),
        ({"strategy": "dp"}, "trainer.strategy: expected one of ddp, fsdp"),
        ({"strategy": "fsdp", "precision": "fp16"}, "fp16 needs a gradient scaler"),
        ({"checkpoint_every": -1}, "trainer.checkpoint_every"),
    ],
)
def test_bad_options_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        replace(PLAIN, **values)
