"""Error files of workers, held against PyTorch 2.11: makes the golden ones and reads those of other programs.

    python bench/oracle/error_files.py write           # writes bench/oracle/error_files/*.json with torch's @record
    python bench/oracle/error_files.py read FILE…      # what torch's ProcessFailure makes of each file

The clock is held still and the paths of this machine are cut down, so that the files are the same everywhere.
"""

import json
import os
import pathlib
import sys
import sysconfig
import time

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, record

FOLDER = pathlib.Path(__file__).resolve().parent / "error_files"


def plain():
    raise ValueError("no such layer: 'Größe'")


def chained():
    try:
        {}["shard-3"]
    except KeyError as missing:
        raise RuntimeError("cannot load the data") from missing


def write_recorded(name, fails):
    path = FOLDER / name
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(path)
    time.time = lambda: 1_700_000_000.0
    try:
        record(fails)()
    except Exception:
        pass
    text = path.read_text().replace(sysconfig.get_paths()["purelib"], "site-packages")
    path.write_text(text.replace(str(pathlib.Path(__file__).resolve()), "train.py") + "\n")


def write_plain_message():
    message = {"message": "the scheduler took the node away", "timestamp": "1700000000"}
    (FOLDER / "plain_message.json").write_text(json.dumps(message) + "\n")


def read(path):
    failure = ProcessFailure(local_rank=0, pid=77, exitcode=1, error_file=path)
    print(json.dumps({"message": failure.message, "timestamp": failure.timestamp}, indent=2))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    if sys.argv[1:] == ["write"]:
        write_recorded("record.json", plain)
        write_recorded("record_chained.json", chained)
        write_plain_message()
    elif sys.argv[1:2] == ["read"] and len(sys.argv) > 2:
        for each in sys.argv[2:]:
            read(each)
    else:
        sys.exit(__doc__)
