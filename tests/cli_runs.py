"""Runs the command line for tests: in this process, as a process of its own, and on a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import typer
from typer.testing import CliRunner, Result

from pyspark_messagestore.cli.main import app

TIMEOUT_S = 240


def run(*arguments: object, code: int = 0, given: bytes | str | None = None) -> Result:
    """Run a command in this process; it must end with this exit code."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=given)
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    assert "Traceback" not in result.output
    return result


def commands() -> dict[str, Any]:
    """All commands, by their words: `topics`, `topic`, `topic create`."""
    program: Any = typer.main.get_command(app)
    found = {}
    for name in program.list_commands(None):
        found[name] = program.get_command(None, name)
        found |= {f"{name} {word}": each for word, each in getattr(found[name], "commands", {}).items()}
    return found


def lines(result: Result) -> list[str]:
    return result.stdout.splitlines()


def objects(result: Result) -> list[dict[str, Any]]:
    return [json.loads(text) for text in lines(result)]


def error(*arguments: object, code: int) -> str:
    """The one line of a command that cannot be done."""
    result = run(*arguments, code=code)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith("messagestore: ")
    return result.stderr


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start a command as a process of its own."""
    command = [sys.executable, "-m", "pyspark_messagestore.cli.main", *(str(argument) for argument in arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **{"text": True, **options})


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """What a process wrote behind what `read_lines` has read, once it has ended.

    `communicate` reads past the buffer of a stream that was read by lines, which may hold the beginning of a line.
    """
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    ending = threading.Timer(TIMEOUT_S, process.kill)
    ending.start()
    try:
        with ThreadPoolExecutor(1) as pool:
            errors = pool.submit(lambda: process.stderr.read() if process.stderr is not None else "")
            stdout = process.stdout.read() if process.stdout is not None else ""
            stderr = errors.result()
        process.wait()
    finally:
        ending.cancel()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    assert process.returncode == code, (process.returncode, stderr)
    return stdout, stderr


def read_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    """The next lines of a process that goes on."""
    assert process.stdout is not None
    ending = threading.Timer(TIMEOUT_S, process.kill)
    ending.start()
    try:
        found = [process.stdout.readline() for _ in range(count)]
    finally:
        ending.cancel()
    assert all(found), process.poll()
    return found


def on_terminal(*arguments: object, code: int = 0, program: str | None = None, typed: str = "") -> str:
    """What a command, or another Python program, writes to a terminal, line ends of the terminal taken out.

    With `typed`, the terminal is its standard input, too.
    """
    ours, theirs = pty.openpty()
    start = ["-m", "pyspark_messagestore.cli.main"] if program is None else ["-c", program]
    command = [sys.executable, *start, *(str(argument) for argument in arguments)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    keys = theirs if typed else None
    process = subprocess.Popen(command, stdin=keys, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    os.write(ours, typed.encode())
    found = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not data:
            break
        found += data
    os.close(ours)
    assert process.wait(TIMEOUT_S) == code, found
    return found.decode().replace("\r\n", "\n")
