"""The configuration tree: one class per section, one documented field per knob.

The string under a field is its documentation: meaning, unit, and why the default is what it is.
`--help`, docs/configuration.md and the error messages are made from it. Pure pydantic: importing
this needs neither torch nor vllm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from asyncrl.address import Address

Seed = Annotated[int, Field(ge=0, lt=1 << 63)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys refused, docs taken from the strings."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )


class Model(Section):
    """The policy."""

    path: str
    """Directory in Hugging Face format, or a model name on the hub."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Arithmetic of generators and learner, and the type in which weights travel. The learner's
    master weights are float32 whatever this says. float32 is for exactness tests."""
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    """Attention kernel of the learner. auto: sdpa on GPUs, eager on CPUs, where the backward of
    sdpa is slow on short rows."""


class ReasoningGym(Section):
    """Rows made by reasoning-gym: procedural, seeded, verifiable, no download."""

    reasoning_gym: str
    """Name of the reasoning-gym data set, as `chain_sum`."""
    params: dict[str, Any] = {}
    """Its parameters, as `{max_terms: 2}`."""
    size: PositiveInt
    """Number of rows."""
    seed: Seed = 0
    """Seed of the rows. A fifth of all texts, chosen by hash, is never trained: validation sources
    draw from that fifth alone."""


class DataKeys(Section):
    """Where a row of a file holds what; dots reach into nested columns. Defaults are verl's."""

    prompt: str = "prompt"
    """Text (used as it is) or a list of chat messages (rendered by the chat template)."""
    source: str = "data_source"
    """Names the row's data set in metrics and for the reward function."""
    answer: str = "reward_model.ground_truth"
    """What the reward function compares with."""
    extra: str = "extra_info"
    """Anything else that the reward function wants; may be missing."""


class Data(Section):
    """Prompts to train on and to evaluate on."""

    train_files: Annotated[list[str | ReasoningGym], Field(min_length=1)]
    """Parquet or JSONL files, or reasoning-gym sources, one after the other."""
    val_files: list[str | ReasoningGym] = []
    """The same for evaluation. Empty: no evaluation."""
    keys: DataKeys = DataKeys()
    """Names of the columns in files."""
    chat_template_kwargs: dict[str, Any] = {}
    """Passed to the chat template, as `{enable_thinking: false}`."""
    max_prompt_length: PositiveInt = 1024
    """Tokens. A longer prompt is an error or is dropped, see overlong_prompts."""
    max_response_length: PositiveInt = 4096
    """Tokens generated at most; the response then counts as truncated."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """What a prompt over max_prompt_length does. error, because dropping hides a wrong limit."""
    shuffle: bool = True
    """A new order each epoch, from the run's seed."""
    last_batch: Literal["train", "drop", "wrap"] = "train"
    """What happens at the end of the data to groups too few for a step: a smaller step, no step,
    or a step filled up from the start of the data (those prompts are trained twice)."""


class Reward(Section):
    """Who scores a response. Called in worker processes that can be killed."""

    path: str
    """`file.py:function` or `package.module:function` with verl's signature
    (data_source, solution_str, ground_truth, extra_info) -> number or dict with `score`."""
    timeout_s: PositiveFloat = 30.0
    """Seconds for one call; the worker is killed then."""
    workers: PositiveInt = 4
    """Worker processes for each generator."""
    on_error: Literal["drop", "stop"] = "drop"
    """After an exception or a time-out: leave the rollout unscored, or end the run."""


class SamplingSection(Section):
    """How training rollouts are sampled. Truncating samplers (top-p, top-k) are not offered: the
    learner could not compute the probabilities of what was sampled."""

    temperature: PositiveFloat = 1.0
    """Travels with every sample; the learner divides its logits by the same number."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Strings that end a response (kept in it)."""
    stop_token_ids: list[NonNegativeInt] = []
    """Token ids that end a response besides the model's own end token. The stop token belongs to
    the response and is trained."""


class VllmOptions(Section):
    """Passed to vLLM."""

    tensor_parallel_size: PositiveInt = 1
    """GPUs of one engine."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of GPU memory for weights and KV cache."""
    max_num_seqs: PositiveInt = 256
    """Requests decoded at once."""
    enforce_eager: bool = True
    """No compilation: starts in seconds. Compiled is about 1.2x as fast on CPUs."""
    cpu_kv_cache_gib: PositiveInt = 2
    """KV cache on CPUs, GiB."""


class ScriptedOptions(Section):
    """The scripted engine: random tokens from the seed, for protocol tests, load, simulation."""

    mode: Literal["by_version", "fixed"] = "by_version"
    """by_version: tokens depend on seed and served version, so that a wrong version shows.
    fixed: on the seed alone, so that runs with failures stay comparable bit for bit."""
    tokens_per_s: PositiveFloat = 1000.0
    """Speed of one response, tokens per second."""
    length: PositiveInt = 8
    """Longest response; lengths vary with the seed from 1 to this, tokens."""
    slow_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the responses, chosen by their seeds, that take slow_factor times as long."""
    slow_factor: Annotated[float, Field(ge=1)] = 8.0
    """Same tokens, at this part of the speed."""


class Generator(Section):
    """A generator process."""

    engine: Literal["vllm", "scripted"] = "vllm"
    """scripted makes up tokens; it is for tests and never trains anything."""
    max_concurrent_rollouts: PositiveInt | Literal["auto"] = "auto"
    """Responses in flight at once. auto: vllm.max_num_seqs."""
    vllm: VllmOptions = VllmOptions()
    """Options of the engine."""
    scripted: ScriptedOptions = ScriptedOptions()
    """Options of the scripted engine."""


class Buffer(Section):
    """The buffer process."""

    order: Literal["fifo", "ready"] = "fifo"
    """fifo: groups are trained in the order in which their prompts were admitted. ready: any
    finished group, the one with the nearest deadline first. Little faster by itself; with on_late
    drop or reissue much faster where a few answers are very long (docs/staleness.md)."""
    on_late: Literal["wait", "drop", "reissue"] = "wait"
    """A group still in flight at its deadline, when the learner has nothing else to do and enough
    others are finished: wait for it, drop it (fate stale), or generate it anew (order ready). All
    but wait favour short answers; the lengths of both are logged."""
    zero_variance: Literal["train", "drop", "refill"] = "refill"
    """Groups whose rewards are all equal: train keeps them (advantage exactly 0); drop leaves them
    out, so that their step is smaller; refill generates another prompt in their place."""
    durability: Literal["none", "process", "full"] = "process"
    """What survives. process: everything acknowledged survives SIGKILL of the buffer; full: loss of
    power, too (a disk sync with every write); none: books and groups are in memory alone, and end
    with the buffer."""
    max_journal_gb: PositiveFloat = 100.0
    """Disk space (10^9 bytes) for finished groups. Near it the learner is asked for a checkpoint,
    which lets older ones go; at it no prompt is handed out. A guard against a full disk."""
    keep_payloads: Literal["until_checkpoint", "always"] = "until_checkpoint"
    """When finished groups are deleted: once every kept checkpoint is newer than their step, or
    never (to replay a whole run with `learner --replay`)."""
    lease_timeout_s: PositiveFloat = 1800.0
    """Seconds from the start of a group to its submission; then another generator gets it."""
    max_attempts: PositiveInt = 3
    """Failures after which a prompt is quarantined: those caused by its content, leases that began
    and ran past their time, and with on_late reissue each time that it is let go. A group that is
    generated anew for being late keeps its seeds: one that is slow by itself is late each time."""
    max_filtered_in_a_row: PositiveInt = 1000
    """Filtered or failed groups without a usable one between them that end the run: the task is
    too easy, too hard, or the reward is broken."""


class Optim(Section):
    """AdamW on float32 master weights (pure bfloat16 loses small updates)."""

    lr: PositiveFloat = 1e-6
    """Learning rate after the warm-up."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    grad_clip: PositiveFloat = 1.0
    """Largest global gradient norm."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises linearly from lr / warmup_steps."""


class Advantage(Section):
    """From rewards to advantages, by group."""

    std: Literal["group", "batch", "none"] = "batch"
    """What the centred rewards are divided by: the group's own deviation (GRPO), that of the whole
    batch (no blow-up of nearly solved prompts), or nothing (Dr.GRPO)."""


class Loss(Section):
    """Policy loss: -mask * min(ratio, cap) * advantage per token."""

    mask: Literal["ppo_clip", "dppo_tv"] = "dppo_tv"
    """Trust region. Both are measured from the generator's own logprobs (anchor: behavior), so
    staleness is corrected. ppo_clip: ratio in [1 - clip_low, 1 + clip_high]. dppo_tv: change of
    the sampled token's probability at most mask_threshold (DPPO)."""
    clip_low: PositiveFloat = 0.2
    """ppo_clip only."""
    clip_high: PositiveFloat = 0.28
    """ppo_clip only; higher than clip_low, as in DAPO."""
    mask_threshold: PositiveFloat = 0.2
    """dppo_tv only."""
    ratio_cap: PositiveFloat = 5.0
    """dppo_tv only: importance weights are cut here. Below 5, rare tokens lose their signal."""
    behavior_coef: NonNegativeFloat = 0.001
    """Weight of (log ratio)^2, a small pull towards the policy that sampled; 0: none."""
    aggregation: Literal["token_mean"] = "token_mean"
    """Sum over the tokens of the global batch, divided by their number before any mask."""


class Learner(Section):
    """The learner: one process per rank, FSDP2 over all of them."""

    optim: Optim = Optim()
    """Optimizer."""
    advantage: Advantage = Advantage()
    """Advantages."""
    loss: Loss = Loss()
    """Policy loss."""
    max_tokens_per_microbatch: PositiveInt = 16384
    """Padded tokens of one forward and backward pass on one rank: bounds activation memory."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory, about a third more time."""


class WeightsSection(Section):
    """How new weights reach the generators."""

    transport: Literal["auto", "collective", "disk"] = "auto"
    """collective: broadcast by NCCL or gloo from the learner to the generators, in memory. disk:
    versioned safetensors directories, in shared memory on one machine. auto: disk where weights.dir
    is set, and for the scripted engine, which reads no weights; collective otherwise."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Of the collective transport. auto: nccl for GPUs of which none is shared and each generator
    has one, gloo for all else."""
    host: str | None = None
    """Address of the learner's machine at which generators reach it (collective). null: that of
    the interface which leads to the buffer; behind a tunnel it has to be said."""
    staging: Literal["host", "device", "none"] = "host"
    """Where a generator keeps a version until all of it is there and verified: host memory; the
    engine's device (a swap is faster, and takes the memory of a second model there); none: the
    engine stands still for the whole transfer, and ends if it fails."""
    kv_in_flight: Literal["keep", "recompute"] = "keep"
    """What becomes of the KV cache of requests in flight at a swap. keep: they go on with what
    older weights computed; recompute: it is computed anew, as by the new weights alone."""
    dir: str | None = None
    """Directory in which each run makes one of its own for its versions, seen by learner and
    generators (disk). null: /dev/shm, or the run directory where there is none."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Newest versions that stay in the directory (disk)."""
    bucket_bytes: Annotated[int, Field(ge=1 << 16)] = 64 << 20
    """Bytes of one broadcast, or of one file of a version."""
    max_bytes_per_s: PositiveInt | None = None
    """Upper bound on the speed of publishing, to spare a shared disk or link. null: none."""
    timeout_s: PositiveFloat = 120.0
    """A transfer that takes longer than this is given up, on both sides; the next one has the
    version that is then the newest."""
    stall_timeout_s: PositiveFloat = 10.0
    """A broadcast in which no bucket arrives for so long is given up, and made again without the
    generators that caused it (collective)."""
    publish_every: PositiveInt = 1
    """Versions from one publication to the next; at most max_staleness + 1."""


class Parity(Section):
    """At equal weights the generators' logprobs must be the learner's (docs/parity.md)."""

    max_gap_mean: PositiveFloat = 0.1
    """Bound on the mean |difference| of logprobs, nats. Rounding of bfloat16 gives up to 0.05."""
    max_k3: PositiveFloat = 0.01
    """Bound on KL(generator || learner) per token. Rounding of bfloat16 gives up to 0.005."""
    max_ratio_error: PositiveFloat = 0.01
    """Bound on |mean ratio of probabilities - 1|, after four standard errors. Not 0 means that the
    generator reports other probabilities than it samples with; rounding does not move it."""
    min_tokens: PositiveInt = 1000
    """Tokens at equal weights that a verdict needs; until then they are gathered, step after
    step."""
    at_start: Literal["refuse", "warn"] = "refuse"
    """What the first verdict does when it is over a bound: the learner ends with exit code 2 before
    it trains that step, or goes on with an alarm."""
    in_run: Literal["warn", "stop"] = "warn"
    """The same for all later verdicts."""


class Eval(Section):
    """Evaluation on val_files, by the generators, while training goes on."""

    every: NonNegativeInt = 50
    """Versions between evaluations; 0: only before and after, as before_training says."""
    before_training: bool = True
    """Evaluate version 0 first. The last version is always evaluated."""
    temperature: NonNegativeFloat = 0.0
    """0: greedy."""
    samples: PositiveInt = 1
    """Responses to each prompt; the result is their mean."""
    timeout_s: PositiveFloat = 600.0
    """Seconds from the first lease of an evaluation to its end; then it ends with what is there."""


class Checkpoint(Section):
    """Complete state of the learner on disk."""

    every: NonNegativeInt = 50
    """Versions between checkpoints; 0: only at the end."""
    keep_last: PositiveInt = 2
    """Newest checkpoints that stay."""
    export_hf: bool = True
    """Write the final policy as a Hugging Face directory."""
    resume: Annotated[str, Field(min_length=1)] = "never"
    """never: a run directory that is not empty is an error. auto: go on from its newest
    checkpoint, or start. The path of a checkpoint: one of this run's own goes back to it and
    replays what came after; one of another run is version 0 of a new run, with optimizer state."""


class Logging(Section):
    """Where metrics go besides metrics.jsonl in the run directory."""

    trackers: list[Literal["wandb"]] = []
    """wandb obeys its own environment variables; without WANDB_API_KEY and WANDB_MODE it writes
    offline files into the run directory, so that no run waits for a login."""
    project: str = "asyncrl"
    """Project name in the tracker."""


class Network(Section):
    """Addresses."""

    buffer: str = "tcp://127.0.0.1:5570"
    """Where the buffer listens and the others connect. `tcp://127.0.0.1:0` with `local`: any free
    port. Loopback only: traffic is neither authenticated nor encrypted yet."""
    heartbeat_s: PositiveFloat = 5.0
    """Seconds between signs of life; after three missed ones a generator's leases pass on."""
    wait_for_buffer_s: PositiveFloat = 12.0
    """Seconds that a starting learner or generator waits for the buffer. Short, so that a wrong
    address is told soon; raise it where jobs start minutes apart."""
    buffer_timeout_s: PositiveFloat = 120.0
    """Seconds that a working learner or generator waits for a buffer that has gone, for example
    until it is started again. Then it ends with exit code 1."""
    stall_timeout_s: PositiveFloat = 3600.0
    """The run fails when nothing has got on for this long: no group came in and no step was
    trained. The error names what is missing. Longer than buffer.lease_timeout_s, so that a lease
    of a stuck generator has passed on before."""

    @field_validator("buffer")
    @classmethod
    def _loopback(cls, text: str) -> str:
        address = Address.parse(text)
        if not address.is_loopback:
            raise ValueError(
                f"{address.host} is not a loopback address: traffic is neither authenticated nor "
                "encrypted yet, so only 127.0.0.1, [::1] and localhost are allowed"
            )
        return text


class Local(Section):
    """`asyncrl-launch local`: everything on this machine."""

    generators: PositiveInt | Literal["auto"] = "auto"
    """Generator processes. auto: one on CPUs; on GPUs all that the learner does not use."""
    learner_ranks: PositiveInt | Literal["auto"] = "auto"
    """Learner processes. auto: one on CPUs; on GPUs half of them."""
    cpu_threads: PositiveInt | Literal["auto"] = "auto"
    """Threads of each learner rank and each engine on CPUs. auto: the cores shared out evenly, as
    more threads than cores slow both sides down."""
    max_restarts: NonNegativeInt = 3
    """Processes, all together, that are started again after they were killed, or after a generator
    at work has failed. One that fails at its start, and a learner or buffer that fails by itself,
    end the run at once: they would fail again."""


class Config(Section):
    """One run."""

    run_name: str | None = None
    """Name of the run directory under output_dir. null: config name and time."""

    @field_validator("run_name")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*", name):
            raise ValueError(
                f"{name!r} cannot name a directory: use letters, digits and _ . = + -, and set "
                "output_dir for where it stands"
            )
        return name

    output_dir: str = "runs"
    """Where run directories are made."""
    seed: Seed = 0
    """Seed of data order and sampling."""
    max_steps: PositiveInt | None = None
    """Training steps. null: until the epochs end."""
    max_epochs: PositiveInt = 1
    """Passes over the training data."""
    max_staleness: NonNegativeInt = 2
    """The knob: no token older than this many policy versions is ever trained. 0: generation and
    training take turns. Most of the gain comes at 1 or 2."""
    prompts_per_step: PositiveInt = 64
    """Groups in one training step."""
    group_size: PositiveInt = 8
    """Responses to each prompt."""
    algorithm: Literal["grpo", "async_grpo"] = "async_grpo"
    """Preset of learner.optim, learner.advantage, learner.loss and buffer.zero_variance; whatever
    the file or the command line sets wins over it. `grpo`: groups normalised by their own
    deviation, PPO's clip; `async_grpo`: made for stale samples (asyncrl/config/presets.py)."""
    model: Model
    """The policy."""
    data: Data
    """Prompts."""
    reward: Reward
    """Scores."""
    sampling: SamplingSection = SamplingSection()
    """Sampling of training rollouts."""
    generator: Generator = Generator()
    """Generators."""
    buffer: Buffer = Buffer()
    """Buffer."""
    learner: Learner = Learner()
    """Learner."""
    weights: WeightsSection = WeightsSection()
    """Weight transfer."""
    parity: Parity = Parity()
    """Same policy on both sides."""
    eval: Eval = Eval()
    """Evaluation."""
    checkpoint: Checkpoint = Checkpoint()
    """Checkpoints."""
    logging: Logging = Logging()
    """Metrics."""
    network: Network = Network()
    """Addresses."""
    local: Local = Local()
    """Placement by `asyncrl-launch local`."""

    @property
    def transport(self) -> Literal["collective", "disk"]:
        """What weights.transport comes to."""
        if self.weights.transport != "auto":
            return self.weights.transport
        is_disk = self.weights.dir is not None or self.generator.engine == "scripted"
        return "disk" if is_disk else "collective"

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Config:
        problems = list(self._misfits())
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _misfits(self) -> Iterator[str]:
        """One line for each pair of settings that cannot go together: `first key: what, how`."""
        if self.group_size == 1:
            yield (
                "group_size: 1 leaves nothing to compare a response with, every advantage would "
                "be 0: use 2 or more"
            )
        longest = self.data.max_prompt_length + self.data.max_response_length
        if self.learner.max_tokens_per_microbatch < longest:
            yield (
                f"learner.max_tokens_per_microbatch: {self.learner.max_tokens_per_microbatch} is "
                f"less than data.max_prompt_length + data.max_response_length = {longest}: the "
                "longest response would fit into no micro-batch"
            )
        if self.checkpoint.resume == "auto" and self.run_name is None:
            yield (
                "checkpoint.resume: auto needs run_name, the name of the run to go on with: "
                "without one every start makes a run directory of its own"
            )
        if self.network.stall_timeout_s <= self.buffer.lease_timeout_s:
            yield (
                f"network.stall_timeout_s: {self.network.stall_timeout_s:g} is not more than "
                f"buffer.lease_timeout_s = {self.buffer.lease_timeout_s:g}: one slow group would "
                "end the run before it can pass to another generator"
            )
        if self.buffer.on_late == "reissue" and self.buffer.order == "fifo":
            yield (
                "buffer.on_late: reissue needs buffer.order=ready: in fifo a group that is "
                "generated anew is the first in line again, and would be waited for all the same"
            )
        if self.transport == "collective" and self.weights.dir is not None:
            yield (
                "weights.dir: weights.transport=collective uses no directory: leave it out, or set "
                "weights.transport=disk"
            )
        if self.weights.publish_every > self.max_staleness + 1:
            yield (
                f"weights.publish_every: {self.weights.publish_every} is more than max_staleness "
                f"+ 1 = {self.max_staleness + 1}: generators would wait for ever for weights that "
                "are new enough; publish more often or raise max_staleness"
            )
