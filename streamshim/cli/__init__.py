"""The command line: `streamshim COMMAND`, or `python -m streamshim COMMAND`.

Nothing of it is imported by `streamshim`, `boot`, the plugins or the launch path. Each command imports what it needs
only when it runs, so that help and mistakes are answered at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

import click

from .._version import __version__

# The functions of the commands are not named like the modules of this package, which become attributes of it.

MODES = click.Choice(["bind", "strict", "check"])


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="streamshim %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """Make custom GPU kernels follow torch's current stream, also while a CUDA graph is captured."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@main.command("demo")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--simulator", is_flag=True, help="Use the simulator also where there is a GPU.")
def demo_command(as_json: bool, simulator: bool) -> None:
    """Show a custom kernel that goes missing from a CUDA graph, and what streamshim does about it.

    A small language model with a custom kernel, decoded with CUDA graphs off, on, and on with streamshim. Uses the GPU
    and CuTe DSL, or a simulator where either is missing. Exits with 1 if anything is not as it should be.
    """
    from ..demo import run as tell

    click.get_current_context().exit(tell(as_json=as_json, force_simulator=simulator))


# Options after the program's name are the program's.
@main.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--mode", type=MODES, help="The mode; without it, what the environment says, or bind.")
@click.option("--watch/--no-watch", default=None, help="Watch captures below Python; without it, in strict and check.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, required=True, metavar="SCRIPT|-m MODULE [ARGS]...")
def run_command(mode: str | None, watch: bool | None, arguments: tuple[str, ...]) -> None:
    """Run a program with streamshim active in it, and in every Python process that it starts.

    SCRIPT or -m MODULE and what follows are given to Python as they are. The program's exit status is that of this
    command.
    """
    from .running import run_python

    run_python(mode, watch, arguments)


@main.command("status")
@click.option("--mode", type=MODES, help="The mode; without it, what the environment says, or bind.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def status_command(mode: str | None, as_json: bool) -> None:
    """Show what streamshim would bind in this environment, in which version, and what is off and why.

    Imports the libraries that are installed, in a process of its own. Inside a program, `print(streamshim.status())`
    says what is bound there.
    """
    from .survey import print_status

    click.get_current_context().exit(print_status(mode, as_json))


@main.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--gpu/--no-gpu", default=True, help="Try the self-tests on a GPU, if there is one.")
def doctor_command(as_json: bool, gpu: bool) -> None:
    """Check whether streamshim would work here, with the settings of this environment.

    Works without torch and without a GPU, and says what it could not look at. Exits with 1 if something that was asked
    for would not work.
    """
    from .doctor import examine

    click.get_current_context().exit(examine(as_json, gpu))


@main.command("explain")
@click.argument("log", type=click.File("r", errors="replace"), default="-")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of findings instead of text.")
def explain_command(log: TextIO, as_json: bool) -> None:
    """Read an error log and say what each capture error in it means, what causes it, and what to do.

    LOG is a file; standard input without it. Knows CUDA's capture errors, what torch, vLLM and SGLang make of them,
    and streamshim's own messages. Exits with 1 if it finds nothing that it knows.
    """
    from .explain import print_explanation

    click.get_current_context().exit(print_explanation(log, as_json))


@main.command("report")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def report_command(folder: Path, as_json: bool) -> None:
    """Merge the validation reports that the processes of a run have written.

    FOLDER is what STREAMSHIM_REPORT_DIR was set to. Exits with 1 if a validated kernel did not agree with its
    reference.
    """
    from .merging import print_reports

    click.get_current_context().exit(print_reports(folder, as_json))


@main.command("replay")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--kernel", metavar="MODULE:NAME", help="Call this with the saved inputs.")
@click.option("--reference", metavar="MODULE:NAME", help="Call this with the saved inputs.")
@click.option("--device", help="Where to call them; without it, the GPU if there is one.")
def replay_command(file: str, kernel: str | None, reference: str | None, device: str | None) -> None:
    """Look at the bad calls of a validated kernel again.

    FILE was written by save_samples() of a function made with streamshim.validate(..., keep=n). Without --kernel and
    --reference, the outputs that were saved are compared. Exits with 1 if they, or what the functions give now, differ.
    """
    from .replaying import replay_file

    click.get_current_context().exit(replay_file(file, kernel, reference, device))
