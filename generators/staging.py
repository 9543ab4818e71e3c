"""One version on its way in: into memory while the engine goes on, or during a pause."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from asyncrl import process_groups
from asyncrl.manifest import Manifest, WeightsError, check_names
from asyncrl.process_groups import Disposable, GroupError
from asyncrl.weights_dir import StagedWeights, read_version
from generators.arrivals import Arrivals
from generators.engine import Source, StageTimes
from generators.expected import expected_tensors
from generators.progress import Progress
from generators.receiver import Limits, Receiver


@dataclass(frozen=True, slots=True)
class Place:
    """One receiver of an engine: for which model, and where it puts a version."""

    model_dir: Path
    dtype: str
    """In which the engine has loaded the model."""
    rank: int
    """Among the receivers of its engine: the tensor-parallel rank."""
    device: torch.device
    """Of the engine."""
    home: torch.device
    """Where a version is kept until it is loaded."""
    limits: Limits

    def read(self, source: Source) -> StagedWeights:
        """The version in a directory, verified. Raises WeightsError."""
        expected = expected_tensors(self.model_dir, self.dtype)
        staged = read_version(Path(source.location), expected=expected)
        if staged.weights != source.weights:
            raise WeightsError(f"{source.location} holds {staged.weights}, not {source.weights}")
        return staged

    def receiver(self, source: Source) -> Receiver:
        """In the group of this source. Raises WeightsError for a version of another model."""
        seat = source.seat
        assert seat is not None
        manifest = Manifest.parse(source.manifest.encode())
        expected = expected_tensors(self.model_dir, self.dtype)
        check_names(manifest.entries(), expected, where=f"the manifest of {source.weights}")
        where = process_groups.Seat(
            host=seat.host,
            port=seat.port,
            prefix=f"weights-{source.weights}-{seat.roster}",
            rank=seat.rank + self.rank,
            size=seat.size,
            backend=seat.backend,
        )
        group_device = self.device if seat.backend == "nccl" else torch.device("cpu")
        return Receiver(
            where,
            manifest,
            bucket_bytes=seat.bucket_bytes,
            limits=self.limits,
            device=group_device,
        )


class Staging:
    """Takes one version in, whole and verified, on the memory `home` of its place."""

    def __init__(self, source: Source, place: Place, *, spare: torch.Tensor | None = None) -> None:
        """Begins at once. `spare` is memory of an earlier staging, used again where it fits: the
        system takes its time to hand out so much."""
        self.label = str(source.weights)
        self.tensors: dict[str, torch.Tensor] = {}
        """The whole version, when `progress` says that it is done."""
        self.flat: torch.Tensor | None = None
        """The memory in which they lie, where they came by broadcast."""
        self._source, self._place, self._spare = source, place, spare
        self._state: Literal["running", "done", "failed"] = "running"
        self._error, self._is_lost, self._times = "", False, StageTimes()
        Disposable(self._run, name="stage-weights")

    @property
    def progress(self) -> Progress:
        return Progress(
            state=self._state,  # read first: it is written last
            label=self.label,
            error=self._error,
            is_lost=self._is_lost,
            times=self._times,
        )

    def _run(self) -> None:
        try:
            if self._place.device.type == "cuda":
                torch.cuda.set_device(self._place.device)  # a new thread would use the first GPU
            if self._source.seat is None:
                self._read()
            else:
                self._receive(self._place.receiver(self._source))
        except Exception as error:  # the boundary to another process: reported as text
            self._error, self._is_lost = in_words(error), isinstance(error, GroupError)
            self._state = "failed"
        else:
            self._state = "done"

    def _read(self) -> None:
        staged = self._place.read(self._source)
        home = self._place.home
        self.tensors = {name: tensor.to(home) for name, tensor in staged.tensors.items()}
        self._times = StageTimes(0.0, staged.read_s, staged.verify_s)

    def _receive(self, receiver: Receiver) -> None:
        flat = self._memory(receiver.layout.num_bytes)
        receiver.receive(flat)
        self.flat, self.tensors = flat, receiver.layout.tensors(flat)
        self._times = receiver.times

    def _memory(self, num_bytes: int) -> torch.Tensor:
        spare, home = self._spare, self._place.home
        self._spare = None
        if spare is not None and len(spare) == num_bytes and spare.device == home:
            return spare
        is_pinned = home.type == "cpu" and self._place.device.type == "cuda"
        return torch.empty(num_bytes, dtype=torch.uint8, device=home, pin_memory=is_pinned)


class UnderPause:
    """The tensors of a version, taken in while the engine stands still (staging none)."""

    def __init__(self, source: Source, place: Place) -> None:
        self._source, self._place = source, place
        self._times: Callable[[], StageTimes] = StageTimes

    @property
    def times(self) -> StageTimes:
        return self._times()

    def tensors(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Each is verified before it is given. Close it: then the group is left. Raises
        GroupError, WeightsError."""
        if self._source.seat is None:
            staged = self._place.read(self._source)
            self._times = lambda: StageTimes(0.0, staged.read_s, staged.verify_s)
            yield from staged.tensors.items()
        else:
            receiver = self._place.receiver(self._source)
            self._times = lambda: receiver.times
            yield from Arrivals(receiver)


def in_words(error: Exception) -> str:
    """For another process."""
    return f"{type(error).__name__}: {error}"
