"""Who gets which cores or GPUs on this machine, and the environment that goes with it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import Config


@dataclass(frozen=True, slots=True)
class Placement:
    """Processes of `asyncrl-launch local`. GPU lists are empty on CPU machines."""

    learner_ranks: int
    learner_gpus: tuple[int, ...]
    generator_gpus: tuple[tuple[int, ...], ...]
    """One entry for each generator."""
    cpu_threads: int
    """Threads of each learner rank and each engine."""

    @property
    def num_generators(self) -> int:
        return len(self.generator_gpus)

    def describe(self) -> str:
        """One line for people."""
        if self.learner_gpus:
            engines = ", ".join(str(list(gpus)) for gpus in self.generator_gpus)
            return f"learner on GPUs {list(self.learner_gpus)}, generators on GPUs {engines}"
        return (
            f"{self.learner_ranks} learner rank(s) and {self.num_generators} generator(s) on CPUs, "
            f"{self.cpu_threads} thread(s) each"
        )

    def learner_environment(self) -> dict[str, str]:
        return self._environment(self.learner_gpus)

    def generator_environment(self, index: int) -> dict[str, str]:
        return self._environment(self.generator_gpus[index])

    def _environment(self, gpus: tuple[int, ...]) -> dict[str, str]:
        if gpus:
            return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        return cpu_environment(self.cpu_threads)


def place(config: Config, *, num_gpus: int, num_cores: int) -> Placement:
    """Shares the machine out as config.local says.

    Raises ValueError with the numbers when there are fewer GPUs than asked for.
    """
    local, per_engine = config.local, config.generator.vllm.tensor_parallel_size
    if num_gpus and config.generator.engine == "vllm":
        ranks = local.learner_ranks if local.learner_ranks != "auto" else max(1, num_gpus // 2)
        rest = num_gpus - ranks
        generators = local.generators if local.generators != "auto" else rest // per_engine
        if generators < 1 or generators * per_engine > rest:
            generators = max(1, generators)
            raise ValueError(
                f"{ranks} learner rank(s) and {generators} generator(s) of {per_engine} GPU(s) "
                f"need {ranks + generators * per_engine} GPUs, there are {num_gpus}: set "
                "local.learner_ranks, local.generators or generator.vllm.tensor_parallel_size"
            )
        starts = [ranks + i * per_engine for i in range(generators)]
        engines = tuple(tuple(range(start, start + per_engine)) for start in starts)
        return Placement(ranks, tuple(range(ranks)), engines, cpu_threads=0)
    ranks = local.learner_ranks if local.learner_ranks != "auto" else 1
    generators = local.generators if local.generators != "auto" else 1
    even = max(1, num_cores // (ranks + generators))
    threads = local.cpu_threads if local.cpu_threads != "auto" else even
    return Placement(ranks, (), ((),) * generators, threads)


def cpu_environment(threads: int) -> dict[str, str]:
    """Environment of a process that computes on CPUs.

    The malloc settings keep freed tensors mapped, and Intel's OpenMP (which comes with vLLM's CPU
    build) replaces GNU's: together 1.4x for the learner (docs/performance.md). vLLM must not bind
    its threads, as it would take the cores that the learner counts on.
    """
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "20000000000",
        "MALLOC_TOP_PAD_": "268435456",
        "TOKENIZERS_PARALLELISM": "false",
    }
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():
        before = os.environ.get("LD_PRELOAD")
        environment["LD_PRELOAD"] = f"{openmp}:{before}" if before else str(openmp)
    return environment


def count_gpus() -> int:
    """GPUs that torch could use here, counted without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if visible is None:
        return present
    return min(present, len([gpu for gpu in visible.split(",") if gpu.strip()]))


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
