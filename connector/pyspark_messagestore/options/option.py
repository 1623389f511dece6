"""An option: what users write, what it means, and where its value goes.

An option is one line of `SourceOptions` or `SinkOptions`: a field whose default is `option(...)`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from pyspark_messagestore.options.values import Kind

SOURCE, SINK = "source", "sink"
STREAMS, BATCHES = "streams", "batch reads"


@dataclass(frozen=True, slots=True)
class Option:
    """One option of one side.

    Parameters
    ----------
    name : str
        What users write, in any case.
    kind : Kind
        How its text is parsed, and what is allowed.
    default : str | None
        The default as text, or None.
    text : str
        What it means, for the documents: sentences.
    aliases : tuple of str
        Other names for it.
    shown : str
        How the documents show the default, if not as `default`.
    required : bool
        It must be given.
    only : str
        `STREAMS` or `BATCHES` if the other reads refuse it; empty if both have it.
    side : str
        "source" or "sink".
    field : str
        The attribute of `SourceOptions` or `SinkOptions`.
    """

    name: str
    kind: Kind
    default: str | None
    text: str
    aliases: tuple[str, ...] = ()
    shown: str = ""
    required: bool = False
    only: str = ""
    side: str = ""
    field: str = ""

    @property
    def parsed_default(self) -> Any:
        """The value that nobody gave."""
        return None if self.default is None else self.kind.parse(self.default)

    @property
    def meaning(self) -> str:
        """What the documents say: `text`, and which reads have it."""
        return f"{self.text} {self.only.capitalize()} only." if self.only else self.text

    @property
    def shown_default(self) -> str:
        """What the documents say about the default."""
        if self.required:
            return "required"
        return self.shown or (f"`{self.default}`" if self.default is not None else "none")


def option(
    name: str,
    kind: Kind,
    default: str | None,
    text: str,
    *,
    aliases: tuple[str, ...] = (),
    shown: str = "",
    required: bool = False,
    only: str = "",
) -> Any:
    """A field of `SourceOptions` or `SinkOptions` that is an option. The parameters are those of `Option`."""
    return dataclasses.field(metadata={"option": Option(name, kind, default, text, aliases, shown, required, only)})


def options_of(side: str, options: type[Any]) -> tuple[Option, ...]:
    """The options that a class declares, in the order of its fields; those that it inherits come last."""
    fields = sorted(dataclasses.fields(options), key=lambda field: field.name not in options.__annotations__)
    return tuple(dataclasses.replace(field.metadata["option"], side=side, field=field.name) for field in fields)
