"""What is told through Python's logging, in the logger "streamshim".

logging brings traceback, string and more, and most processes are told nothing: it comes with the first message. These
have the arguments of the methods of `logging.Logger`.
"""

from __future__ import annotations

from typing import Any

NAME = "streamshim"


def debug(text: str, *args: Any, **options: Any) -> None:
    _say("debug", text, args, options)


def warning(text: str, *args: Any) -> None:
    _say("warning", text, args, {})


def error(text: str, *args: Any) -> None:
    _say("error", text, args, {})


def exception(text: str, *args: Any) -> None:
    """Inside an `except` block: the exception is told too."""
    _say("error", text, args, {"exc_info": True})


def _say(level: str, text: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    import logging

    # The line that a record names is the one that told it.
    getattr(logging.getLogger(NAME), level)(text, *args, stacklevel=3, **options)
