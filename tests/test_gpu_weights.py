"""What weights need of a GPU: benchmarks/gpu_smoke.py, check by check; on CPUs too."""

from __future__ import annotations

import pytest
import torch
from gpu_smoke import CHECKS, expect, passes


@pytest.mark.parametrize("name", CHECKS)
def test_the_calls_of_the_smoke_test_work_on_cpus(name: str) -> None:
    assert CHECKS[name](torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CHECKS)
def test_a_gpu_does_what_weights_need(name: str) -> None:
    assert torch.cuda.is_available(), "the marker gpu needs a GPU"
    assert CHECKS[name](torch.device("cuda", 0))


def test_a_check_that_fails_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(device: torch.device) -> str:
        expect(device.type == "tpu", f"{device} is no TPU")
        return "fine"

    assert not passes("broken", broken, torch.device("cpu"))
    assert "FAILED  broken" in (said := capsys.readouterr().out) and "cpu is no TPU" in said
