"""mamba_ssm.utils.generation: the bookkeeping object of cached inference."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["InferenceParams"]


@dataclass
class InferenceParams:
    """What the layers of a model share while tokens are produced: how far they are, and each layer's cache.

    The caller adds the number of consumed tokens to `seqlen_offset` after each call of the model.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[Any, Any] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Start again with these sizes; the caches stay (a call at offset 0 overwrites them)."""
        self.max_seqlen, self.max_batch_size = max_seqlen, max_batch_size
        self.seqlen_offset = 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()
