"""The options of the source and the sink: their names, their meaning, and how a user's values are parsed.

To add an option, add a line to `SourceOptions` or `SinkOptions`. Everything else follows from it: what is parsed, what
is refused (with a did-you-mean), and the tables of connector/README.md (`make docs`).
`tests/connector/options/test_planted_options.py` then asks for a test that fails without it. Names are
case-insensitive, as everywhere in Spark.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from messagestore import ConfigError
from pyspark_messagestore.options.option import SINK, SOURCE, Option
from pyspark_messagestore.options.sink_options import SINK_OPTIONS, SinkOptions
from pyspark_messagestore.options.source_options import SOURCE_OPTIONS, SourceOptions

_DOING = {SOURCE: "reading", SINK: "writing"}

_SPARK_KEYS = frozenset(
    {
        "checkpointlocation",
        "path",
        "paths",
        "owner",
        "location",
        "provider",
        "comment",
        "external",
        "is_managed_location",
        "queryname",
    }
)
"""Keys that Spark itself adds to the options; only `path` has a meaning for the store."""
_SPARK_PREFIXES = ("option.", "spark.", "__")
_KAFKA_PREFIXES = ("kafka.", "kafkaconsumer.", "fetchoffset.", "groupidprefix")
"""The options of Spark's connector for Kafka that concern the client of a Kafka broker."""


OPTIONS = (*SOURCE_OPTIONS, *SINK_OPTIONS)


def _by_name(side: str) -> dict[str, Option]:
    return {
        name.lower(): option for option in OPTIONS if option.side == side for name in (option.name, *option.aliases)
    }


_NAMES = {side: _by_name(side) for side in (SOURCE, SINK)}


# ---- what the user gave


def check_names(options: Iterable[str]) -> None:
    """Refuse names that are options of neither the source nor the sink.

    Raises
    ------
    ConfigError
        For the first such name. The message suggests a similar option.
    """
    for key in options:
        if not _is_sparks(key) and all(key.lower() not in names for names in _NAMES.values()):
            raise _unknown(key, [option.name for option in OPTIONS])


def source_options(options: Mapping[str, str]) -> SourceOptions:
    """Parse the options of the source.

    Raises
    ------
    ConfigError
        For the first option that is missing, unknown or wrong, or does not go with another one.
    """
    parsed = SourceOptions(**_parsed(SOURCE, options))
    parsed.check()
    return parsed


def sink_options(options: Mapping[str, str]) -> SinkOptions:
    """Parse the options of the sink.

    Raises
    ------
    ConfigError
        For the first option that is missing, unknown or wrong.
    """
    parsed = SinkOptions(**_parsed(SINK, options))
    parsed.check_names(_NAMES[SINK][key.lower()].name for key in options if key.lower() in _NAMES[SINK])
    parsed.check()
    return parsed


def _parsed(side: str, options: Mapping[str, str]) -> dict[str, Any]:
    given_texts: dict[str, tuple[str, str]] = {}
    for key, value in options.items():
        option = _NAMES[side].get(key.lower())
        if option is None:
            if not _is_sparks(key):
                raise _misplaced(side, key)
            continue

        if option.name in given_texts and given_texts[option.name][1] != value:
            raise ConfigError(
                f"option {option.name}: found twice, as {given_texts[option.name][0]} and as {key}. Give one of them",
                key=option.name,
                value=value,
            )
        given_texts[option.name] = (key, value)

    for key, value in options.items():
        if key.lower() == "location":  # Spark's SQL passes the path of a table under this name
            given_texts.setdefault("path", (key, value))

    values: dict[str, Any] = {}
    for option in OPTIONS:
        if option.side == side:
            values[option.field] = _value(option, given_texts)
    return values


def _value(option: Option, given_texts: Mapping[str, tuple[str, str]]) -> Any:
    _key, text = given_texts.get(option.name, (option.name, option.default))
    if text is None:
        if option.required:
            also = f" (or {', '.join(option.aliases)})" if option.aliases else ""
            hint = _GIVE_A_PATH + ("" if given_texts else _NO_TABLE)
            raise ConfigError(f"option {option.name}{also}: is missing. {hint}", key=option.name, value=None)
        return None
    try:
        return option.kind.parse(text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError) and (error.key == option.name or error.key.startswith("MESSAGESTORE_")):
            raise  # its message says more than the one below, or it is about the environment and not about the option
        raise ConfigError(
            f"option {option.name}: found {text!r}; allowed is {option.kind.allowed}", key=option.name, value=text
        ) from None


_NO_TABLE = (
    ". Spark does not pass on the options of a CREATE TABLE: give them with each use, as in SELECT * FROM t WITH "
    "('path' = '/data/store', 'subscribe' = 'flights'), or create a TEMPORARY VIEW"
)
_GIVE_A_PATH = 'Give the store\'s root folder, as in .load("/data/store") or .start("/data/store")'


def _is_sparks(key: str) -> bool:
    return key.lower() in _SPARK_KEYS or key.lower().startswith(_SPARK_PREFIXES)


def _misplaced(side: str, key: str) -> ConfigError:
    other = SINK if side == SOURCE else SOURCE
    if key.lower() in _NAMES[other]:
        return ConfigError(
            f"option {key}: is for {_DOING[other]}, but this is {_DOING[side]}. Leave it out", key=key, value=None
        )
    return _unknown(key, [option.name for option in OPTIONS if option.side == side])


def _unknown(key: str, names: list[str]) -> ConfigError:
    if key.lower().startswith(_KAFKA_PREFIXES):
        return ConfigError(
            f"option {key}: is for a Kafka broker, but a message store is a folder; leave out all kafka.* options, "
            f"and kafkaConsumer.*, fetchOffset.* and groupIdPrefix with them. "
            f'Give the path, as in .load("/data/store") or .start("/data/store")',
            key=key,
            value=None,
        )

    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(key.lower(), list(by_lower), 1)
    hint = f"Did you mean {by_lower[near[0]]}?" if near else f"The options are {', '.join(sorted(by_lower.values()))}"
    return ConfigError(f"option {key}: no such option. {hint}", key=key, value=None)


# ---- the documents


def table(side: str) -> str:
    """The options of one side as a Markdown table."""
    lines = ["| Option | Default | Meaning |", "|---|---|---|"]
    for option in OPTIONS:
        if option.side == side:
            names = ", ".join(f"`{alias}`" for alias in option.aliases)
            meaning = option.meaning.replace("|", "\\|")
            lines.append(f"| `{option.name}`{f' ({names})' if names else ''} | {option.shown_default} | {meaning} |")
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """A document with the tables between its `<!-- options: side -->` and `<!-- end -->` marks renewed."""
    return re.sub(
        r"(<!-- options: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{table(match[2])}\n{match[3]}",
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    import sys
    from pathlib import Path

    readme = Path(sys.argv[1])
    readme.write_text(with_tables(readme.read_text(encoding="utf-8")), encoding="utf-8")
