"""Trains the looped GPT of model.py on token shards that prepare.py made.

    python train.py                                            # pydocs, minutes on a laptop
    torchrun --nproc_per_node=8 train.py --preset=small        # one node with 8 GPUs
    torchrun train.py --resume=auto                            # go on where the run stopped, or start
    python train.py --resume=True --eval_only=True --tasks=hellaswag       # what lm_eval makes of the model

Writes out/ckpt.pt (latest), out/best.pt (lowest validation loss) and out/log.csv (one row a step); an evaluation leaves
them alone and appends to out/eval.csv. What a user can get wrong is a ValueError of one sentence, which main prints.
"""
import os
import signal

if __name__ == "__main__":      # Ctrl-C, also while torch is being imported; training has its own way to stop
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"interrupted\n"), os._exit(130)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")       # what its sockets would tell, we tell in one sentence

import argparse
import csv
import glob
import io
import itertools
import json
import math
import re
import shutil
import sys
import tempfile
import time
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.benchmark import Timer

from model import GPT, SCALINGS, GPTConfig, load_checkpoint, pick_device
from prepare import load_tokenizer, prepare_pydocs, read_shard, whole_file


# ---- settings -------------------------------------------------------------------------------------------------

def flag(default, help, **limits):
    """A field of Settings. Limits: choices=(...), or least=x for values from x on, 2^31 and infinity excluded."""
    return field(default=default, metadata=dict(help=help, **limits))


@dataclass
class Settings:
    """Every setting of a run; the fields are the flags."""
    preset: str = flag("tiny", "which defaults the other settings have", choices=("tiny", "small", "medium"))
    out_dir: str = flag("out", "folder for checkpoints and log.csv")
    resume: str = flag("False", "go on from out_dir's checkpoint; auto: if there is one",
                       choices=("False", "True", "auto"))
    seed: int = flag(1, "of the initial weights and of the batches", least=0)
    # data
    dataset: str = flag("pydocs", "a folder under data/, made by prepare.py")
    batch_size: int = flag(4, "sequences per process and micro-step", least=1)
    grad_accum: int = flag(2, "micro-steps per step, shared by all processes", least=1)
    # model; GPTConfig checks these
    block_size: int = flag(128, "context length in tokens")
    n_layer: int = flag(2, "K, physical blocks")
    n_loop: int = flag(4, "R, rounds over the blocks")
    n_head: int = flag(4, "attention heads")
    n_embd: int = flag(128, "width of the residual stream")
    scaling: str = flag("deeploop", f"residual scaling: {', '.join(SCALINGS)}")
    exponent: float | None = flag(None, "p of the residual scaling, in place of 1/2 (deeploop) or 1/4 (deepnorm)")
    # optimization
    max_steps: int = flag(1200, "steps of the whole run", least=1)
    learning_rate: float = flag(1.6e-2, "at its peak; a cosine takes it down to a tenth", least=1e-30)
    scale_lr: bool = flag(True, "each matrix's rate times its initial gain at R rounds over that at one")
    warmup_steps: int = flag(300, "steps of linear warmup", least=0)
    weight_decay: float = flag(0.1, "AdamW's", least=0)
    grad_clip: float = flag(1.0, "longest gradient, in the 2-norm", least=1e-30)
    # evaluation
    eval_interval: int = flag(200, "steps between evaluations, each with a checkpoint", least=1)
    eval_windows: int = flag(256, "validation sequences, evenly spaced and the same each time", least=1)
    log_interval: int = flag(20, "steps between progress lines", least=1)
    log_alignment: bool = flag(False, "at each evaluation, measure the visit alignment kappa")
    dry_run: bool = flag(False, "print what the run would be, and stop")
    eval_only: bool = flag(False, "evaluate the checkpoint in out_dir and leave it as it is")
    tasks: str = flag("", "with eval_only: tasks of lm_eval or of data/tasks/, with commas; paper: the paper's eight")
    num_fewshot: int = flag(0, "solved examples before each question of the tasks", least=0)
    keep: int = flag(0, "older checkpoints to keep beside the latest", least=0)
    # machine
    device: str = flag("auto", "auto takes CUDA, else MPS, else the CPU", choices=("auto", "cuda", "mps", "cpu"))
    dtype: str = flag("auto", "of the matrix products; auto takes bfloat16 where it is fast",
                      choices=("auto", "float32", "bfloat16", "float16"))
    compile: str = flag("auto", "torch.compile for each block; auto on CUDA, and on a CPU for long runs",
                        choices=("auto", "True", "False"))
    recompute: bool = flag(False, "recompute each visit in the backward pass: memory hardly grows with n_loop")
    timeout: int = flag(600, "seconds that one of several processes waits for the others", least=1)

    def __post_init__(self):
        for f in fields(self):
            value, least, end = getattr(self, f.name), f.metadata.get("least"), 2 ** 31 if f.type is int else math.inf
            if least is not None and not least <= value < end:
                raise ValueError(f"{f.name}={value} is not at least {least} and below {end}")
        if self.eval_only and self.resume == "False":
            raise ValueError("eval_only=True evaluates the checkpoint that a run left; add --resume=True")
        if self.tasks and not self.eval_only:
            raise ValueError(f"tasks={self.tasks} are for a trained model; add --resume=True --eval_only=True")
        if self.num_fewshot and not self.tasks:
            raise ValueError(f"num_fewshot={self.num_fewshot} has no tasks to show examples of; add --tasks=NAMES")

    @property
    def tokens_per_step(self):
        return self.batch_size * self.grad_accum * self.block_size

    def gpt_config(self, vocab_size=256):
        return GPTConfig(vocab_size, **{name: getattr(self, name) for name in MODEL_FLAGS})


PAPER = dict(dataset="openwebtext", block_size=1024, max_steps=100_000, learning_rate=1e-3, scale_lr=False,
             warmup_steps=2000, eval_interval=1000, eval_windows=1920, log_interval=10)
PRESETS = {
    "tiny": {},
    # the paper's two models; 480 sequences a step either way
    "small": dict(PAPER, n_layer=12, n_head=6, n_embd=768, batch_size=15, grad_accum=32),
    "medium": dict(PAPER, n_layer=24, n_head=8, n_embd=1024, batch_size=10, grad_accum=48),
}
MODEL_FLAGS = ("block_size", "n_layer", "n_loop", "n_head", "n_embd", "scaling", "exponent")


def boolean(text):
    """The bool that text spells; argparse reports the ValueError for what is neither."""
    return ("False", "True").index(text) == 1


def configure(argv):
    """(settings, model, checkpoint) of the run that the flags ask for; the latter two are None for a fresh one.

    A flag wins over the checkpoint's settings, and those over the preset.
    """
    parser = argparse.ArgumentParser(prog="train.py", usage=argparse.SUPPRESS, allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS,
                                     description="Trains a looped GPT: [torchrun] train.py [--name=value ...]")
    for f in fields(Settings):
        kind, choices = {bool: boolean, float | None: float}.get(f.type, f.type), f.metadata.get("choices")
        others = "".join(f"; {name}: {preset[f.name]}" for name, preset in PRESETS.items() if f.name in preset)
        parser.add_argument("--" + f.name, type=kind, choices=choices, metavar=None if choices else kind.__name__,
                            help=f"{f.metadata['help']} (default: {f.default}{others})")
    given = vars(parser.parse_args(argv))
    s = Settings(**(PRESETS[given.get("preset", "tiny")] | given))
    model, checkpoint = newest_checkpoint(s.out_dir) if s.resume != "False" else (None, None)
    if checkpoint:
        s = resumed(s, given, checkpoint["settings"])
        model.n_loop = s.n_loop         # an evaluation may ask for another number of rounds
    elif s.resume == "True" or s.eval_only:
        raise ValueError(f"resume={s.resume}, but {s.out_dir} holds no checkpoint; train a model there first")
    s.gpt_config()                      # raises for a shape that cannot be built
    return s, model, checkpoint


def resumed(s, given, trained):
    """The settings of a run that goes on, trained with those; none of the given flags may contradict them."""
    trained = {f.name: f.default for f in fields(Settings)} | {"scale_lr": False} | trained     # of a run before it
    for name in ("preset", "scale_lr", *MODEL_FLAGS):
        if given.get(name, trained[name]) != trained[name] and not (s.eval_only and name == "n_loop"):
            raise ValueError(f"{name}={given[name]} contradicts the checkpoint in {s.out_dir}, which has "
                             f"{name}={trained[name]}; leave the flag out, or choose another --out_dir")
    here = dict(out_dir=s.out_dir, resume=s.resume)         # where the checkpoint lies now
    if s.eval_only:
        here["compile"] = "False"       # batches of many lengths: each would be compiled anew
    try:
        return Settings(**(trained | here | given))
    except TypeError:
        raise ValueError(f"the checkpoint in {s.out_dir} has settings that this version of train.py lacks") from None


# ---- data -----------------------------------------------------------------------------------------------------

class Split:
    """The shards of a dataset's split, train or val, memory-mapped, as windows of block_size + 1 tokens."""

    def __init__(self, dataset, split, block_size, vocab_size):
        paths = sorted(glob.glob(os.path.join("data", glob.escape(dataset), f"*{split}*.bin")))
        if not paths:
            raise ValueError(f"data/{dataset} has no shard *{split}*.bin; delete the folder and make it anew")
        self.block_size, self.vocab_size = block_size, vocab_size
        self.shards = [read_shard(path) for path in paths]
        self.counts = np.array([max(0, len(shard) - block_size) for shard in self.shards], dtype=np.int64)
        self.windows = int(self.counts.sum())       # counts: that start in each shard; windows: in all
        if not self.windows:
            raise ValueError(f"the {split} split in data/{dataset} has at most {max(map(len, self.shards))} tokens in "
                             f"a row, and block_size={block_size} needs {block_size + 1}; give it more text or a "
                             "smaller --block_size")

    def read(self, positions, device):
        """idx and targets, each (B, T) int64 on device, of the windows numbered positions (B,) in the split's order."""
        ends = self.counts.cumsum()
        which = np.searchsorted(ends, positions, side="right")
        starts = positions - (ends - self.counts)[which]
        rows = np.stack([self.shards[w][i:i + self.block_size + 1] for w, i in zip(which, starts)])     # (B, T + 1)
        if rows.max() >= self.vocab_size:
            name = self.shards[which[rows.max(axis=1).argmax()]].filename
            sys.exit(f"train.py: {name} holds token {rows.max()}, and the vocabulary ends at {self.vocab_size - 1}; "
                     "the file is damaged, or meta.json beside it belongs to other shards")
        tokens = torch.from_numpy(rows.astype(np.int64))
        tokens = (tokens.pin_memory() if device.type == "cuda" else tokens).to(device, non_blocking=True)
        return tokens[:, :-1], tokens[:, 1:]


def load_meta(dataset):
    """The tokenizer's name and vocabulary size of data/<dataset>."""
    if dataset in ("", ".", "..", "tasks") or os.path.basename(dataset) != dataset:
        raise ValueError(f"dataset={dataset} is not the name of a folder of tokens under data/")
    path, anew = os.path.join("data", dataset, "meta.json"), f"make it: python prepare.py --dataset={dataset}"
    if not os.path.isfile(path):        # a pipe would be waited for
        raise ValueError(f"{path} is no file, so the dataset is missing or unfinished; {anew} (and --input PATH for "
                         "text of your own)")
    try:
        with open(path, encoding="utf-8") as f:
            meta = json.load(f)
        if type(meta["vocab_size"]) is int and meta["vocab_size"] >= dict(bytes=256, gpt2=50257)[meta["tokenizer"]]:
            return meta["tokenizer"], meta["vocab_size"]
    except (KeyError, TypeError, ValueError):
        pass
    raise ValueError(f"{path} does not name a tokenizer, bytes or gpt2, and a vocab_size that it fits; delete the "
                     f"folder and {anew}")


# ---- processes ------------------------------------------------------------------------------------------------

class Processes:
    """This process among those of its run, as torchrun's variables tell; one alone needs none."""

    def __init__(self, device, timeout):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR")
        given = {name: os.environ[name] for name in names if os.environ.get(name)}
        try:
            self.rank, local_rank, self.world, port = (
                int(given.get(name, default)) for name, default in zip(names, (0, 0, 1, 1)))
            told = self.world == 1 or len(given) == len(names)
            if not (told and 0 <= local_rank <= self.rank < self.world and 0 < port < 65536):
                raise ValueError
        except ValueError:
            told = ", ".join(f"{name}={given.get(name)}" for name in names)
            raise ValueError(f"the environment's {told} do not tell this process of several from the others; torchrun "
                             "sets them, or unset them") from None
        self.device = pick_device(device, local_rank)
        if self.world > 1:
            try:
                dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo",
                                        timeout=timedelta(seconds=timeout))
                self.total(0)
            except RuntimeError as error:
                raise ValueError(f"process {self.rank} of {self.world} did not meet the others within "
                                 f"timeout={timeout} seconds: {str(error).splitlines()[0][:99]}") from None

    def say(self, text):
        """Prints text, on the first process."""
        if self.rank == 0:
            try:
                print(text, flush=True)
            except OSError:     # a closed pipe or a full disk behind it: the run goes on without
                sys.stdout = open(os.devnull, "w")

    def total(self, *numbers):
        """The numbers, each summed over the processes."""
        if self.world > 1:
            numbers = torch.tensor(numbers, dtype=torch.float64, device=self.device)
            dist.all_reduce(numbers)
            numbers = numbers.tolist()
        return numbers

    def leave(self, status):
        """Ends the process; everything must have been written and flushed."""
        if self.world > 1:
            self.total(0)       # the first process may still be saving; who leaves early takes the connection down
            dist.destroy_process_group()
            os._exit(status)    # without Python's own way out, in which a thread of gloo may still abort the process
        if status:
            sys.exit(status)


# ---- the folder of a run --------------------------------------------------------------------------------------

# the last three at evaluations: ‖ΔF‖/‖F‖ of the step, kappa_R/R, and kappa of each block's attention and MLP in turn
LOG_COLUMNS = ("step", "train_loss", "val_loss", "lr", "grad_norm", "tokens_per_s", "seconds", "hidden_change",
               "alignment", "kappa")


def checkpoints(out_dir):
    """The paths of a run's checkpoints: ckpt.pt, then older ones by falling step, then best.pt; those that exist."""
    older = sorted(glob.glob(os.path.join(glob.escape(out_dir), "ckpt-*.pt")), reverse=True)
    paths = [os.path.join(out_dir, "ckpt.pt"), *older, os.path.join(out_dir, "best.pt")]
    return [path for path in paths if os.path.lexists(path)]


def newest_checkpoint(out_dir):
    """(model, checkpoint) from ckpt.pt or, if it is missing or broken, the newest whole one; (None, None) of none."""
    errors, whole = [], []
    for path in checkpoints(out_dir):
        try:
            whole.append(load_checkpoint(path))
        except ValueError as error:
            errors.append(error)
        if whole and path.endswith("ckpt.pt"):
            break
    if errors and not whole:
        raise errors[0]
    for error in errors:
        print(f"{error}; taking the newest whole one", file=sys.stderr)
    return max(whole, key=lambda found: found[1]["step"], default=(None, None))


def open_out_dir(s, num_params, step, say):
    """Readies out_dir: (log.csv, open for the row of `step`; the lock that keeps other runs out until this one ends).

    A fresh run moves an earlier one's files into previous-<n>.
    """
    try:
        os.makedirs(s.out_dir, exist_ok=True)
        lock = open(os.path.join(s.out_dir, ".lock"), "w")
    except OSError as error:
        raise ValueError(f"out_dir={s.out_dir} cannot be made ({error.strerror}); choose another") from None
    try:
        import fcntl
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another run is writing to out_dir={s.out_dir}; let it end, or choose another") from None
    except (ImportError, OSError):      # Windows; a file system without locks
        pass
    files = [os.path.join(s.out_dir, name) for name in ("ckpt.pt", "best.pt", "log.csv", "eval.csv")]
    for path in files:
        if os.path.lexists(path) and not os.path.isfile(path):
            raise ValueError(f"{path} is not a regular file, where one of the run belongs; move it away")
    old = checkpoints(s.out_dir)
    # weights and two moments in float32: the latest, the best, the kept ones, and one being written
    count = 3 + bool(s.keep) * (s.keep + 1) - len(old) * (s.resume != "False")
    need, free = max(1, count) * 12 * num_params, shutil.disk_usage(s.out_dir).free
    if free < need:
        raise ValueError(f"out_dir={s.out_dir} has {free / 1e6:,.1f} MB of disk left, and checkpoints need "
                         f"{need / 1e6:,.1f} MB; make room or choose another")
    if old and s.resume == "False":
        names = (os.path.join(s.out_dir, f"previous-{n}") for n in itertools.count(1))
        folder = next(itertools.filterfalse(os.path.exists, names))
        os.makedirs(folder)
        for path in {*old, *filter(os.path.isfile, files)}:
            shutil.move(path, folder)
        say(f"the run that {s.out_dir} held is now in {folder}")
    return open_log(s.out_dir, step), lock


def open_log(out_dir, step):
    """log.csv, open for appending the row of `step`: later rows, which a run that was cut off left, are dropped."""
    path = os.path.join(out_dir, "log.csv")
    with open(path, "a+", encoding="utf-8", errors="replace") as f:
        f.seek(0)
        rows = [line.strip() for line in f if line.count(",") == len(LOG_COLUMNS) - 1
                and re.match(r"[0-9]{1,15},", line) and int(line.split(",")[0]) < step]
    with whole_file(path) as f:
        f.write("".join(line + "\n" for line in [",".join(LOG_COLUMNS), *rows]).encode())
    return open(path, "a", buffering=1, newline="", encoding="utf-8")     # a row is out as soon as it is written


# ---- the run --------------------------------------------------------------------------------------------------

def pick_dtype(name, device):
    """The name of the dtype of the matrix products on device.

    auto is bfloat16 where it multiplies faster: on GPUs from Ampere on, and on CPUs with instructions for it.
    """
    if name == "float16" and device.type != "cuda":
        raise ValueError(f"dtype=float16 needs CUDA, where the loss can be scaled; on {device.type} take float32 or "
                         "bfloat16")
    cpu = getattr(torch.cpu, "get_capabilities", dict)()
    fast = {"cuda": lambda: torch.cuda.get_device_capability() >= (8, 0), "mps": lambda: False,
            "cpu": lambda: cpu.get("amx_bf16", False) or cpu.get("avx512_bf16", False)}
    return name if name != "auto" else "bfloat16" if fast[device.type]() else "float32"


def matmul_peak(device, dtype):
    """FLOP/s of this device in a plain matrix product of dtype, the best of half a second."""
    n = 1024 if device.type == "cpu" else 8192
    a = torch.randn(n, n, device=device, dtype=dtype)
    timer = Timer("(a @ a)[0, 0].item()", globals=dict(a=a), num_threads=torch.get_num_threads())   # .item() waits
    return 2 * n ** 3 / min(timer.blocked_autorange(min_run_time=0.5).times)


def describe(s, model):
    """A run in two lines: its model; its data and cost."""
    c, tokens = model.config, s.tokens_per_step * s.max_steps
    return (f"{c.scaling}: K={c.n_layer} blocks, R={c.n_loop} rounds, N={c.n_unrolled} visits, alpha={c.alpha:.4g}, "
            f"beta={c.beta:.4g}; {model.num_params():,} parameters, {model.flops_per_token() / 1e6:,.1f} MFLOP per "
            f"token\n{s.dataset}: {s.max_steps:,} steps of {s.tokens_per_step:,} tokens, {tokens:,} tokens, "
            f"{tokens * model.flops_per_token():.3g} FLOPs; checkpoints of {12 * model.num_params() / 1e6:,.0f} MB")


def learning_rate_at(step, s):
    """Linear warmup to s.learning_rate, then a cosine down to a tenth of it at s.max_steps."""
    if step < s.warmup_steps:
        return s.learning_rate * (step + 1) / s.warmup_steps
    done = (step - s.warmup_steps) / max(1, s.max_steps - s.warmup_steps)
    return s.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


class Run:
    """A run: built fresh or as a checkpoint left it, then taken step by step from its data to its checkpoints."""

    def __init__(self, s, model, checkpoint, processes):
        self.s, self.processes, self.device = s, processes, processes.device
        self.stopped_by, self.stopped = [], False       # signals that ask to stop; if one came to any process
        s.dtype = pick_dtype(s.dtype, self.device)      # a choice that a resumed run keeps
        if s.grad_accum % processes.world and not s.eval_only:
            raise ValueError(f"grad_accum={s.grad_accum} cannot be shared evenly by {processes.world} processes")
        if processes.rank == 0 and s.dataset == "pydocs" and not os.path.exists("data/pydocs/meta.json"):
            prepare_pydocs()
        processes.total(0)                              # the others wait for it
        self.tokenizer, vocab_size = load_meta(s.dataset)
        state = checkpoint or dict(step=0, best_val_loss=math.inf, seconds=0.0, tokenizer=self.tokenizer)
        if state["tokenizer"] != self.tokenizer:
            raise ValueError(f"dataset={s.dataset} has {self.tokenizer} tokens, and the checkpoint in {s.out_dir} was "
                             f"trained on {state['tokenizer']} tokens")
        if state["step"] > s.max_steps:
            raise ValueError(f"max_steps={s.max_steps} is less than the {state['step']} steps that the checkpoint in "
                             f"{s.out_dir} has done; raise it to train on")
        self.step, self.best_val_loss, self.seconds = state["step"], state["best_val_loss"], state["seconds"]
        torch.manual_seed(s.seed)
        self.model = model or GPT(s.gpt_config(vocab_size))
        self.train_data, self.val_data = (Split(s.dataset, split, s.block_size, self.model.config.vocab_size)
                                          for split in ("train", "val"))
        if processes.rank == 0 and not s.eval_only:
            self.log_file, self.lock = open_out_dir(s, self.model.num_params(), self.step, processes.say)
        torch.set_float32_matmul_precision("high" if self.device.type == "cuda" else "highest")      # TF32
        self.model.to(self.device).recompute = s.recompute
        self.optimizer = self.model.configure_optimizer(s.learning_rate, s.weight_decay, scale_lr=s.scale_lr)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=s.dtype == "float16")
        if checkpoint:          # its moments; learning rate and weight decay are the settings'
            self.optimizer.load_state_dict(dict(self.optimizer.state_dict(), state=checkpoint["optimizer"]))
            self.scaler.load_state_dict(checkpoint["scaler"])
        self.autocast = torch.autocast(self.device.type, getattr(torch, s.dtype), enabled=s.dtype != "float32")
        self.compile()
        self.network = DistributedDataParallel(self.model) if processes.world > 1 else self.model

    def compile(self):
        """Compiles each block by itself, so that its time does not grow with n_loop; says why where it cannot be."""
        s, kind, blocks = self.s, self.device.type, self.model.blocks
        long = s.tokens_per_step * s.max_steps * self.model.flops_per_token() > 1e15       # an hour on a CPU
        if s.compile == "False" or s.compile == "auto" and kind != "cuda" and not (kind == "cpu" and long):
            return
        for block in blocks:
            block.compile()
        try:
            with self.autocast:
                loss = self.model(*self.train_data.read(np.zeros(s.batch_size, int), self.device))[1]
            loss.backward()
        except Exception as error:  # no C++ compiler, no Triton, a GPU too old: each has an exception of its own
            for block in blocks:
                block._compiled_call_impl = None        # what Module.compile sets; it has no public way back
            self.processes.say(f"compile is left off: {f'{type(error).__name__}: {error}'.splitlines()[0]}")
        self.model.zero_grad(set_to_none=True)

    def batches(self, step):
        """This process's micro-batches of a step; all processes together read the same windows, however many."""
        rng = np.random.default_rng((self.s.seed, step))
        positions = rng.integers(self.train_data.windows, size=(self.s.grad_accum, self.s.batch_size))
        return [self.train_data.read(p, self.device) for p in positions[self.processes.rank::self.processes.world]]

    def train(self):
        """Steps to max_steps, or until SIGINT or SIGTERM: the exit status. A second signal ends the process at once."""
        def on_signal(number, frame):
            self.stopped_by.append(number)
            signal.signal(number, signal.SIG_DFL)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, on_signal)
        s, say, first_step, first_seconds = self.s, self.processes.say, self.step, self.seconds
        peak = self.processes.world * matmul_peak(self.device, getattr(torch, s.dtype))
        say(f"{describe(s, self.model)}\n{self.processes.world} x {self.device.type} in {s.dtype}, matrix products at "
            f"{peak / 1e9:,.0f} GFLOP/s; from step {self.step}")
        hidden, batches = torch.no_grad()(self.model.hidden), self.batches(self.step)
        while not self.stopped:
            due = self.step % s.eval_interval == 0 or self.step == s.max_steps
            row = dict(step=self.step) | (self.validate(batches[0]) if due else {})     # of the weights after that many
            if self.stopped or self.step == s.max_steps:
                break
            idx = batches[0][0]
            before = hidden(idx) if due else None
            began, lr = time.perf_counter(), learning_rate_at(self.step, s)
            loss, grad_norm, batches = self.take_step(batches, lr)
            took = time.perf_counter() - began
            self.seconds += took
            if due:
                row["hidden_change"] = ((hidden(idx) - before).norm() / before.norm()).item()
            self.log(**row, train_loss=loss, lr=lr, grad_norm=grad_norm, tokens_per_s=f"{s.tokens_per_step / took:.1f}")
            if self.step % s.log_interval == 0 or self.step == first_step + 1:
                speed = s.tokens_per_step * (self.step - first_step) / (self.seconds - first_seconds)
                left = timedelta(seconds=round(s.tokens_per_step * (s.max_steps - self.step) / speed))
                say(f"step {self.step:6d}/{s.max_steps}  loss {loss:.4f}  lr {lr:.2e}  gradient {grad_norm:.2f}  "
                    f"{speed:,.0f} tokens/s  {speed * self.model.flops_per_token() / peak:.0%} of peak  {left} left")
        if self.stopped:
            self.save()
            say(f"stopped by a signal at step {self.step} and saved; go on with --resume=auto")
            return 128 + (self.stopped_by or [signal.SIGTERM])[0]   # what follows && must not run on half a model
        self.log(**row)
        say(f"done: python sample.py --out_dir={s.out_dir}")
        return 0

    def take_step(self, batches, lr):
        """Forward, backward, clip, update: (loss in nats per token, the gradient's length, the next step's batches)."""
        loss, world = 0.0, self.processes.world
        for i, (idx, targets) in enumerate(batches):
            sync = i + 1 == len(batches) or world == 1                          # gradients meet once a step
            with nullcontext() if sync else self.network.no_sync():
                with self.autocast:
                    micro_loss = self.network(idx, targets)[1] / len(batches)
                self.scaler.scale(micro_loss).backward()
            loss += micro_loss.detach()
        self.scaler.unscale_(self.optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.s.grad_clip)
        batches = self.batches(self.step + 1)                                   # while the device computes
        loss, self.stopped = self.processes.total(loss.item() / world, len(self.stopped_by))
        grad_norm = grad_norm.item()
        if not math.isfinite(loss) or not math.isfinite(grad_norm) and not self.scaler.is_enabled():
            self.not_finite(f"loss {loss}, gradient norm {grad_norm}")
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss, grad_norm, batches

    def not_finite(self, found):
        sys.exit(f"train.py: step {self.step}: {found} at learning rate {learning_rate_at(self.step, self.s):.3g}; the "
                 "step was not taken. Try a smaller --learning_rate or more --warmup_steps; checkpoints in "
                 f"{self.s.out_dir} stay")

    def validate(self, batch):
        """Evaluates, tells and saves: what the log gets, or nothing if a signal came. Exits if not finite."""
        val_loss, told = self.evaluate(), ""
        if self.stopped:
            return {}
        if not math.isfinite(val_loss):
            self.not_finite(f"validation loss {val_loss}")
        best, row = val_loss < self.best_val_loss, dict(val_loss=val_loss)
        self.best_val_loss = min(val_loss, self.best_val_loss)
        if self.s.log_alignment and self.processes.rank == 0:
            kappa = self.model.visit_alignment(*batch).flatten()                # (2 K,)
            row |= dict(alignment=kappa.max().item() / self.model.n_loop, kappa=" ".join(f"{x:.4f}" for x in kappa))
            told = f"  kappa_R/R {row['alignment']:.3f}"
        self.processes.say(f"step {self.step:6d}  validation loss {val_loss:.4f} nats per token"
                           + "  (best so far)" * best + told)
        self.save(best)
        return row

    @torch.no_grad()
    def evaluate(self):
        """Mean loss over the validation windows, in nats per token; of no meaning if a signal cuts it short."""
        s, data, world = self.s, self.val_data, self.processes.world
        positions, loss = np.linspace(0, data.windows - 1, min(s.eval_windows, data.windows)).astype(np.int64), 0.0
        for i in range(self.processes.rank * s.batch_size, len(positions), world * s.batch_size):
            if self.stopped_by:
                break
            idx, targets = data.read(positions[i:i + s.batch_size], self.device)
            with self.autocast:
                loss += self.model(idx, targets)[1].item() * len(idx)
        loss, self.stopped = self.processes.total(loss, len(self.stopped_by))
        return loss / len(positions)

    def save(self, best=False):
        """Writes best.pt, if this is the best, and ckpt.pt; with --keep also ckpt-<step>.pt, of which keep + 1 stay."""
        if self.processes.rank:
            return
        s = self.s
        os.fsync(self.log_file.fileno())
        state = dict(step=self.step, model=self.model.state_dict(), optimizer=self.optimizer.state_dict()["state"],
                     scaler=self.scaler.state_dict(), config=asdict(self.model.config), settings=asdict(s),
                     tokenizer=self.tokenizer, best_val_loss=self.best_val_loss, seconds=self.seconds)
        try:    # best.pt first: after a kill between the two, the run repeats the steps since ckpt.pt, and finds it
            for name in ["best.pt"] * best + [f"ckpt-{self.step:08d}.pt"] * bool(s.keep) + ["ckpt.pt"]:
                with whole_file(os.path.join(s.out_dir, name)) as f:
                    torch.save(state, f)
        except (OSError, RuntimeError) as error:    # torch turns a full disk into either
            reason = error if isinstance(error, OSError) else "is the disk full?"
            sys.exit(f"train.py: the checkpoint of step {self.step} was not written ({reason}); those before it stay")
        if s.keep:
            for path in sorted(glob.glob(os.path.join(glob.escape(s.out_dir), "ckpt-*.pt")))[:-s.keep - 1]:
                os.remove(path)

    def log(self, **row):
        """Adds a row of LOG_COLUMNS to log.csv."""
        if self.processes.rank == 0:
            writer = csv.DictWriter(self.log_file, LOG_COLUMNS, lineterminator="\n")
            writer.writerow(row | dict(seconds=f"{self.seconds:.3f}"))


# ---- downstream tasks -----------------------------------------------------------------------------------------

PAPER_TASKS = ["arc_challenge", "arc_easy", "hellaswag", "openbookqa", "piqa", "sciq", "social_iqa", "winogrande"]
EVAL_COLUMNS = ("step", "n_loop", "num_fewshot", "task", "metric", "filter", "value", "stderr", "examples", "val_loss")


class Scorer:
    """A run's model as lm_eval asks it: the methods of its TemplateLM, of which ask_lm_eval makes a subclass.

    lm_eval sees one process: each of ours builds all requests, answers its share, and learns all answers.
    """
    # what stands before a text without context
    eot_token_id = property(lambda self: (self.encoding.start or self.encoding.encode("\n"))[0])

    def __init__(self, run):
        super().__init__()
        self.run, self.model, self.encoding = run, run.model, load_tokenizer(run.tokenizer)
        self.busy = False       # a fault while it is busy is the model's, not the task's

    def tok_encode(self, string, **options):
        return self.encoding.encode(string)

    def share(self, costs, answer):
        """All requests' answers; answer(numbers) gives those of a batch. costs: the tokens of each, the most first."""
        from tqdm import tqdm
        p, limit, batches = self.run.processes, self.run.s.batch_size * self.run.s.block_size, []
        order = sorted(range(len(costs)), key=lambda i: -costs[i])
        while order:
            n = max(1, limit // costs[order[0]])
            batches.append(order[:n])
            del order[:n]
        self.busy, found = True, []
        for batch in tqdm(batches[p.rank::p.world], "tasks", disable=p.rank > 0 or None, file=sys.__stderr__):
            found += zip(batch, answer(batch))
        parts = [found] * p.world
        if p.world > 1:
            dist.all_gather_object(parts, found)
        self.busy = False
        return [answer for _, answer in sorted(itertools.chain(*parts))]

    def _loglikelihood_tokens(self, requests, **options):
        """(log-probability in nats, whether greedy decoding gives just that) of each continuation of a context.

        The context is cut from the left to what fits; a continuation longer than block_size is scored piece by piece.
        """
        T, windows, sums = self.model.config.block_size, [], [(0.0, True)] * len(requests)
        for i, (_, context, continuation) in enumerate(requests):
            ids = (context or [self.eot_token_id]) + continuation
            for begin in range(len(ids) - len(continuation), len(ids), T):
                piece = ids[begin:begin + T]
                windows.append((i, (ids[:begin] + piece)[-T - 1:], len(piece)))
        scores = self.share([len(ids) for _, ids, _ in windows], lambda batch: self.score([windows[j] for j in batch]))
        for (i, _, _), (score, greedy) in zip(windows, scores):
            sums[i] = sums[i][0] + score, sums[i][1] and greedy
        return sums

    @torch.no_grad()
    def score(self, windows):
        """(log-probability, is it greedy) of the last n ids of each window (_, ids, n)."""
        rows, scores = [torch.tensor(ids, device=self.run.device) for _, ids, _ in windows], []
        idx = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)[:, :-1]                           # (B, T)
        with self.run.autocast:
            for x, ids, (_, _, n) in zip(self.model.hidden(idx), rows, windows):    # logits only where they count
                logits = F.linear(x[len(ids) - 1 - n:len(ids) - 1], self.model.wte.weight).float()         # (n, V)
                scores.append((-F.cross_entropy(logits, ids[-n:], reduction="sum").item(),
                               torch.equal(logits.argmax(-1), ids[-n:])))
        return scores

    def loglikelihood_rolling(self, requests, **options):
        """The log-probability of each whole text."""
        texts = [(None, [], self.tok_encode(request.args[0])) for request in requests]
        return [score for score, _ in self._loglikelihood_tokens(texts)]

    def generate_until(self, requests, **options):
        """What follows each prompt, up to the first of its stops."""
        from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

        def follow(i):
            prompt, options = requests[i].args[0], normalize_gen_kwargs(requests[i].args[1])
            idx = torch.tensor([self.tok_encode(prompt) or [self.eot_token_id]], device=self.run.device)    # (1, T)
            torch.manual_seed(i)        # a sample does not depend on which process draws it
            ids, text = [], ""
            for token in self.model.generate(idx, options["max_gen_toks"], options.get("temperature", 0.0),
                                             options.get("top_k") or None):
                ids.append(token.item())
                text = self.encoding.decode(ids).decode("utf-8", "replace")
                if ids[-1] in self.encoding.start or any(stop and stop in text for stop in options["until"]):
                    break
            return postprocess_generated_text(text, options["until"], None)

        return self.share([self.run.s.block_size] * len(requests), lambda batch: [follow(i) for i in batch])


def ask_lm_eval(run):
    """lm_eval's results on the tasks, on every process; those in data/tasks/ go before lm_eval's of the same name."""
    os.environ.setdefault("DISABLE_MULTIPROC", "1")     # for standard errors, lm_eval would start this program again
    run.processes.say(f"tasks {run.s.tasks}: lm_eval reads their data")
    names, own, quiet, lm = run.s.tasks.split(","), os.path.join("data", "tasks"), io.StringIO(), None
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(quiet), redirect_stderr(quiet):
        try:
            from lm_eval import simple_evaluate
            from lm_eval.api.model import TemplateLM
            from lm_eval.tasks import TaskManager
            with open(os.path.join(folder, "paper.yaml"), "w") as f:    # a group, for the mean over the paper's tasks
                json.dump(dict(group="paper", task=PAPER_TASKS,
                               aggregate_metric_list=[dict(metric="acc", weight_by_size=False)]), f)
            manager = TaskManager(include_path=[folder, own], include_defaults=False)
            if not set(names) <= set(manager.all_subtasks):     # to list its own thousands, lm_eval takes ten seconds
                manager = TaskManager(include_path=[folder, own])
            # what lm_eval cannot read, it does not list; asked for by its path, it comes with the reason
            paths = {name: os.path.join(own, f"{name}.yaml") for name in set(names) - set(manager.all_tasks)}
            lm = type("Adapter", (Scorer, TemplateLM), {})(run)
            return simple_evaluate(lm, tasks=[paths.get(name, name) for name in names], task_manager=manager,
                                   num_fewshot=run.s.num_fewshot, log_samples=False, bootstrap_iters=1000)
        except ImportError as error:
            sys.exit(f"train.py: tasks are read and scored by lm-evaluation-harness ({error}): pip install lm_eval")
        except Exception as error:      # a broken YAML, rows of another layout, no network: there is no end of kinds
            if lm and lm.busy:
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            sys.exit(f"train.py: tasks={run.s.tasks} cannot be evaluated: {reason}")


def evaluate_only(run):
    """Prints the validation loss and lm_eval's tables of the tasks, whose rows are appended to eval.csv."""
    results = ask_lm_eval(run) if run.s.tasks else None     # first, so that a misspelt name is told soon
    val_loss, say = run.evaluate(), run.processes.say
    say(f"step {run.step:6d}  validation loss {val_loss:.4f} nats per token")
    if results is None or run.processes.rank:
        return
    from lm_eval.utils import make_table
    for kind in filter(results.get, ("results", "groups")):
        say(make_table(results, kind))
    if run.tokenizer == "bytes":
        say("this model reads bytes: these numbers compare with nothing published")
    rows = [(run.step, run.model.n_loop, results["n-shot"].get(task), task, *key.split(","), value,
             found[key.replace(",", "_stderr,")], found["sample_len"], val_loss)
            for task, found in results["results"].items()
            for key, value in found.items() if "," in key and "_stderr," not in key]
    with open(os.path.join(run.s.out_dir, "eval.csv"), "a+", newline="", encoding="utf-8") as f:
        f.seek(0)
        header = [] if ",".join(EVAL_COLUMNS) in f.read() else [EVAL_COLUMNS]
        csv.writer(f, lineterminator="\n").writerows(header + rows)


# ---- the entry ------------------------------------------------------------------------------------------------

def dry_run(s):
    """Prints what the run would be; needs no data: without any, the vocabulary is the dataset's usual one."""
    try:
        vocab_size = load_meta(s.dataset)[1]
    except ValueError:
        vocab_size = 256 if s.dataset == "pydocs" else 50304
    with torch.device("meta"):
        print(describe(s, GPT(s.gpt_config(vocab_size))))


def main(argv=None):
    try:
        settings, model, checkpoint = configure(argv)
        if settings.dry_run:
            return dry_run(settings)
        run = Run(settings, model, checkpoint, Processes(settings.device, settings.timeout))
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"train.py: {error}")
    run.processes.leave((evaluate_only(run) or 0) if settings.eval_only else run.train())


if __name__ == "__main__":
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")       # a folder's name need not fit the terminal's encoding
    try:
        main()
    except OSError as error:        # the log's disk is full, a shard's disk is gone
        sys.exit(f"train.py: {error}")
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            print("train.py: another process of this run ended, and this one with it; go on with --resume=auto",
                  file=sys.stderr, flush=True)
            os._exit(1)     # as in Processes.leave
        if "allocate" not in str(error) and not isinstance(error, MemoryError):
            raise
        sys.exit("train.py: out of memory; try a smaller --batch_size (with more --grad_accum), --recompute=True, "
                 "or a smaller model")
