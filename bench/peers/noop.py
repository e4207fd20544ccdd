"""The same as `noop` of noop.c, as a Python script that imports nothing heavy."""

import os
import sys
import time

attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
# One write: under a launcher that does not keep lines whole, `print` mixes those of two ranks.
sys.stdout.write(f"noop rank {os.environ.get('RANK', '0')} attempt {attempt} begins at {time.monotonic_ns()}\n")
