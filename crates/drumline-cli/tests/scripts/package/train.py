"""A module to be started with `-m package.train`: the same as environment.py, from inside a package."""

import json
import os
import sys

from . import SAID_BY_THE_PACKAGE

started = {"environment": dict(os.environ), "argv": sys.argv[1:], "name": __name__, "package": SAID_BY_THE_PACKAGE}
print(json.dumps(started))
