"""Settings of the whole suite: one thread, and property tests that draw the same examples every time."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("suite", derandomize=True, deadline=None, max_examples=20, database=None, print_blob=False)
settings.load_profile("suite")
