"""Prints, as one line of JSON, its environment, its arguments and how it was started. Needs no PyTorch."""

import json
import os
import sys

started = {"environment": dict(os.environ), "argv": sys.argv[1:], "name": __name__, "python": sys.executable}
print(json.dumps(started))
