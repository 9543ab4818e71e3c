"""Nobody waits for weights: the same training with the transfer slowed down ten times.

    python benchmarks/slow_transfer.py configs/demo.yaml --steps 10

The first run publishes as fast as the disk takes it; the second is given a bound on bytes per
second that makes a transfer take ten times as long. Compared are the learner's time per step,
waits included, and the tokens that generators make a second. Writes
benchmarks/results/slow_transfer.json.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from launched_run import Run, launch, save_result
from sync_vs_async import run_overrides

SLOWDOWN = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("overrides", nargs="*", help="key=value, for both runs")
    arguments = parser.parse_args()
    overrides = [*arguments.overrides, *run_overrides(arguments.steps, 2)]
    overrides += ["checkpoint.export_hf=true"]
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        fast = measure(launch(arguments.config, overrides, directory=root, name="fast"))
        bound = int(fast["published_bytes"] / (SLOWDOWN * fast["transfer_s"]))
        slowed = [*overrides, f"weights.max_bytes_per_s={bound}"]
        slow = measure(launch(arguments.config, slowed, directory=root, name="slow"))
    result = {
        "config": str(arguments.config),
        "steps": arguments.steps,
        "fast": fast,
        "slow": slow,
        "transfer_ratio": slow["transfer_s"] / fast["transfer_s"],
        "step_ratio": slow["step_s"] / fast["step_s"],
        "tokens_ratio": slow["generator_tokens_per_s"] / fast["generator_tokens_per_s"],
    }
    save_result("slow_transfer", result)
    print(
        f"transfer {fast['transfer_s']:.2f} s -> {slow['transfer_s']:.2f} s, "
        f"learner's step x{result['step_ratio']:.3f}, "
        f"generator tokens/s x{result['tokens_ratio']:.3f}"
    )


def measure(run: Run) -> dict[str, float]:
    final = run.directory / "final"
    return {
        "step_s": run.median("time/step_s"),
        "transfer_s": run.median("publish/write_s"),
        "published_bytes": sum(f.stat().st_size for f in final.glob("*.safetensors")),
        "generator_tokens_per_s": run.median("buffer/generator_tokens_per_s"),
    }


if __name__ == "__main__":
    main()
