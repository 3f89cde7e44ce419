"""streamshim in processes that never call `install`: started by the start-up file, or by a plugin.

A start-up file runs in every process of an environment, pip and compile workers included. So `start` imports nothing
but `loading` and what Python has loaded already, and only puts a finder in place; `streamshim.install` runs when one of
`LIBRARIES` is imported for the first time, before the body of that library.
"""

import os
import sys
from _thread import RLock

TYPE_CHECKING = False  # as in typing, which takes longer to import than everything here
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

    from .installer import Installation

VARIABLE = "STREAMSHIM"
ON = ("1", "true", "yes", "on")
OFF = ("", "0", "false", "no", "off")
MODES = ("bind", "strict", "check")
ALLOWED = f"{', '.join(map(repr, (ON[0], *MODES, OFF[1])))}, or unset"
#: A process that imports none of these launches no kernel that streamshim could bind.
LIBRARIES = ("torch", "cutlass", "tvm_ffi", "cuda")
#: The exit status of a process that was asked to have streamshim, or else not to run.
EXIT_STATUS = 3

START_UP_FILE = "the start-up file"

#: Whether this process was asked to start streamshim when it began.
started = False


def start() -> None:
    """What the start-up file calls: get ready, if ``STREAMSHIM`` asks for it. May be called any number of times.

    Python 3.15 calls it twice in a virtual environment; `python -m streamshim run` may add a third time.
    """
    global started
    if started or os.environ.get(VARIABLE, "").lower() in OFF:
        return
    started = True
    from .loading import Finder, is_initializing

    if not any(name in sys.modules for name in LIBRARIES):
        os.register_at_fork(after_in_child=_in_child)
        sys.meta_path.insert(0, Finder(_is_library, _before_library, _after_library))
    elif "sitecustomize" not in sys.modules and is_initializing(sys.modules.get("site")):
        # An earlier start-up file has imported one. Python has more of them to read, which may add to sys.path, and
        # looks for this module when it has read all. (`site.addsitedir` reads such files too, and then looks for none.)
        sys.meta_path.insert(0, _AtTheEndOfSite())
    else:
        activate(START_UP_FILE)


def activate_by_default(by: str) -> None:
    """What an engine's plugin calls: `activate`, unless ``STREAMSHIM`` is 0."""
    if (os.environ.get(VARIABLE) or ON[0]).lower() not in OFF:
        activate(by)


def activate(by: str) -> "Installation | None":
    """Install as the environment says, unless the program has called `streamshim.install` itself before.

    Args:
        by: who asks, for messages and ``status()``; for instance "the vLLM plugin".

    Returns:
        The installation; None if there is none. Where the environment asks for strict mode, or cannot be understood,
        a failure ends the process with `EXIT_STATUS`, since plugin hosts swallow exceptions and an unshimmed strict
        run would look like a good one. Otherwise it is told on stderr, and the process goes on without streamshim.
    """
    try:
        from .installer import start

        return start(by)
    except Exception as error:  # noqa: BLE001, a broken environment can fail in any way, and none may break an import
        _tell(by, error)
    return None


def _tell(by: str, error: Exception) -> None:
    # A ValueError is a setting that cannot be understood: it may have meant strict.
    ends = isinstance(error, ValueError) or _asks_for_strict()
    what = f"this process (pid {os.getpid()}) ends" if ends else "it is not active in this process"
    text = f"streamshim: {by} could not start it, so {what}: {type(error).__name__}: {error}\n"
    for stream, last in ((sys.stderr, text), (sys.stdout, "")):
        try:
            stream.write(last)
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue  # the stream is None, or closed: there is nothing to write to
    if ends:
        # Not SystemExit, which threads ignore and callers can catch.
        os._exit(EXIT_STATUS)


def _asks_for_strict() -> bool:
    read = {name: os.environ.get(name, "").lower() for name in (VARIABLE, "STREAMSHIM_MODE", "STREAMSHIM_STRICT")}
    return "strict" in (read[VARIABLE], read["STREAMSHIM_MODE"]) or read["STREAMSHIM_STRICT"] not in OFF


_is_begun = _is_over = False
#: Held by the thread that installs, which may import another one of `LIBRARIES` meanwhile. No `fork.Lock`, since that
#: brings threading into every process.
_installing = RLock()


def _is_library(name: str) -> bool:
    # "cuda" has no body, so it is one of its modules then.
    return not _is_over and name.partition(".")[0] in LIBRARIES


def _before_library(name: str) -> None:
    """Another thread that imports one meanwhile waits here: nothing of it is to run before the installation is over."""
    global _is_begun, _is_over
    with _installing:
        if not _is_begun:
            _is_begun = True
            try:
                activate(START_UP_FILE)
            finally:
                _is_over = True


def _in_child() -> None:
    """The thread that installs, if there is one, is the parent's."""
    global _installing
    _installing = RLock()


def _after_library(name: str, module: "ModuleType") -> None:
    """It was in the middle of its import when hooks were registered for it."""
    imports = sys.modules.get(f"{__package__}.imports")
    if imports is not None:
        imports.after_import(name, module)


class _AtTheEndOfSite:
    """Installs when Python looks for ``sitecustomize``, which there need not be; there are no other threads then."""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> None:
        global _is_over
        if name == "sitecustomize" and not _is_over:
            _is_over = True
            activate(START_UP_FILE)
