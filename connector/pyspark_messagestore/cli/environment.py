"""What commands take from the environment where no argument says it: the store's root, and the form of the output.

    MESSAGESTORE_ROOT      where the store is. A command can then be typed without ROOT: `messagestore get TOPIC`
    MESSAGESTORE_OUTPUT    table or json, for commands that are given neither --table nor --json

An argument that is given counts. Where a command takes more arguments after ROOT, some of which may be left out, it is
not evident whether the first one is ROOT: it is, if it has a slash or a colon, as no topic has, or is `.` or `..`.
"""

from __future__ import annotations

import os
from typing import Any

from typer.core import TyperCommand

from messagestore import ConfigError, NotAStoreError, StoreError, StorePermissionError, StoreUnavailableError

ROOT, OUTPUT = "MESSAGESTORE_ROOT", "MESSAGESTORE_OUTPUT"
_FORMS = {"table": False, "json": True}


class Command(TyperCommand):
    """A command that looks at the environment for what was not given."""

    _root = ""
    """What it took as ROOT."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Complete the arguments before they are read, and the options afterwards."""
        if os.environ.get(ROOT) and self._left_out(ctx, args):
            self._root = os.environ[ROOT]
            if self._root.startswith("-"):
                raise ConfigError(
                    f"{ROOT}: found {self._root!r}; allowed is the path of a folder, or a URL. Correct or unset the "
                    "variable",
                    key=ROOT,
                    value=self._root,
                )
            args = [self._root, *args]
        rest = super().parse_args(ctx, args)

        form = os.environ.get(OUTPUT)
        source = ctx.get_parameter_source("as_json")
        # `metrics --json` is something else, and has no --table.
        if form and source is not None and source.name == "DEFAULT" and self._has("--table"):
            if form not in _FORMS:
                raise ConfigError(
                    f"{OUTPUT}: found {form!r}; allowed are {' and '.join(_FORMS)}. Correct or unset the variable, or "
                    "give --table or --json",
                    key=OUTPUT,
                    value=form,
                )
            ctx.params["as_json"] = _FORMS[form]
        return list(rest)

    def _has(self, option: str) -> bool:
        return any(option in param.secondary_opts for param in self.params)

    def _left_out(self, ctx: Any, args: list[str]) -> bool:
        """Whether the arguments have no ROOT, if the command begins with one."""
        arguments = [param for param in self.params if param.param_type_name == "argument"]
        if not arguments or arguments[0].name != "root":
            return False

        values, more, _ = self.make_parser(ctx).parse_args(list(args))
        given = list[str]()
        for argument in arguments:
            value = values.get(argument.name)
            given += [value] if isinstance(value, str) else [one for one in value or () if isinstance(one, str)]
        given += more

        least = sum(argument.required for argument in arguments[1:])
        most = float("inf") if any(argument.nargs < 0 for argument in arguments[1:]) else len(arguments) - 1
        if not least < len(given) <= most:
            return len(given) <= least
        first = given[0]
        if "/" in first or ":" in first or first in (".", ".."):
            return False
        if os.path.isdir(first):
            raise ConfigError(
                f"{first}: found a folder of this name here, and {ROOT} names the store {os.environ[ROOT]}. Write "
                f"./{first} for the folder. If it is no ROOT, write {os.environ[ROOT]} before it",
                key="ROOT",
                value=first,
            )
        return True

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error about its ROOT says where that came from."""
        try:
            return super().invoke(ctx)
        except StoreError as error:
            about_root = isinstance(error, (NotAStoreError, StorePermissionError, StoreUnavailableError))
            if self._root and (about_root or (isinstance(error, ConfigError) and error.key == "ROOT")):
                error.add_note(f"ROOT was not given, and is the value of {ROOT}. Correct the variable, or give ROOT")
            raise
