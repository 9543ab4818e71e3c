"""What a new version of the weights costs learner and generator, with real vLLM on CPUs.

    python benchmarks/bench_weights.py [--models tiny HuggingFaceTB/SmolLM2-135M-Instruct] [--quick]

A buffer, a learner that publishes real snapshots without training, and a generator under a constant
load, one core each for learner and engine. Versions come in turn by gloo, by gloo slowed down to
50 MB/s, and over the disk, beside a load of what lies in memory already; then by gloo without
staging. Alone, the learner's snapshot is held against bare copies and all-gathers, and a gloo
broadcast of one tensor is the measure of a transfer. Writes benchmarks/results/bench_weights.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launched_run import save_result
from rich.console import Console
from weights_config import make_config
from weights_report import claims, claims_table, ways_table

from asyncrl.launch.models import find_model
from asyncrl.launch.placement import cpu_environment
from asyncrl.run_dir import RunDir

if TYPE_CHECKING:
    from weights_generator import GeneratorProcess, Update
    from weights_learner import PublishingLearner

TINY, SMALL = "tiny", "HuggingFaceTB/SmolLM2-135M-Instruct"
ROUNDS = {TINY: 11}
"""What takes milliseconds takes more rounds."""
NUM_REQUESTS = 16
"""That the generator keeps going."""
SLOW_BYTES_PER_S = 50_000_000
QUIET_S = 1.0
"""Before each version: the measure for the tokens sampled while it comes."""
MARK = "ASYNCRL_BENCH_ENVIRONMENT"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[TINY, SMALL], help="names or directories")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--quick", action="store_true", help="the tiny model, two rounds")
    arguments = parser.parse_args()
    if MARK not in os.environ:  # some of it is read when a process starts
        environment = {**os.environ, **cpu_environment(1), MARK: "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    names = [TINY] if arguments.quick else arguments.models
    console = Console(width=110)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=_shared_memory()) as directory:
        for name in names:
            place = Path(directory) / f"model-{len(results)}"
            place.mkdir()
            rounds = arguments.rounds or (2 if arguments.quick else ROUNDS.get(name, 5))
            results.append(measure(name, _model_of(name, place), place, rounds=rounds))
            console.print(ways_table(results[-1]))
    for result in results:
        result["claims"] = [asdict(claim) for claim in claims(result)]
    console.print(claims_table(results))
    save_result("bench_weights", {"num_requests": NUM_REQUESTS, "models": results})


def measure(name: str, model: Path, place: Path, *, rounds: int) -> dict[str, Any]:
    """Everything about one model; seconds of each round, by what was done."""
    result: dict[str, Any] = {"model": Path(name).name}
    for num_ranks in (1, 2):
        _say(f"{name}: the learner alone, {num_ranks} rank(s)")
        result[f"alone_{num_ranks}"] = learner_alone(model, place, num_ranks, rounds=3 * rounds)
    _say(f"{name}: staged in the host's memory")
    with running(model, place / "host", "host", num_versions=6 * rounds + 4) as run:
        result["num_bytes"] = run.learner.num_bytes
        result["idle"] = [run.update("collective") for _ in range(rounds + 1)][1:]
        run.generator.load(NUM_REQUESTS)
        result |= {way: [] for way in ("local", "gloo", "gloo_slow", "disk")}
        run.update("collective")
        for _ in range(rounds):
            result["local"].append(run.take_local())
            result["gloo"].append(run.update("collective"))
            result["gloo_slow"].append(run.update("collective", SLOW_BYTES_PER_S))
            result["disk"].append(run.update("disk"))
    _say(f"{name}: without staging")
    with running(model, place / "none", "none", num_versions=2 * rounds + 4) as run:
        run.generator.load(NUM_REQUESTS)
        run.update("collective")
        result["none"] = [run.update("collective") for _ in range(rounds)]
        slow_rounds = (rounds + 1) // 2
        result["none_slow"] = [
            run.update("collective", SLOW_BYTES_PER_S) for _ in range(slow_rounds)
        ]
    return result


def learner_alone(model: Path, place: Path, num_ranks: int, *, rounds: int) -> dict[str, Any]:
    """See bare_learner.py."""
    out = place / "alone.json"
    command = [sys.executable]
    if num_ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={num_ranks}"]
    command += [str(Path(__file__).parent / "bare_learner.py"), str(model), str(out), str(rounds)]
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": root}, stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@dataclass
class Run:
    """A learner that publishes and a generator that takes."""

    learner: PublishingLearner
    generator: GeneratorProcess
    place: Path

    def update(self, transport: str, max_bytes_per_s: int | None = None) -> dict[str, Any]:
        """One version, from the snapshot to its first token."""
        with self.learner.publisher(transport, max_bytes_per_s=max_bytes_per_s) as publisher:
            self.generator.tokens()
            time.sleep(QUIET_S)
            began = time.monotonic()
            weights = self.learner.publish(publisher)
            update = self.generator.next_update()
            if update.weights != weights:
                raise SystemExit(f"weights {weights} were published, {update.weights} serve")
            return self._measured(update, began)

    def take_local(self) -> dict[str, Any]:
        """One version that lies on this machine: no learner, no buffer."""
        source = self.learner.write(self.place / "local")
        self.generator.tokens()
        time.sleep(QUIET_S)
        began = time.monotonic()
        return self._measured(self.generator.take(source), began)

    def _measured(self, update: Update, began: float) -> dict[str, Any]:
        time.sleep(0.1)  # tokens are counted up to here
        tokens = self.generator.tokens()
        start, stop = update.staging
        before = tokens.between(began - QUIET_S + 0.1, began) / (QUIET_S - 0.1)
        return {
            "paused_s": update.swapped.total_s,
            "load_s": update.swapped.load_s,
            "staging_s": stop - start,
            **asdict(update.swapped.stage if self._is_under_pause else update.staged),
            "tokens_per_s_before": before,
            "tokens_during": tokens.between(start, stop),
            "staging_from_s": start - began,
            "paused_from_s": update.swapping[0] - began,
            "published_to_served_s": update.swapping[1] - began,
        }

    @property
    def _is_under_pause(self) -> bool:
        return self.learner.config.weights.staging == "none"


@contextmanager
def running(
    model: Path, place: Path, staging: Literal["host", "none"], *, num_versions: int
) -> Iterator[Run]:
    from weights_generator import GeneratorProcess
    from weights_learner import PublishingLearner, running_buffer

    run_dir = RunDir(place / "run")
    run_dir.path.mkdir(parents=True)
    config = make_config(model, place=place, staging=staging)
    with running_buffer(run_dir, config) as address:
        learner = PublishingLearner(config, run_dir, address, num_versions=num_versions)
        generator = GeneratorProcess(run_dir.config, address)
        try:
            yield Run(learner, generator, place)
        finally:
            generator.close()
            learner.close()


def _model_of(name: str, place: Path) -> Path:
    """`tiny` is made here: random numbers take as long as trained ones."""
    if name != TINY:
        return find_model(name)
    from tiny_task import make_model, make_tokenizer

    tokenizer = make_tokenizer()
    make_model(tokenizer, seed=0, tied=True).save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    return place / "model"


def _shared_memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _say(words: str) -> None:
    Console(stderr=True).print(f"{time.strftime('%H:%M:%S')} {words}")


if __name__ == "__main__":
    main()
