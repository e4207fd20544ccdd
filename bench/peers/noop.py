"""The same as `noop` of noop.c, as a Python script that imports nothing heavy."""

import os
import time

attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
print(f"noop rank {os.environ.get('RANK', '0')} attempt {attempt} begins at {time.monotonic_ns()}")
