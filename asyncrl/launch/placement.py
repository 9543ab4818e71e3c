"""Who gets which cores or GPUs on this machine, and the environment that goes with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import Config

SHARED_GPU_UTILIZATION = 0.4
"""Share of its memory that vLLM takes on a GPU on which the learner computes too."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Processes of `asyncrl-launch local`. GPUs carry their names in CUDA_VISIBLE_DEVICES."""

    learner_ranks: int
    learner_gpus: tuple[str, ...]
    """Empty: the learner computes on CPUs."""
    generator_gpus: tuple[tuple[str, ...], ...]
    """One entry for each generator; empty ones compute on CPUs."""
    cpu_threads: int
    """Threads of each process that computes on CPUs."""

    @property
    def num_generators(self) -> int:
        return len(self.generator_gpus)

    @property
    def shares_gpu(self) -> bool:
        """Whether generator and learner compute on the same GPU (there is only one)."""
        return any(set(gpus) & set(self.learner_gpus) for gpus in self.generator_gpus)

    def describe(self) -> str:
        """One line for people."""
        if self.shares_gpu:
            return f"learner and generator share GPU {self.learner_gpus[0]}"
        if self.learner_gpus:
            engines = " and ".join(",".join(gpus) for gpus in self.generator_gpus)
            return f"learner on GPU {','.join(self.learner_gpus)}, generators on GPU {engines}"
        return (
            f"{self.learner_ranks} learner rank(s) and {self.num_generators} generator(s) on CPUs, "
            f"{self.cpu_threads} thread(s) each"
        )

    def in_config(self, config: Config) -> Config:
        """The configuration with this placement in it, in place of every `auto`. vLLM takes less
        of a GPU that it shares, whatever the configuration said."""
        local = {"generators": self.num_generators, "learner_ranks": self.learner_ranks}
        if self.cpu_threads:
            local["cpu_threads"] = self.cpu_threads
        config = config.model_copy(update={"local": config.local.model_copy(update=local)})
        if not self.shares_gpu:
            return config
        generator = config.generator
        share = min(generator.vllm.gpu_memory_utilization, SHARED_GPU_UTILIZATION)
        vllm = generator.vllm.model_copy(update={"gpu_memory_utilization": share})
        generator = generator.model_copy(update={"vllm": vllm})
        return config.model_copy(update={"generator": generator})

    def learner_environment(self) -> dict[str, str]:
        return self._environment(self.learner_gpus)

    def generator_environment(self, index: int) -> dict[str, str]:
        return self._environment(self.generator_gpus[index])

    def _environment(self, gpus: tuple[str, ...]) -> dict[str, str]:
        if gpus:
            return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        return cpu_environment(self.cpu_threads)


def place(config: Config, *, gpus: tuple[str, ...], num_cores: int) -> Placement:
    """Shares the machine out as config.local says.

    Raises ValueError with the numbers when there are fewer GPUs than asked for.
    """
    if gpus and config.generator.engine == "vllm":
        return _place_on_gpus(config, gpus)
    local = config.local
    ranks = local.learner_ranks if local.learner_ranks != "auto" else 1
    generators = local.generators if local.generators != "auto" else 1
    even = max(1, num_cores // (ranks + generators))
    threads = local.cpu_threads if local.cpu_threads != "auto" else even
    return Placement(ranks, (), ((),) * generators, threads)


def _place_on_gpus(config: Config, gpus: tuple[str, ...]) -> Placement:
    local, per_engine = config.local, config.generator.vllm.tensor_parallel_size
    if len(gpus) == 1 and local.learner_ranks in ("auto", 1) and local.generators in ("auto", 1):
        return Placement(1, gpus, (gpus,), cpu_threads=0)
    ranks = local.learner_ranks if local.learner_ranks != "auto" else max(1, len(gpus) // 2)
    rest = gpus[ranks:]
    generators = local.generators if local.generators != "auto" else len(rest) // per_engine
    generators = max(1, generators)
    if ranks + generators * per_engine > len(gpus):
        raise ValueError(
            f"{ranks} learner rank(s) and {generators} generator(s) of {per_engine} GPU(s) need "
            f"{ranks + generators * per_engine} GPUs, there are {len(gpus)}: set "
            "local.learner_ranks, local.generators or generator.vllm.tensor_parallel_size"
        )
    starts = range(0, generators * per_engine, per_engine)
    engines = tuple(rest[start : start + per_engine] for start in starts)
    return Placement(ranks, gpus[:ranks], engines, cpu_threads=0)


def cpu_environment(threads: int) -> dict[str, str]:
    """Environment of a process that computes on CPUs.

    The malloc settings keep freed tensors mapped, and Intel's OpenMP (which comes with vLLM's CPU
    build) replaces GNU's: together 1.4x for the learner (docs/performance.md). vLLM must not bind
    its threads, as it would take the cores that the learner counts on.
    """
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": "20000000000",
        "MALLOC_TOP_PAD_": "268435456",
        "TOKENIZERS_PARALLELISM": "false",
    }
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():
        environment["LD_PRELOAD"] = _preload(openmp, os.environ.get("LD_PRELOAD", ""))
    return environment


def _preload(openmp: Path, before: str) -> str:
    """LD_PRELOAD with `openmp` first, and without another OpenMP: vLLM puts GNU's there in a
    process that has made an engine, and its engines do not start with both."""
    others = before.replace(":", " ").split()
    kept = [path for path in others if not Path(path).name.startswith(("libgomp", "libiomp"))]
    return ":".join([str(openmp), *kept])


def visible_gpus() -> tuple[str, ...]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    Asks NVIDIA's driver rather than torch, whose import takes seconds.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    answer = subprocess.run([program, "-L"], capture_output=True, text=True, check=False)
    present = tuple(str(i) for i in range(answer.stdout.count("GPU ")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    return tuple(name.strip() for name in visible.split(",") if name.strip())


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
