"""The programs, their small data sets, and the grid of cases."""
import dataclasses

# How many samples there are: even sizes divide by 1, 2 and 3 ranks, uneven ones by none.
SIZES = {"even": (96, 24, 24), "uneven": (101, 23, 19)}


@dataclasses.dataclass(frozen=True)
class Program:
    """A kind of training. Paths are relative to the folder of a case."""

    name: str
    config: str  # under config/
    pairs: str  # what makes it small
    precision_key: str
    accumulate_key: str
    out: str  # OUT_DIR, or what holds metrics, checkpoints and files of a translation
    metrics: str
    checkpoints: str
    files: tuple = ()  # output files of the training, as globs under `out`
    has_test: bool = True
    uneven: str = ""  # pairs of the uneven cases, besides other data
    gpu: str = ""  # pairs of the cases on a GPU
    gpu_modes: tuple = ("eager", "graph")
    resume_step: int = 9  # the step that is interrupted, in the middle of an epoch


@dataclasses.dataclass(frozen=True)
class Case:
    program: Program
    ranks: int
    precision: str
    options: str = ""  # what is special, in one word or two
    pairs: str = ""
    size: str = "even"
    interrupted_by: str = ""  # "signal": a checkpoint is written; "exit": the last one is taken
    device: str = "cpu"

    @property
    def name(self):
        words = [self.program.name, str(self.ranks), self.precision, *self.options.split()]
        return "-".join(words if self.device == "cpu" else [self.device, *words])

    def words(self):
        """The KEY VALUE pairs of the command line."""
        program = self.program
        parts = [program.pairs, f"{program.precision_key} {self.precision}"]
        parts += [program.uneven] if self.size == "uneven" else []
        parts += [program.gpu] if self.device == "cuda" else []
        return " ".join([*parts, self.pairs]).split()


IMAGES = Program(
    name="images",
    config="cifar-resnet18.yaml",
    pairs="RNG_SEED 7 TRAIN.BATCH_SIZE 8 TEST.BATCH_SIZE 5 OPTIM.MAX_EPOCH 2 OPTIM.BASE_LR 0.003 TRAIN.TENSORBOARD False OUT_DIR exp",
    precision_key="PRECISION",
    accumulate_key="TRAIN.ACCUMULATE",
    out="exp",
    metrics="exp/metrics.jsonl",
    checkpoints="exp/checkpoints",
    gpu="CUDNN.DETERMINISTIC True CUDNN.BENCHMARK False",
)
TEXTS = (
    "RNG_SEED 7 TRAIN.BATCH_SIZE 8 TEST.BATCH_SIZE 5 OPTIM.MAX_EPOCH 2 OPTIM.GRAD_CLIP 1.0 MODEL.D_WORD_VEC 32 MODEL.D_HIDDEN 32"
    " MODEL.DROPOUT 0.1 TRAIN.TENSORBOARD False OUT_DIR exp"
)
CLASSIFY = Program(
    name="classify",
    config="text-classify.yaml",
    pairs=TEXTS,
    precision_key="PRECISION",
    accumulate_key="TRAIN.ACCUMULATE",
    out="exp",
    metrics="exp/metrics.jsonl",
    checkpoints="exp/checkpoints",
    files=("vocab.json", "labels.json"),
    # Texts of one length, so that steps can be recorded.
    gpu="MODEL.NET transformer MODEL.N_HEAD 4 MODEL.D_INNER_HID 64 TEXT.MAX_LEN 4",
)
TAG = dataclasses.replace(CLASSIFY, name="tag", config="text-tag.yaml", gpu="")
TRANSLATION = Program(
    name="translation",
    config="nmt.yaml",
    pairs="model_configs.n_layers 1 model_configs.n_head 2 model_configs.d_word_vec 32 model_configs.d_model 32 model_configs.d_inner_hid 64"
    " model_configs.dropout 0.1 optimizer_configs.scheduler_configs.warmup_steps 10 optimizer_configs.learning_rate 0.02 training_configs.max_epochs 4"
    " training_configs.buffer_size 48 training_configs.batching_key samples training_configs.batch_size 8 training_configs.disp_freq 2"
    " training_configs.save_freq 4 training_configs.loss_valid_freq 4 training_configs.bleu_valid_freq 8 training_configs.bleu_valid_warmup 0"
    " training_configs.bleu_valid_configs.max_steps 12 training_configs.bleu_valid_configs.beam_size 2"
    " run_configs.saveto exp/save run_configs.log_path exp/log run_configs.valid_path exp/valid",
    precision_key="run_configs.precision",
    accumulate_key="training_configs.update_cycle",
    out="exp",
    metrics="exp/log/metrics.jsonl",
    checkpoints="exp/save",
    files=("valid/*.txt", "save/*.json"),
    has_test=False,
    uneven="training_configs.batching_key tokens training_configs.batch_size 96",
    gpu_modes=("default",),
)
GPT = Program(
    name="gpt",
    config="gpt-tiny.yaml",
    pairs="RNG_SEED 7 MODEL.N_HEAD 2 MODEL.N_EMBD 32 MODEL.BLOCK 32 MODEL.DROPOUT 0.1 TRAIN.BATCH_SIZE 8 TEST.BATCH_SIZE 5 OPTIM.MAX_EPOCH 2"
    " TRAIN.TENSORBOARD False OUT_DIR exp",
    precision_key="PRECISION",
    accumulate_key="TRAIN.ACCUMULATE",
    out="exp",
    metrics="exp/metrics.jsonl",
    checkpoints="exp/checkpoints",
    uneven="TRAIN.BATCH_SIZE 7 TEST.BATCH_SIZE 4",
    # As GPUs like it; the loss is then one of our kernels.
    gpu="MODEL.VOCAB_MULTIPLE 64",
    resume_step=13,
)
PROGRAMS = (IMAGES, CLASSIFY, TAG, TRANSLATION, GPT)


def data_commands(program, size):
    """The commands behind `drumline data` that write the data set of a program into data/."""
    train, dev, test = SIZES[size]
    if program is IMAGES:
        return [f"synth-cifar --out data/cifar --train {train} --test {test} --seed 3"]
    if program in (CLASSIFY, TAG):
        return [f"synth-text --out data/text --train {train} --dev {dev} --test {test} --seed 3"]
    if program is TRANSLATION:
        return [f"synth-translation --out data/translation --train {train} --valid {dev} --test {test} --seed 3"]
    # Windows are what counts: some 200 bytes are a story.
    stories = f"synth-story --out data/story --train {train // 4} --valid {dev // 4} --seed 3"
    tokens = [f"tokens data/story/{name}.txt --out data/story/{name}.tokens" for name in ("train", "valid")]
    return [stories, *tokens]


def cpu_cases():
    for program in PROGRAMS:
        for ranks in (1, 2, 3):
            yield Case(program, ranks, "fp32")
        twice = f"{program.accumulate_key} 2"
        yield Case(program, 2, "fp32", "accumulate", twice)
        yield Case(program, 2, "fp32", "uneven", size="uneven")
        yield Case(program, 3, "fp32", "uneven accumulate", twice, size="uneven")
        yield Case(program, 2, "bf16")
        yield Case(program, 2, "bf16-master")
        yield Case(program, 2, "fp32", "resume", interrupted_by="signal")
    yield Case(IMAGES, 2, "fp32", "syncbn", "MODEL.SYNCBN True")
    transformer = "MODEL.NET transformer MODEL.N_LAYERS 2 MODEL.N_HEAD 4 MODEL.D_INNER_HID 64"
    yield Case(CLASSIFY, 2, "fp32", "transformer", transformer)
    yield Case(TAG, 2, "fp32", "transformer", transformer)
    average = "training_configs.moving_average_method ema training_configs.moving_average_alpha 0.1"
    yield Case(TRANSLATION, 2, "fp32", "ema", average)
    yield Case(GPT, 2, "fp32", "chunks", "MODEL.LOSS_CHUNKS 3 MODEL.VOCAB_MULTIPLE 64")
    # Only these two can save between the ends of epochs, so that a rank that is gone costs less than one.
    yield Case(TRANSLATION, 2, "fp32", "resume after exit", interrupted_by="exit")
    yield Case(GPT, 2, "fp32", "resume after exit", "TRAIN.SAVE_FREQ 4", interrupted_by="exit")


def cuda_cases():
    for program in PROGRAMS:
        for precision in ("fp32", "bf16", "bf16-master"):
            for mode in program.gpu_modes:
                pairs = {"eager": "CUDA_GRAPHS False", "graph": "CUDA_GRAPHS True", "default": ""}[mode]
                yield Case(program, 1, precision, mode, pairs, device="cuda")


def cases(device):
    return list(cpu_cases() if device == "cpu" else cuda_cases())


def uninterrupted(case):
    """The case whose end a resumed one must reach."""
    return Case(case.program, case.ranks, case.precision, device=case.device)
