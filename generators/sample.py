"""`python -P -m generators.sample CONFIG DIRECTORY`: responses to the run's own prompts, as files.

For `asyncrl-launch check`: the run's engine and temperature, no buffer and no rewards. Each group,
one response to one prompt, is a file in DIRECTORY for wire.decode_group.

Exit codes: 0 done; 2 something that the user can mend, in one message; 1 anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from itertools import count
from pathlib import Path

from asyncrl.config import Config
from asyncrl.config.load import load_resolved
from asyncrl.tasks.prompts import OverlongPrompt, PromptError
from asyncrl.tasks.rows import load_rows
from asyncrl.types import GroupId, Int32Array, RolloutGroup, Row, Sampling
from asyncrl.versions import sample_seed
from asyncrl.wire import encode_group
from generators.engine import Engine
from generators.environments import Policy
from generators.environments.single_turn import rollout
from generators.tokens import Tokens
from generators.vllm_engine import VllmEngine

log = logging.getLogger("generators")

NUM_PROMPTS = 64
"""Prompts of one round, spread over the data."""
MAX_RESPONSE = 256
"""Tokens of a response at most: many short ones say more than a few long ones."""
VERDICTS = 4
"""Times parity.min_tokens that are sampled."""


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m generators.sample", description=__doc__)
    parser.add_argument("config", type=Path, help="resolved configuration")
    parser.add_argument("directory", type=Path, help="where the groups go; it is there")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s sampler %(message)s")
    try:
        asyncio.run(_sample(load_resolved(arguments.config), arguments.directory))
    except (ValueError, PromptError) as error:
        print(f"generator: {error}", file=sys.stderr)
        return 2
    return 0


async def _sample(config: Config, directory: Path) -> None:
    tokens, engine = Tokens(config), VllmEngine(config)
    try:
        rows = _spread(load_rows(config).train)
        prompts = [(row, ids) for row in rows if (ids := await _render(tokens, row)) is not None]
        if not prompts:
            raise ValueError(f"none of {len(rows)} prompts fits data.max_prompt_length")
        await engine.start()
        num_tokens = 0
        for turn in count():
            groups = await sample_round(config, engine, prompts, turn, tokens.end_ids)
            for number, group in enumerate(groups, start=turn * len(prompts)):
                (directory / f"{number:06d}.group").write_bytes(encode_group(group))
            num_tokens += sum(group.num_response_tokens for group in groups)
            if num_tokens >= VERDICTS * config.parity.min_tokens:
                break
        log.info("%d tokens of %d prompts", num_tokens, len(prompts))
    finally:
        await engine.close()
        tokens.close()


def _spread(rows: list[Row]) -> list[Row]:
    return rows[:: max(1, len(rows) // NUM_PROMPTS)][:NUM_PROMPTS]


async def _render(tokens: Tokens, row: Row) -> Int32Array | None:
    """None for a prompt that the run would drop."""
    try:
        return await tokens.render(row)
    except OverlongPrompt:
        return None


async def sample_round(
    config: Config,
    engine: Engine,
    prompts: list[tuple[Row, Int32Array]],
    turn: int,
    end_ids: tuple[int, ...],
) -> list[RolloutGroup]:
    """One more response to each prompt."""
    sampling = Sampling(
        temperature=config.sampling.temperature,
        max_tokens=min(config.data.max_response_length, MAX_RESPONSE),
        stop_token_ids=end_ids,
        stop=tuple(config.sampling.stop),
    )

    async def one(position: int, row: Row, prompt_ids: Int32Array) -> RolloutGroup:
        seed = sample_seed(config.seed, "check", turn, position, 0, 0)
        name = f"{turn}-{position}"
        policy = Policy(
            prompt_ids, lambda ids: engine.generate(ids, sampling, seed=seed, request_id=name)
        )
        return RolloutGroup(
            id=GroupId(turn, position),
            attempt=0,
            source=str(row["source"]),
            prompt_ids=prompt_ids,
            temperature=sampling.temperature,
            inc=engine.serving.inc,
            rollouts=(await rollout(row, policy),),
        )

    return await asyncio.gather(*[one(n, row, ids) for n, (row, ids) in enumerate(prompts)])


if __name__ == "__main__":
    sys.exit(main())
