"""SSD in chunks, on any device: batched matrix products over blocks of rows and chunks that stay in cache."""

from .backward import backward
from .forward import forward

__all__ = ["backward", "forward"]
