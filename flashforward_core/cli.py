"""The command line. A command's module is imported only when it is chosen, so ``simulate`` needs no torch."""

import argparse
import importlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

INTERRUPTED = 130  # what a shell reports for a program that ctrl-C ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One subcommand."""

    help: str
    """One line for ``--help``."""
    module: str
    """Module of this package that offers ``add_arguments(parser)`` and ``run(args) -> int``."""


COMMANDS = {
    "simulate": Command(
        help="predict forwards, rounds, seconds and memory of a rollout without running it", module=".commands.simulate"
    ),
    "render": Command(help="render a prompt to an mp4 with the embedded model", module=".commands.render"),
    "evaluate": Command(
        help="measure a video: flicker, seams, drift, motion, faithfulness", module=".commands.evaluate"
    ),
    "bench": Command(
        help="measure speed, memory, quality, training steps and policies, and keep the results as JSON",
        module=".commands.bench",
    ),
    "train": Command(help="train the embedded model or Wan 2.1, one step at a time", module=".train.command"),
}


def cache_folder() -> Path:
    """Return the user's cache folder for this project; it may not exist yet."""
    home = os.environ.get("LOCALAPPDATA") if sys.platform == "win32" else os.environ.get("XDG_CACHE_HOME")
    if home:
        return Path(home) / "flashforward"
    try:
        return Path.home() / ".cache" / "flashforward"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / "flashforward"


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a call, as the commands do."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options where they were given, so that the help named is that command's own."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def build_parser(chosen: str | None = None) -> argparse.ArgumentParser:
    """Return the parser; only the ``chosen`` command gets its own arguments."""
    parser = Parser(prog="flashforward_core", description="Long video from few-step diffusion.")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = parsers.add_parser(name, help=command.help, description=f"{command.help[0].upper()}{command.help[1:]}.")
        if name == chosen:
            module = importlib.import_module(command.module, __package__)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run, cache_folder=cache_folder())
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 2, and one line on stderr, for what the user can correct."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = words[0] if words and words[0] in COMMANDS else None
    try:
        args = build_parser(chosen).parse_args(words)
        status: int = args.run(args)
        print(end="", flush=True)  # so that a closed stdout shows here and not when Python ends
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == (__package__ or "").partition(".")[0]:
            raise  # ours: a bug
        return _complain(chosen, f"needs the Python package {error.name!r}; install this project with pip first")
    except KeyboardInterrupt as error:
        _complain(chosen, str(error) or "interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has enough of it, such as ``head``
        _discard_stdout()
        return 1
    except (ValueError, OSError) as error:
        return _complain(chosen, str(error))
    return status


def _discard_stdout() -> None:
    """Let what is still buffered go nowhere, so that Python does not complain about it at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _complain(command: str | None, message: str) -> int:
    print(f"flashforward_core {command}: {message}", file=sys.stderr)
    return 2
