"""What the learner says about its steps: metrics.jsonl, one line for people, its state in words."""

from __future__ import annotations

import logging

from asyncrl.config import Config
from asyncrl.messages import End, Record
from asyncrl.metrics import MetricsLog, Value
from asyncrl.run_dir import RunDir
from asyncrl.wire import Packet, view
from learner.ranks import Ranks

log = logging.getLogger(__name__)

_OF_A_STEP = {
    "prepare": "preparing the batch",
    "forward_backward": "forward and backward",
    "optimizer": "optimizer",
    "other": "metrics",
}
_OF_A_VERSION = {
    "commit": "committing version {}",
    "snapshot": "copying the weights of version {}",
    "checkpoint": "writing a checkpoint of version {}",
    "log": "writing the metrics up to version {}",
    "drain": "publishing the newest weights, version {} at most",
    "export": "writing version {} in Hugging Face format",
}


def state_in_words(phase: str, *, version: int, committed: int) -> str:
    """What a learner at `version` does in this phase of its clock; below `committed` it replays."""
    if phase in _OF_A_STEP:
        step = f"replaying step {version}" if version < committed else f"step {version}"
        return f"{step}: {_OF_A_STEP[phase]}"
    if phase == "wait_buffer":
        return "waiting for the buffer"
    if phase == "wait_batch":
        return f"waiting for the batch of step {version}"
    return _OF_A_VERSION[phase].format(version) if phase in _OF_A_VERSION else "starting"


def last_line(end: End, version: int) -> str:
    """How the run ended, and how to go on where it can."""
    if end.failed:
        return f"the run failed at version {version}: {end.reason}"
    if end.stopped:
        return f"version {version} is in a checkpoint: {end.reason}"
    return f"the run has ended at version {version}: {end.reason}"


class Reporter:
    """Writes for the lead; on other ranks its methods do nothing."""

    def __init__(self, run_dir: RunDir, config: Config, ranks: Ranks) -> None:
        self._log = MetricsLog(run_dir, config) if ranks.is_lead else None
        self._skipped = run_dir.skipped
        self._max_staleness = config.max_staleness

    def records(self, records: list[Record]) -> None:
        """Records that the buffer made, each name behind its record's: eval/accuracy."""
        if self._log is None:
            return
        for record in records:
            values: dict[str, Value] = {
                f"{record.name}/{name}": value for name, value in record.values.items()
            }
            self._log.log(record.step, values)

    def step(
        self, step: int, values: dict[str, float], *, seconds: dict[str, float], waited_for: str
    ) -> None:
        """One trained step; `seconds` by phase add up to its wall time."""
        if self._log is None:
            return
        wall = sum(seconds.values())
        record: dict[str, Value] = {
            **values,
            "train/tokens_per_s": values["train/num_tokens"] / max(wall, 1e-9),
            "time/step_s": wall,
            **{f"time/{phase}_s": spent for phase, spent in seconds.items()},
        }
        if waited_for:
            record["wait/waited_for"] = waited_for
        self._log.log(step, record)
        log.info("%s", self._line(step, record, seconds))

    def skipped(self, step: int, packet: Packet) -> None:
        """Keeps the batch of a skipped step: one file a group, to be read by wire.decode_group."""
        if self._log is None:
            return
        directory = self._skipped / f"step-{step:08d}"
        directory.mkdir(parents=True, exist_ok=True)
        for number, frame in enumerate(packet.frames):
            (directory / f"{number:05d}.group").write_bytes(view(frame))

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _line(self, step: int, record: dict[str, Value], seconds: dict[str, float]) -> str:
        def number(name: str) -> float:
            value = record.get(name, float("nan"))
            assert not isinstance(value, str)
            return value

        skipped = "  SKIPPED: loss or gradient not finite" if record["train/skipped"] else ""
        return (
            f"step {step}  reward {number('train/reward_mean'):.3f}  "
            f"loss {number('train/loss'):+.4f}  kl {number('train/k3'):.4f}  "
            f"entropy {number('train/entropy'):.2f}  grad {number('train/grad_norm'):.2f}  "
            f"staleness {number('staleness/mean'):.1f} max {number('staleness/max'):.0f} of "
            f"{self._max_staleness}  {number('train/tokens_per_s'):.0f} tokens/s  "
            f"{number('time/step_s'):.1f} s (waited {seconds.get('wait_batch', 0.0):.1f}){skipped}"
        )
