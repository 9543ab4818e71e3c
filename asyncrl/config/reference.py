"""docs/configuration.md, made from the fields: `python -m asyncrl.config.reference`."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from asyncrl.config.fields import describe, field_type, is_section
from asyncrl.config.presets import PRESETS
from asyncrl.config.schema import Config, ReasoningGym, Section
from asyncrl.config.yaml_text import dump

_HEAD = """\
# Configuration

<!-- Made by `make docs` from asyncrl/config/schema.py; change it there. -->

A run is described by one YAML file; `key=value` on the command line wins over the file, and both
win over the preset that `algorithm` names:

    asyncrl-launch local configs/demo.yaml max_staleness=0 learner.optim.lr=1e-5 \\
        data.train_files.0.size=500 'sampling.stop=["\\n"]'

Values on the command line are YAML; numbers reach into lists. `1e-6` is a number, `on` and `yes`
are text. Unknown keys, wrong types and settings that would do nothing are refused, all at once,
each with its place. Relative paths of data files, of a reward file and of a model directory are
looked up in the working directory, then beside the configuration file. The run directory keeps
every value in `config.yaml`.
"""


def reference() -> str:
    """The whole page in Markdown."""
    parts = [_HEAD, _section("", Config), *_subsections("", Config)]
    parts += [_section("data.train_files[]", ReasoningGym), *map(_preset, PRESETS)]
    return "\n".join(parts)


def _subsections(prefix: str, section: type[Section]) -> Iterator[str]:
    for name, info in section.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            yield _section(f"{prefix}{name}", inner)
            yield from _subsections(f"{prefix}{name}.", inner)


def _section(name: str, section: type[Section]) -> str:
    title = f"## {name}" if name else "## Top level"
    about = " ".join((section.__doc__ or "").split())
    rows = [
        f"| `{key}` | {_cell(describe(field_type(info)))} | {_default(info)} | "
        f"{_cell(info.description or '')} |"
        for key, info in section.model_fields.items()
        if not is_section(info.annotation)
    ]
    table = ["| key | value | default | meaning |", "|---|---|---|---|", *rows] if rows else []
    return "\n".join([title, "", about, "", *table, ""])


def _preset(name: str) -> str:
    lines = dump(PRESETS[name]).rstrip().replace("\n", "\n    ")
    return f"## Preset {name}\n\n    {lines}\n"


def _default(info: FieldInfo) -> str:
    if info.default is PydanticUndefined:
        return "required"
    value = info.default
    if isinstance(value, Section):
        return "see there"
    text = dump(list(value) if isinstance(value, tuple) else value).strip().removesuffix("\n...")
    return f"`{text if not isinstance(value, tuple) else list(value)}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
