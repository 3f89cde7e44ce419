"""How commands print: headings and rows, wrapped; colours on a terminal only (rich also heeds NO_COLOR)."""

from __future__ import annotations

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

#: Columns where the output is no terminal.
WIDTH = 110

STYLES = {"ok": "green", "fail": "bold red", "warn": "yellow", "skipped": "dim"}


class Console:
    """Prints to standard output."""

    def __init__(self) -> None:
        terminal = RichConsole()
        self._rich = terminal if terminal.is_terminal else RichConsole(width=WIDTH)

    def text(self, text: str) -> None:
        """A paragraph."""
        self._rich.print(Text(text))

    def heading(self, text: str) -> None:
        """A heading, with an empty line before it."""
        self._rich.print()
        self._rich.print(Text(text, style="bold"))

    def row(self, label: str, text: str, style: str = "") -> None:
        """A label and a text beside it, whose further lines are indented."""
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(width=14)
        grid.add_column(overflow="fold")
        grid.add_row(Text(f"  {label}", style=STYLES.get(style, "dim")), Text(text))
        self._rich.print(grid)
