"""`python -m streamshim COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ._version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; without one, print the help.

    Args:
        arguments: the command line without the program's name; None: ``sys.argv``.

    Returns:
        The exit status. Wrong arguments end the process with 2, as argparse does it.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.print_help()
        return 0
    status: int = given.run(given)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m streamshim",
        description="Makes custom GPU kernels follow torch's current stream, also while a CUDA graph is captured.",
    )
    parser.add_argument("--version", action="version", version=f"streamshim {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="show a custom kernel that goes missing from a CUDA graph, and what streamshim does about it",
        description="A small language model with a custom kernel, decoded with CUDA graphs off, on, and on with "
        "streamshim. Uses the GPU and CuTe DSL, or a simulator where either is missing. Exits with 1 if anything is "
        "not as it should be.",
    )
    demo.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    demo.add_argument("--simulator", action="store_true", help="use the simulator also where there is a GPU")
    demo.set_defaults(run=_demo)
    return parser


def _demo(given: argparse.Namespace) -> int:
    # Only now, since it imports torch: help and mistakes are answered at once.
    from .demo import run

    return run(as_json=given.json, force_simulator=given.simulator)


if __name__ == "__main__":
    sys.exit(main())
