"""NCCL groups that may fail without taking the process with them."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from typing import Any

NO_WATCHDOG = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""By default a thread of torch watches each group and ends the process when one fails. With these
it has no such thread, and what fails is raised where it is waited for. Torch 2.13 has no option of
one group for it: it reads the environment when it makes a group."""

_environment = threading.Lock()


def make_nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A torch ProcessGroupNCCL of its own. Its communicator, and with it the GPU, is chosen by the
    first tensor. Groups that other threads make meanwhile would also get no watchdog.

    Raises RuntimeError; ValueError without a GPU.
    """
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    with _environment:
        before = {name: os.environ.get(name) for name in NO_WATCHDOG}
        os.environ.update(NO_WATCHDOG)
        try:
            return ProcessGroupNCCL(store, rank, size, options)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
