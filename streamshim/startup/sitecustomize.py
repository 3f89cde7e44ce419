"""Stands in for the start-up file where that is not installed, as in a checkout.

`python -m streamshim run` puts this folder on PYTHONPATH. The `sitecustomize` that it hides is run after it, under its
own name.
"""

import importlib.machinery
import importlib.util
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


def _start() -> None:
    # The very package that this file belongs to, which need not be on the path, nor stay there.
    root = os.path.dirname(os.path.dirname(_here))
    sys.path.insert(0, root)
    try:
        from streamshim import boot
    finally:
        sys.path.remove(root)
    boot.start()


def _run_the_hidden_one() -> None:
    others = [entry for entry in sys.path if os.path.abspath(entry) != _here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    _start()
finally:
    _run_the_hidden_one()
