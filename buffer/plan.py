"""Where batches close: every one has B groups, but for what the end of the data leaves. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from buffer.outstanding import Outstanding

LastBatch = Literal["train", "drop", "wrap"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How many steps there are, and what becomes of the groups that are too few for a last one.

    `admitted` is how many groups were admitted so far, `there` are the outstanding ones.
    """

    groups_per_step: int
    num_groups: int
    """How many the data holds, all epochs together."""
    max_steps: int | None
    last_batch: LastBatch

    def __post_init__(self) -> None:
        """ValueError when these numbers cannot give a single step."""
        if self.last_batch == "drop" and self.num_groups < self.groups_per_step:
            raise ValueError(
                f"data.train_files give {self.num_groups} prompts in all epochs, fewer than one "
                f"step of prompts_per_step={self.groups_per_step}, and data.last_batch=drop: there "
                "would be no step. Use last_batch=train or wrap, or a smaller prompts_per_step."
            )

    def is_past(self, step: int) -> bool:
        """Whether max_steps excludes this step."""
        return self.max_steps is not None and step >= self.max_steps

    def has_ended(self, admitted: int) -> bool:
        """Whether every prompt of the data has been admitted."""
        return admitted >= self.num_groups

    def has_another(self, admitted: int, there: Outstanding) -> bool:
        """Whether there is another prompt to admit; at the end of the data perhaps one from its
        start, to fill up the last step."""
        if not self.has_ended(admitted):
            return True
        if self.last_batch != "wrap" or not there or there.first >= self.num_groups:
            return False
        return len(there) % self.groups_per_step > 0

    def batch_size(self, admitted: int, there: Outstanding) -> int:
        """Groups in the next batch."""
        if self.has_ended(admitted) and self.last_batch == "train":
            return min(self.groups_per_step, len(there))
        return self.groups_per_step

    def leftovers(self, admitted: int, there: Outstanding) -> tuple[int, ...]:
        """Outstanding groups that no batch will take: too few at the end, or only wrapped ones."""
        if not self.has_ended(admitted) or not there:
            return ()
        too_few = self.last_batch == "drop" and len(there) < self.groups_per_step
        only_wrapped = there.first >= self.num_groups
        return there.numbers if too_few or only_wrapped else ()
