"""One thread for all engine tests: tiny products are slower on several, and the machine is shared."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
