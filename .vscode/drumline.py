#!/usr/bin/env python3
"""Stands where launch.json has the path of torchrun: starts drumline, with the debugger of VS Code in every Python rank.

    "type": "debugpy", "request": "launch", "program": "${workspaceFolder}/.vscode/drumline.py",
    "args": ["run", "--nproc-per-node", "2", "train.py"]

drumline starts a rank by $PYTHON_EXEC, which is this file again: it becomes the interpreter, under the debugger.
Without a debugger it only starts drumline.
"""

import json
import os
import shutil
import subprocess
import sys

RANK = "DRUMLINE_DEBUGPY"  # set for ranks: how debugpy starts a script and a module


def under_debugger():
    """How debugpy itself starts a child of this process, up to the name of the script or module."""
    try:
        from _pydev_bundle.pydev_monkey import patch_args
    except ImportError:
        return None
    python = [sys.executable, "-Xfrozen_modules=off", "-u"]
    ways = {"script": patch_args(python + ["NAME"]), "module": patch_args(python + ["-m", "NAME"])}
    return {name: words[: words.index("NAME")] for name, words in ways.items()}


def become_rank(ways):
    words = [word for word in sys.argv[1:] if word != "-u"]
    way, own = ("module", words[1:]) if words[0] == "-m" else ("script", words)
    os.execv(ways[way][0], ways[way] + own)


def main():
    if RANK in os.environ:
        become_rank(json.loads(os.environ.pop(RANK)))
    built = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "target", "debug", "drumline")
    ways = under_debugger()
    if ways:
        os.environ.update({RANK: json.dumps(ways), "PYTHON_EXEC": os.path.abspath(__file__)})
    sys.exit(subprocess.call([shutil.which("drumline") or built] + sys.argv[1:]))


if __name__ == "__main__":
    main()
