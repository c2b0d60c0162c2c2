from .api import ssd

__all__ = ["ssd"]
