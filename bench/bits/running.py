"""Runs a case in a folder of its own, and reads what it left."""
import glob
import os
import shutil
import signal
import subprocess
import time

import grid
import reading

CONFIGS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "config")
LONGEST_S = 300
# Long enough that a signal comes within the step.
ASLEEP = "4s"
PROMPTS = ["Ada had a ", "Tom"]


class Failed(Exception):
    """A command that ended otherwise than it should."""


class Runner:
    def __init__(self, programs, device, work):
        self.drumline = os.path.join(os.path.abspath(programs), "drumline")
        self.device = device
        self.work = work
        # One thread a rank: sums are made in one order. cuBLAS repeats only with a workspace of fixed size.
        self.env = {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

    def start(self, folder, words):
        log = open(os.path.join(folder, "said.txt"), "wb")
        with log:
            return subprocess.Popen([self.drumline, *words], cwd=folder, env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def wait(self, process, folder, words, expected):
        try:
            code = process.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            end(process)
            raise Failed(f"no end within {LONGEST_S} s of drumline {' '.join(words)}") from None
        said = read_text(os.path.join(folder, "said.txt"))
        if expected is not None and code != expected:
            raise Failed(f"exit code {code} of drumline {' '.join(words)}\n{said[-1500:]}")
        return said

    def call(self, folder, words, expected=0):
        """All that the command said; `expected` None takes any exit code."""
        return self.wait(self.start(folder, words), folder, words, expected)

    def output(self, folder, words):
        """What the command wrote to stdout alone."""
        try:
            ended = subprocess.run([self.drumline, *words], cwd=folder, env=self.env, capture_output=True, timeout=LONGEST_S, check=False)
        except subprocess.TimeoutExpired:
            raise Failed(f"no end within {LONGEST_S} s of drumline {' '.join(words)}") from None
        if ended.returncode != 0:
            raise Failed(f"exit code {ended.returncode} of drumline {' '.join(words)}\n{ended.stderr.decode(errors='replace')[-1500:]}")
        return ended.stdout

    def data(self, program, size):
        """The folder of a data set, which is made once."""
        kind = "texts" if program in (grid.CLASSIFY, grid.TAG) else program.name
        folder = os.path.join(self.work, f"data-{kind}-{size}")
        if not os.path.isdir(folder):
            os.makedirs(folder)
            for command in grid.data_commands(program, size):
                self.call(folder, ["data", *command.split()])
        return os.path.join(folder, "data")

    def job(self, case, command, flags=()):
        """The words of a command with a configuration; flags come before the pairs."""
        config = os.path.abspath(os.path.join(CONFIGS, case.program.config))
        return [command, "--nproc-per-node", str(case.ranks), *flags, "--device", self.device, "--cfg", config, *case.words()]

    def record(self, case):
        folder = os.path.join(self.work, case.name)
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        data = self.data(case.program, case.size)
        os.symlink(data, os.path.join(folder, "data"))
        began = time.monotonic()
        found = {"program": case.program.name, "ranks": case.ranks, "precision": case.precision, "options": case.options}
        found["data"] = reading.folder_hash(data)
        if case.interrupted_by:
            found["interrupted"] = self.interrupt(case, folder)
        found["notes"] = notes(self.call(folder, self.job(case, "train")))
        found.update(self.left(case, folder))
        found["seconds"] = round(time.monotonic() - began, 1)
        shutil.rmtree(folder)
        return found

    def interrupt(self, case, folder):
        """Trains up to the middle of an epoch; what it says of that, and after which step the last checkpoint is."""
        step = case.program.resume_step + (1 if case.interrupted_by == "exit" else 0)
        if case.interrupted_by == "exit":
            words = self.job(case, "train", ["--fault", f"rank=0,step={step},exit=3"])
            said = self.call(folder, words, expected=1)
            if "exit code 3" not in said:
                raise Failed(f"the fault did not end the run\n{said[-1500:]}")
        else:
            fault = f"rank=0,step={step},sleep={ASLEEP}"
            words = self.job(case, "train", ["--fault", fault])
            process = self.start(folder, words)
            wait_for(process, os.path.join(folder, "said.txt"), f"fault {fault}")
            process.send_signal(signal.SIGTERM)
            self.wait(process, folder, words, expected=None)
        latest = reading.last_checkpoint(os.path.join(folder, case.program.checkpoints), "latest")
        if latest is None:
            raise Failed("the interrupted run left no checkpoint")
        return {"by": case.interrupted_by, "in_step": step, "checkpoint": os.path.basename(latest)}

    def left(self, case, folder):
        program = case.program
        found = reading.events(os.path.join(folder, program.metrics))
        if not found["steps"]:
            raise Failed("the run has made no step")
        found["run"] = reading.run_event(os.path.join(folder, program.metrics))
        checkpoints = os.path.join(folder, program.checkpoints)
        found["weights"], found["rng"] = {}, {}
        for link in ("latest", "best"):
            place = reading.last_checkpoint(checkpoints, link)
            groups = reading.checkpoint(place) if place else {}
            found["rng"].update({f"{link} {name}": digest for name, digest in groups.pop("rng", {}).items()})
            for group, tensors in groups.items():
                found["weights"].update({f"{link} {group} {name}": digest for name, digest in tensors.items()})
        found["test"] = reading.test_figures(self.call(folder, self.test(case))) if program.has_test else None
        outputs = {}
        for pattern in program.files:
            for path in sorted(glob.glob(os.path.join(folder, program.out, pattern))):
                outputs[os.path.relpath(path, os.path.join(folder, program.out))] = reading.file_hash(path)
        found["outputs"] = {**outputs, **self.used(case, folder, found)}
        return found

    def test(self, case):
        """The last model of images, which older programs test without a flag, and the best of the others."""
        is_flag = case.program is grid.IMAGES and b"--last" in self.output(self.work, ["test", "--help"])
        words = self.job(case, "test", ["--last"] if is_flag else [])
        return [*words, "TEST.PREDICTIONS", "predictions.csv"] if case.program is grid.IMAGES else words

    def used(self, case, folder, found):
        """Files and texts that the trained model makes."""
        if case.program is grid.IMAGES:
            return {"predictions.csv": reading.file_hash(os.path.join(folder, "predictions.csv"))}
        if case.program is grid.TRANSLATION:
            words = f"translate --nproc-per-node {case.ranks} --device {self.device} --model exp/save --source data/translation/test.src"
            words += " --out translated.txt --reference data/translation/test.tgt --max-steps 12"
            found["test"] = reading.bleu(self.call(folder, words.split()))
            return {"translated.txt": reading.file_hash(os.path.join(folder, "translated.txt"))}
        if case.program is grid.GPT:
            common = ["generate", "--device", self.device, "--from", "exp", "--max-tokens", "60"]
            greedy = self.output(folder, [*common, "--greedy", *PROMPTS])
            drawn = self.output(folder, [*common, "--seed", "5", "--temperature", "0.8", "--top-k", "20", *PROMPTS])
            self.call(folder, ["export", "--from", "exp", "--out", "exported"])
            exported = reading.tensors(os.path.join(folder, "exported", "model.safetensors"))
            named = {f"exported {name}": digest for name, digest in exported.items()}
            return {"generated, greedy": reading.sha256(greedy), "generated, drawn": reading.sha256(drawn), **named}
        return {}


def read_text(path):
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def notes(said):
    """Lines on steps that were not recorded as graphs, for people: they are not compared."""
    return sorted({line.split("]: ")[-1].strip() for line in said.splitlines() if "CUDA graph" in line})


def end(process):
    """The launcher ends its ranks when it is asked to."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_for(process, path, words):
    until = time.monotonic() + LONGEST_S
    while words not in read_text(path):
        if process.poll() is not None or time.monotonic() > until:
            end(process)
            raise Failed(f"never said `{words}`\n{read_text(path)[-1500:]}")
        time.sleep(0.02)
