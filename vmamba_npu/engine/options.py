"""How to train: the values of the trainer group, checked when they are made."""

from dataclasses import dataclass

from .refusals import one_of

PRECISIONS = ("fp32", "bf16", "fp16")
STRATEGIES = ("ddp", "fsdp")


@dataclass(frozen=True)
class Trainer:
    """The values of the trainer group.

    Attributes:
        epochs: passes over the training part.
        batch_size: images of an update, over all processes and accumulated parts together.
        eval_batch_size: images of a batch of an evaluation, in each process.
        accumulate: parts that an update's images are cut into, in each process, to save memory.
        device: "auto", "cpu", "cuda", "npu", or one of several as "cuda:1".
        precision: "fp32", or "bf16", "fp16" for autocast.
        strategy: with several processes: "ddp" copies the model, "fsdp" shards it.
        clip_grad: largest norm of the gradient; None does not clip.
        ema_decay: of the moving average of the weights that is evaluated at the end; None keeps none.
        smoothing: label smoothing.
        mixup, cutmix: alpha of the mixtures of images; 0 for none.
        channels_last: memory layout of images and convolutions.
        compile: run the model through torch.compile.
        deterministic: refuse operations without a deterministic implementation.
        num_workers: processes that prepare batches; 0 does it in the training process.
        checkpoint_every: updates between two checkpoints within an epoch; 0 for epoch ends alone.
        log_every: updates between two lines of the loss curve.
        limit_updates: end every epoch after so many updates; None for none.
        resume: None, "auto" (go on in the output directory if it holds a training state), or the directory of a run.
    """

    epochs: int
    batch_size: int
    eval_batch_size: int = 256
    accumulate: int = 1
    device: str = "auto"
    precision: str = "fp32"
    strategy: str = "ddp"
    clip_grad: float | None = None
    ema_decay: float | None = None
    smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    channels_last: bool = False
    compile: bool = False
    deterministic: bool = False
    num_workers: int = 0
    checkpoint_every: int = 0
    log_every: int = 10
    limit_updates: int | None = None
    resume: str | None = None

    def __post_init__(self) -> None:
        one_of("trainer.precision", self.precision, PRECISIONS)
        one_of("trainer.strategy", self.strategy, STRATEGIES)
        for name in ("epochs", "batch_size", "eval_batch_size", "accumulate", "log_every"):
            self._at_least(name, 1)
        for name in ("smoothing", "mixup", "cutmix", "num_workers", "checkpoint_every"):
            self._at_least(name, 0)
        if self.limit_updates is not None:
            self._at_least("limit_updates", 1)
        if self.clip_grad is not None and self.clip_grad <= 0:
            raise ValueError(f"trainer.clip_grad: expected a positive norm or null, got {self.clip_grad}")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"trainer.ema_decay: expected a value between 0 and 1 or null, got {self.ema_decay}")
        if self.smoothing >= 1:
            raise ValueError(f"trainer.smoothing: expected less than 1, got {self.smoothing}")
        if (self.mixup or self.cutmix) and self.batch_size // self.accumulate % 2:
            raise ValueError("trainer.mixup: images are mixed in pairs; trainer.batch_size / accumulate must be even")
        if self.strategy == "fsdp" and self.precision == "fp16":
            raise ValueError("trainer.precision: fp16 needs a gradient scaler, which fsdp has not here; use bf16")

    def _at_least(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise ValueError(f"trainer.{name}: expected at least {least}, got {getattr(self, name)}")

    @property
    def mixes(self) -> bool:
        """True if training targets are distributions over classes."""
        return bool(self.mixup or self.cutmix)
