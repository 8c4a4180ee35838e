"""Trains the looped GPT of model.py on token shards that prepare.py made.

    python train.py                                            # pydocs, minutes on a laptop
    torchrun train.py --n_loop=4                               # the same, started by torchrun
    torchrun --nproc_per_node=8 train.py --preset=small        # one node with 8 GPUs
    torchrun train.py --resume=auto                            # go on where the run stopped, or start
    python train.py --resume=auto --eval_only=True --tasks=all # score the model on the tasks of prepare.py

Writes out/ckpt.pt (latest), out/best.pt (lowest validation loss) and out/log.csv (one row a step); out/eval.csv with
--eval_only=True, which leaves the others alone.
"""
import argparse
import csv
import glob
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

try:
    import fcntl
except ImportError:     # Windows
    fcntl = None

from model import GPT, GPTConfig, load_checkpoint, pick_device
from prepare import load_tokenizer, prepare_pydocs, read_shard, whole_file

TASKS = {}


# ---- settings -------------------------------------------------------------------------------------------------

def flag(default, help, **limits):
    """A field of Settings. Limits: choices=(...), least=x for value >= x, above=x for value > x."""
    return field(default=default, metadata=dict(help=help, **limits))


@dataclass
class Settings:
    """Every setting of a run; the fields are the flags. Raises ValueError for a value out of its limits."""
    preset: str = flag("tiny", "which defaults the other settings have", choices=("tiny", "small", "medium"))
    out_dir: str = flag("out", "folder for checkpoints and log.csv")
    resume: str = flag("False", "True goes on from the checkpoint in out_dir, auto if there is one",
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
    scaling: str = flag("deeploop", "residual scaling", choices=("deeploop", "deepnorm", "preln"))
    exponent: float | None = flag(None, "p of the residual scaling, in place of 1/2 (deeploop) or 1/4 (deepnorm)")
    # optimization
    max_steps: int = flag(1200, "steps of the whole run", least=1)
    learning_rate: float = flag(3e-3, "at its peak; a cosine takes it down to a tenth", above=0)
    warmup_steps: int = flag(300, "steps of linear warmup", least=0)
    weight_decay: float = flag(0.1, "AdamW's", least=0)
    grad_clip: float = flag(1.0, "longest gradient, in the 2-norm", above=0)
    # evaluation
    eval_interval: int = flag(200, "steps between evaluations, each with a checkpoint", least=1)
    eval_windows: int = flag(256, "validation sequences, evenly spaced and the same each time", least=1)
    log_interval: int = flag(20, "steps between progress lines", least=1)
    log_alignment: bool = flag(False, "at each evaluation, measure the visit alignment kappa")
    dry_run: bool = flag(False, "print what the run would be, and stop")
    eval_only: bool = flag(False, "evaluate the checkpoint in out_dir and leave it as it is")
    tasks: str = flag("", "with eval_only: downstream tasks, all or some with commas, of data/tasks/<task>.jsonl")
    num_fewshot: int = flag(0, "solved examples before each question of the tasks", choices=(0, 1))
    keep: int = flag(0, "older checkpoints to keep beside the latest", least=0)
    # machine
    device: str = flag("auto", "auto takes CUDA, else MPS, else the CPU", choices=("auto", "cuda", "mps", "cpu"))
    dtype: str = flag("auto", "of the matrix products; auto takes bfloat16 where it is fast",
                      choices=("auto", "float32", "bfloat16", "float16"))
    compile: str = flag("auto", "torch.compile for each block; auto on CUDA, and on a CPU for long runs", choices=("auto", "True", "False"))
    recompute: bool = flag(False, "recompute each visit in the backward pass: memory hardly grows with n_loop")

    def __post_init__(self):
        for f in fields(self):
            value, limits = getattr(self, f.name), f.metadata
            if "choices" in limits and value not in limits["choices"]:
                raise ValueError(f"{f.name}={value} is none of {', '.join(map(str, limits['choices']))}")
            if "least" in limits and not limits["least"] <= value < 2 ** 31:
                raise ValueError(f"{f.name}={value} is not a number from {limits['least']} to 2^31")
            if "above" in limits and not limits["above"] < value < math.inf:
                raise ValueError(f"{f.name}={value} is not a finite number above {limits['above']}")
        if self.eval_only and self.resume == "False":
            raise ValueError("eval_only=True evaluates the checkpoint that a run left; add --resume=True")
        if self.tasks and not self.eval_only:
            raise ValueError(f"tasks={self.tasks} are for a trained model; add --resume=True --eval_only=True")
        if self.num_fewshot and not self.tasks:
            raise ValueError(f"num_fewshot={self.num_fewshot} has no tasks to show examples of; add --tasks=all")


PAPER = dict(dataset="openwebtext", block_size=1024, max_steps=100_000, learning_rate=1e-3, warmup_steps=2000,
             eval_interval=1000, eval_windows=1920, log_interval=10)
PRESETS = {
    "tiny": {},
    # the paper's two models; 480 sequences a step either way
    "small": dict(PAPER, n_layer=12, n_head=6, n_embd=768, batch_size=15, grad_accum=32),
    "medium": dict(PAPER, n_layer=24, n_head=8, n_embd=1024, batch_size=10, grad_accum=48),
}
MODEL_FLAGS = ("block_size", "n_layer", "n_loop", "n_head", "n_embd", "scaling", "exponent")


def boolean(text):
    """The bool that text spells, True or False; anything else is a ValueError, which argparse reports."""
    if text not in ("True", "False"):
        raise ValueError
    return text == "True"


def configure(argv):
    """(settings, model, checkpoint) of the run that the flags ask for; the latter two are None for a fresh one.

    A flag wins over the checkpoint's settings, and those over the preset. Exits with one sentence on a bad flag, on
    a model flag that contradicts the checkpoint, and if there is no checkpoint where one is asked for.
    """
    parser = argparse.ArgumentParser(prog="train.py", usage=argparse.SUPPRESS, allow_abbrev=False,
                                     argument_default=argparse.SUPPRESS,
                                     description="Trains a looped GPT: [torchrun] train.py [--name=value ...]")
    for f in fields(Settings):
        kind = {bool: boolean, float | None: float}.get(f.type, f.type)
        others = "".join(f"; {name}: {preset[f.name]}" for name, preset in PRESETS.items() if f.name in preset)
        parser.add_argument("--" + f.name, type=kind, choices=f.metadata.get("choices"),
                            metavar=None if "choices" in f.metadata else kind.__name__,
                            help=f"{f.metadata['help']} (default: {f.default}{others})")
    given = vars(parser.parse_args(argv))
    try:
        settings = Settings(**(PRESETS[given.get("preset", "tiny")] | given))
        found = newest_checkpoint(settings.out_dir) if settings.resume != "False" else None
        if found is None:
            if settings.eval_only:
                raise ValueError(f"eval_only=True, but {settings.out_dir} holds no checkpoint; train one first")
            if settings.resume == "True":
                raise ValueError(f"resume=True, but {settings.out_dir} holds no checkpoint; --resume=auto would start")
            GPTConfig(**{name: getattr(settings, name) for name in MODEL_FLAGS})
            return settings, None, None
        model, checkpoint = found
        for name in ("preset", *MODEL_FLAGS):
            trained = checkpoint["settings"][name]
            if given.get(name, trained) != trained and not (settings.eval_only and name == "n_loop"):
                raise ValueError(f"{name}={given[name]} contradicts the checkpoint in {settings.out_dir}, which has "
                                 f"{name}={trained}; leave the flag out, or choose another --out_dir")
        here = dict(out_dir=settings.out_dir, resume=settings.resume)       # where the checkpoint lies now
        if settings.eval_only:
            here["compile"] = "False"       # batches of many lengths: each would be compiled anew
        resumed = Settings(**(checkpoint["settings"] | here | given))
        GPTConfig(**{name: getattr(resumed, name) for name in MODEL_FLAGS})
        model.n_loop = resumed.n_loop       # an evaluation may ask for another number of rounds
        return resumed, model, checkpoint
    except ValueError as error:
        parser.error(str(error))
    except (KeyError, TypeError):
        parser.error(f"the checkpoint in {settings.out_dir} has other settings than this version of train.py knows")


# ---- data -----------------------------------------------------------------------------------------------------

def open_split(dataset, split, block_size):
    """A split's shards, memory-mapped, and how many windows of block_size + 1 tokens start in each.

    Raises ValueError if there is no shard, a broken one, or no window at all.
    """
    paths = sorted(glob.glob(os.path.join("data", glob.escape(dataset), f"*{split}*.bin")))
    if not paths:
        raise ValueError(f"data/{dataset} has no shard *{split}*.bin; delete the folder and make it anew")
    shards = [read_shard(path) for path in paths]
    counts = np.array([max(0, len(shard) - block_size) for shard in shards], dtype=np.int64)
    if counts.sum() == 0:
        raise ValueError(f"the {split} split in data/{dataset} has at most {max(map(len, shards))} tokens in a row, and "
                         f"block_size={block_size} needs {block_size + 1}; give it more text or a smaller --block_size")
    return shards, counts


def read_windows(data, positions, block_size, vocab_size, device):
    """idx and targets, each (B, T) int64 on device, of the windows numbered positions (B,) in the split's order.

    Raises ValueError, naming the shard, for a token that is not below vocab_size.
    """
    shards, counts = data
    ends = counts.cumsum()
    which = np.searchsorted(ends, positions, side="right")
    starts = positions - (ends - counts)[which]
    rows = np.empty((len(positions), block_size + 1), dtype=np.uint16)                      # (B, T + 1)
    for w in np.unique(which):      # one read a shard
        rows[which == w] = shards[w][starts[which == w, None] + np.arange(block_size + 1)]
    if rows.max() >= vocab_size:
        raise ValueError(f"{shards[which[rows.max(axis=1).argmax()]].filename} holds token {rows.max()}, and the vocabulary "
                         f"ends at {vocab_size - 1}; the file is damaged, or meta.json beside it belongs to other shards")
    tokens = torch.from_numpy(rows.astype(np.int64))
    if device.type == "cuda":
        tokens = tokens.pin_memory()
    tokens = tokens.to(device, non_blocking=True)
    return tokens[:, :-1], tokens[:, 1:]


def load_meta(dataset):
    """The tokenizer's name and vocabulary size of data/<dataset>; raises ValueError if it is not prepared."""
    if dataset in ("", ".", "..", "tasks") or os.path.basename(dataset) != dataset:
        raise ValueError(f"dataset={dataset} is not the name of a folder of tokens under data/")
    path = os.path.join("data", dataset, "meta.json")
    try:
        with open(path, encoding="utf-8") as f:
            meta = json.load(f)
        if type(meta["vocab_size"]) is not int or meta["vocab_size"] < {"bytes": 256, "gpt2": 50257}[meta["tokenizer"]]:
            raise ValueError
        return meta["tokenizer"], meta["vocab_size"]
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist, so the dataset is missing or unfinished; make it with: "
                         f"python prepare.py --dataset={dataset} (and --input PATH for text of your own)") from None
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{path} does not name a tokenizer, bytes or gpt2, and a vocab_size that it fits; delete the "
                         f"folder and make it anew: python prepare.py --dataset={dataset}") from None


# ---- checkpoints ----------------------------------------------------------------------------------------------

def save(state, out_dir, best, keep):
    """Writes best.pt, if this is the best, and ckpt.pt; with keep also ckpt-<step>.pt, of which the latest keep + 1 stay.

    best.pt goes first: after a kill between the two, the run repeats the steps since ckpt.pt and finds its best again.
    """
    names = ["best.pt"] * best + [f"ckpt-{state['step']:08d}.pt"] * bool(keep) + ["ckpt.pt"]
    for name in names:
        with whole_file(os.path.join(out_dir, name)) as f:
            torch.save(state, f)
    if keep:
        for path in sorted(glob.glob(os.path.join(glob.escape(out_dir), "ckpt-*.pt")))[:-keep - 1]:
            os.remove(path)


def checkpoints(out_dir):
    """The paths of a run's checkpoints: ckpt.pt, then older ones by falling step, then best.pt; those that exist."""
    older = sorted(glob.glob(os.path.join(glob.escape(out_dir), "ckpt-*.pt")), reverse=True)
    paths = [os.path.join(out_dir, "ckpt.pt"), *older, os.path.join(out_dir, "best.pt")]
    return [path for path in paths if os.path.isfile(path)]


def newest_checkpoint(out_dir):
    """(model, checkpoint) from ckpt.pt or, if that is missing or broken, from the newest whole one beside it.

    None if there is none at all; raises ValueError, naming the first, if there are some and none is whole.
    """
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
    return max(whole, key=lambda found: found[1]["step"], default=None)


def lock(out_dir):
    """An open file that keeps other runs out of out_dir for as long as this process holds it, or None on Windows.

    Raises ValueError if another run is there. The system drops the lock with the process, however that ends.
    """
    if fcntl is None:
        return None
    file = open(os.path.join(out_dir, ".lock"), "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another run is writing to out_dir={out_dir}; let it end, or choose another") from None
    except OSError:         # a file system without locks
        pass
    return file


def set_aside(out_dir, say):
    """Moves an earlier run's files into out_dir/previous-<n>: a fresh run overwrites nothing."""
    files = checkpoints(out_dir)
    if files:
        files += glob.glob(os.path.join(glob.escape(out_dir), "log.csv"))
        files += glob.glob(os.path.join(glob.escape(out_dir), "eval.csv"))
        names = (os.path.join(out_dir, f"previous-{n}") for n in itertools.count(1))
        folder = next(name for name in names if not os.path.exists(name))
        os.makedirs(folder)
        for path in files:
            os.replace(path, os.path.join(folder, os.path.basename(path)))
        say(f"the run that {out_dir} held is now in {folder}")


# the last three at evaluations: ‖ΔF‖/‖F‖ of the step, kappa_R/R, and kappa of each block's attention and MLP in turn
LOG_COLUMNS = ("step", "train_loss", "val_loss", "lr", "grad_norm", "tokens_per_s", "seconds", "hidden_change",
               "alignment", "kappa")


def open_log(out_dir, step):
    """log.csv, open for appending the row of `step`: later rows, which a run that was cut off left, are dropped."""
    path, rows = os.path.join(out_dir, "log.csv"), []
    if step > 0 and os.path.isfile(path):
        with open(path, encoding="utf-8", errors="replace") as f:
            rows = [line.strip() for line in f if line.count(",") == len(LOG_COLUMNS) - 1
                    and re.match(r"[0-9]{1,15},", line) and int(line.split(",")[0]) < step]
    with whole_file(path) as f:
        f.write("".join(line + "\n" for line in [",".join(LOG_COLUMNS), *rows]).encode())
    return open(path, "a", newline="", encoding="utf-8")


# ---- downstream tasks -----------------------------------------------------------------------------------------

def encode_choice(tokenizer, context, choice, block_size):
    """(ids, n): context and choice as at most block_size + 1 tokens, of which the last n are the choice's.

    As lm-evaluation-harness has it: the two are encoded together, and the choice's tokens begin where those of the
    context, without white space at its end, would end. What does not fit is cut from the left.
    Raises ValueError for a choice that has no token of its own.
    """
    head = tokenizer.encode(context.rstrip())
    tail = tokenizer.encode(context + choice)[len(head):]
    if not tail:
        raise ValueError(f"{choice!r} melts into the last token of {context!r}")
    ids = ((head or tokenizer.start or tokenizer.encode("\n")) + tail)[-block_size - 1:]
    return ids, min(len(tail), len(ids) - 1)


def read_task(name, num_fewshot, tokenizer, block_size):
    """The questions of data/tasks/<name>.jsonl: ([(ids, n) of each choice, as from encode_choice], label) of each.

    With num_fewshot=1 the solved example stands before the context. Raises ValueError naming the file and its fault.
    """
    path, questions = os.path.join("data", "tasks", f"{name}.jsonl"), []
    make = "python prepare.py --dataset=tasks"
    if not re.fullmatch(r"\w[\w.-]*", name) or name not in TASKS and not os.path.isfile(path):
        raise ValueError(f"task {name!r} is none of {', '.join(TASKS)}, and there is no {path}")
    try:
        with open(path, encoding="utf-8") as f:
            lines = f.readlines()
        if name in TASKS:
            with open(os.path.join("data", "tasks", "meta.json"), encoding="utf-8") as f:
                count = json.load(f)["questions"][name]
            if len(lines) != count:
                raise ValueError(f"{path} has {len(lines)} of {count} questions; delete it and make it anew: {make}")
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename} does not exist, so the tasks are missing or unfinished; make them with: "
                         f"{make}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"{path} or the meta.json beside it is not what prepare.py wrote; delete both and make them "
                         f"anew: {make}") from None
    for number, line in enumerate(lines, 1):
        try:
            question = json.loads(line)
            context, choices, label = question["context"], question["choices"], question["label"]
            contexts = context if isinstance(context, list) else [context] * len(choices)
            example = question["example"] if num_fewshot else ""
            if type(label) is not int or not 0 <= label < len(choices) or len(contexts) != len(choices):
                raise ValueError(f"label {label!r} of {len(choices)} choices with {len(contexts)} contexts")
            questions.append(([encode_choice(tokenizer, example + context, choice, block_size)
                               for context, choice in zip(contexts, choices)], label))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}, is not a question with context, choices, label"
                             f"{' and example' * num_fewshot} ({type(error).__name__}: {error}); delete the file and "
                             f"make it anew: {make}") from None
    if not questions:
        raise ValueError(f"{path} is empty; delete it and make it anew: {make}")
    return questions


def read_tasks(s, tokenizer):
    """{name: questions} of the tasks that the settings ask for; errors as in read_task and load_tokenizer."""
    names = list(TASKS) if s.tasks == "all" else dict.fromkeys(s.tasks.split(",")) if s.tasks else []
    return {name: read_task(name, s.num_fewshot, load_tokenizer(tokenizer), s.block_size) for name in names}


@torch.no_grad()
def choice_scores(model, choices, device, autocast):
    """The sum (B,) of the log-probabilities, in nats, of the last n of the ids of each of B choices (ids, n)."""
    B, T = len(choices), max(len(ids) for ids, _ in choices) - 1
    idx = torch.zeros(B, T, dtype=torch.long)
    targets = torch.full((B, T), -1)
    for row, (ids, n) in enumerate(choices):
        idx[row, :len(ids) - 1] = torch.tensor(ids[:-1])
        targets[row, len(ids) - 1 - n:len(ids) - 1] = torch.tensor(ids[len(ids) - n:])
    idx, targets = idx.to(device), targets.to(device)
    scored = targets >= 0                                                       # (B, T); logits only where they count
    with autocast:
        logits = F.linear(model.hidden(idx)[scored], model.wte.weight)          # (all n together, V)
    losses = torch.zeros(B, T, device=device)
    losses[scored] = F.cross_entropy(logits.float(), targets[scored], reduction="none")
    return -losses.sum(1)


def score_tasks(tasks, model, batch_tokens, device, autocast, rank, world, say):
    """The score of every choice of all tasks, {name: questions}, as one list in their order; 0.0 for what another
    process scores. The longest choices go first, so that the time left is not too short, batch_tokens at a time."""
    choices = [choice for questions in tasks.values() for answers, _ in questions for choice in answers]
    order, batches = sorted(range(len(choices)), key=lambda i: -len(choices[i][0])), []
    while order:
        size = max(1, batch_tokens // len(choices[order[0]][0]))
        batches.append(order[:size])
        order = order[size:]
    batches = batches[rank::world]
    scores, done, work = [0.0] * len(choices), 0, sum(len(choices[i][0]) for batch in batches for i in batch)
    began = shown = time.perf_counter()
    for batch in batches:
        sums = choice_scores(model, [choices[i] for i in batch], device, autocast).tolist()
        for i, score in zip(batch, sums):
            scores[i] = score
            done += len(choices[i][0])
        now = time.perf_counter()
        if now - shown > 10:
            shown = now
            say(f"tasks {done / work:4.0%}  {clock((now - began) / done * (work - done))} left")
    return scores


def accuracies(tasks, scores):
    """(task, examples, accuracy, standard error) of each task, then of their mean; of equal scores the first wins.

    The error is the sample's standard deviation over the root of its size, and the mean takes tasks as independent.
    """
    rows, scores = [], iter(scores)
    for name, questions in tasks.items():
        right = 0
        for answers, label in questions:
            scored = [next(scores) for _ in answers]
            right += scored.index(max(scored)) == label
        n, p = len(questions), right / len(questions)
        rows.append((name, n, p, math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else math.nan))
    _, counts, means, errors = zip(*rows)
    return [*rows, ("mean", sum(counts), sum(means) / len(rows), math.hypot(*errors) / len(rows))]


EVAL_COLUMNS = ("task", "examples", "accuracy", "stderr", "num_fewshot", "step", "val_loss")


def report(tasks, rows, s, tokenizer, say):
    """Says the rows of accuracies as a table, and what to think of them."""
    say(f"{f'{s.num_fewshot}-shot':16}{'examples':>9}  accuracy")
    for name, n, accuracy, error in rows:
        say(f"{name:16}{n:9,}  {accuracy:.4f} ± {error:.4f}")
    full = sum(n == s.block_size for questions in tasks.values() for answers, _ in questions for _, n in answers)
    if full:
        say(f"{full:,} choices fill block_size={s.block_size} alone; context, and what they have more, are cut off")
    if tokenizer == "bytes":
        say("this model reads bytes: these numbers compare with nothing published")


def write_eval(out_dir, rows):
    """Writes eval.csv with rows of EVAL_COLUMNS. Raises OSError."""
    with whole_file(os.path.join(out_dir, "eval.csv")) as f:
        f.write("".join(",".join(map(str, row)) + "\n" for row in (EVAL_COLUMNS, *rows)).encode())


# ---- the run --------------------------------------------------------------------------------------------------

def learning_rate_at(step, s):
    """Linear warmup to s.learning_rate, then a cosine down to a tenth of it at s.max_steps."""
    if step < s.warmup_steps:
        return s.learning_rate * (step + 1) / s.warmup_steps
    done = (step - s.warmup_steps) / max(1, s.max_steps - s.warmup_steps)
    return s.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


def pick_dtype(name, device):
    """The name of the dtype of the matrix products on device; raises ValueError for what it lacks.

    auto is bfloat16 where the hardware multiplies it many times faster than float32: on GPUs from Ampere on, and on CPUs
    with matrix units (AMX).
    """
    if name == "float16" and device.type != "cuda":
        raise ValueError(f"dtype=float16 needs CUDA, where the loss can be scaled; on {device.type} take float32 or bfloat16")
    if name != "auto":
        return name
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability() >= (8, 0)
    else:
        fast = device.type == "cpu" and getattr(torch.cpu, "get_capabilities", dict)().get("amx_bf16", False)
    return "bfloat16" if fast else "float32"


def matmul_peak(device, dtype):
    """FLOP/s of this device in a plain matrix product of dtype, measured for about half a second."""
    n = 1024 if device.type == "cpu" else 8192
    a = torch.randn(n, n, device=device, dtype=dtype)
    best, end = math.inf, time.perf_counter() + 0.5
    while time.perf_counter() < end:
        began = time.perf_counter()
        (a @ a)[0, 0].item()        # .item() waits for the device
        best = min(best, time.perf_counter() - began)
    return 2 * n ** 3 / best


def describe(model):
    """The model in one line."""
    c = model.config
    return (f"{c.scaling}: K={c.n_layer} blocks, R={c.n_loop} rounds, N={c.n_unrolled} visits, alpha={c.alpha:.4g}, "
            f"beta={c.beta:.4g}; {model.num_params():,} parameters, {model.flops_per_token() / 1e6:,.1f} MFLOP per token")


def print_plan(s):
    """What the run of these settings would be; needs no data: without any, the vocabulary is the dataset's usual one."""
    try:
        vocab_size = load_meta(s.dataset)[1]
    except ValueError:
        vocab_size = 256 if s.dataset == "pydocs" else 50304
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size, **{name: getattr(s, name) for name in MODEL_FLAGS}))
    per_step = s.batch_size * s.grad_accum * s.block_size
    tokens = per_step * s.max_steps
    print(describe(model))
    print(f"{s.dataset}: {s.max_steps:,} steps of {per_step:,} tokens, {tokens:,} tokens, "
          f"{tokens * model.flops_per_token():.3g} FLOPs; checkpoints of {12 * model.num_params() / 1e6:,.0f} MB")


def clock(seconds):
    """Seconds as h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def compile_blocks(model, idx, targets, autocast):
    """Compiles each block by itself, so that the time it takes does not grow with n_loop, and tries it on one batch.

    Returns None or, with the blocks as they were, the reason why this machine cannot.
    """
    for block in model.blocks:
        block.compile()
    try:
        with autocast:
            loss = model(idx, targets)[1]
        loss.backward()
    except Exception as error:      # no C++ compiler, no Triton, a GPU too old for it: each has an exception of its own
        for block in model.blocks:
            block._compiled_call_impl = None        # what Module.compile sets; it has no public way back
        return f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        model.zero_grad(set_to_none=True)


def leave_group(status):
    """Ends this process, one of several, with that exit status; everything must have been written and flushed.

    Without Python's own way out, in which a thread of gloo that still lets go of a tensor aborts the process.
    """
    dist.barrier()      # the first process may still be saving; who leaves early takes the connection down
    dist.destroy_process_group()
    os._exit(status)


def main(argv=None):
    rank, local_rank, world = (int(os.environ.get(name, default)) for name, default in
                               (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))     # torchrun sets them
    s, model, checkpoint = configure(argv)
    if s.dry_run:
        return print_plan(s)

    def say(text):
        if rank == 0:
            try:
                print(text, flush=True)
            except OSError:     # a closed pipe or a full disk behind it: the run goes on without
                sys.stdout = open(os.devnull, "w")

    state = checkpoint or dict(step=0, best_val_loss=math.inf, seconds=0.0)
    try:
        device = pick_device(s.device, local_rank)
        s.dtype = pick_dtype(s.dtype, device)       # a choice that a resumed run keeps
        dtype = getattr(torch, s.dtype)
        if s.grad_accum % world and not s.eval_only:
            raise ValueError(f"grad_accum={s.grad_accum} micro-steps cannot be shared evenly by {world} processes")
        if world > 1:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        if rank == 0 and s.dataset == "pydocs" and not os.path.exists(os.path.join("data", "pydocs", "meta.json")):
            prepare_pydocs()
        if world > 1:
            dist.barrier()
        tokenizer, vocab_size = load_meta(s.dataset)
        if state.get("tokenizer", tokenizer) != tokenizer:
            raise ValueError(f"dataset={s.dataset} has {tokenizer} tokens; the checkpoint in {s.out_dir} was trained on "
                             f"{state['tokenizer']} tokens")
        if state["step"] > s.max_steps:
            raise ValueError(f"max_steps={s.max_steps} is less than the {state['step']} steps that the checkpoint in "
                             f"{s.out_dir} has done; raise it to train on")
        train_data, val_data = (open_split(s.dataset, split, s.block_size) for split in ("train", "val"))
        tasks = read_tasks(s, tokenizer)
        torch.manual_seed(s.seed)
        if model is None:
            model = GPT(GPTConfig(vocab_size, **{name: getattr(s, name) for name in MODEL_FLAGS}))
        if rank == 0 and not s.eval_only:
            try:
                os.makedirs(s.out_dir, exist_ok=True)
            except OSError as error:
                raise ValueError(f"out_dir={s.out_dir} cannot be made ({error.strerror}); choose another") from None
            held = lock(s.out_dir)      # to the end of this function
            for name in ("ckpt.pt", "best.pt", "log.csv"):
                if os.path.isdir(os.path.join(s.out_dir, name)):
                    raise ValueError(f"{s.out_dir}/{name} is a folder, where a file of the run belongs; move it away")
            # weights and two moments in float32: the latest, the best, the kept ones, and one being written
            files = 3 + bool(s.keep) * (s.keep + 1) - (len(checkpoints(s.out_dir)) if checkpoint else 0)
            need, free = max(1, files) * 12 * model.num_params(), shutil.disk_usage(s.out_dir).free
            if free < need:
                raise ValueError(f"out_dir={s.out_dir} has {free / 1e6:,.1f} MB of disk left, and checkpoints need "
                                 f"{need / 1e6:,.1f} MB; make room or choose another")
            if checkpoint is None:
                set_aside(s.out_dir, say)
            log_file = open_log(s.out_dir, state["step"])
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"train.py: {error}")

    def log(**row):
        if rank == 0:
            csv.DictWriter(log_file, LOG_COLUMNS, lineterminator="\n").writerow(row)
            log_file.flush()

    def read(data, positions):
        try:
            return read_windows(data, positions, s.block_size, model.config.vocab_size, device)
        except ValueError as error:
            sys.exit(f"train.py: {error}")

    # the model, its optimizer, and where the run stands
    torch.set_float32_matmul_precision("high" if device.type == "cuda" else "highest")      # TF32
    model.to(device).recompute = s.recompute
    optimizer = model.configure_optimizer(s.learning_rate, s.weight_decay)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    step, best_val_loss, seconds = state["step"], state["best_val_loss"], state["seconds"]
    if checkpoint is not None:      # its moments; learning rate and weight decay are the settings'
        optimizer.load_state_dict(dict(optimizer.state_dict(), state=checkpoint["optimizer"]))
        scaler.load_state_dict(checkpoint["scaler"])
    if not optimizer.defaults["fused"]:
        say(f"fused AdamW is left off: {device.type} has none")
    tokens_per_step = s.batch_size * s.grad_accum * s.block_size
    long = tokens_per_step * s.max_steps * model.flops_per_token() > 1e15       # an hour on a CPU, where compiling costs 20 s
    if s.compile == "True" or s.compile == "auto" and (device.type == "cuda" or device.type == "cpu" and long):
        trouble = compile_blocks(model, *read(train_data, np.zeros(s.batch_size, int)), autocast)
        if trouble:
            say(f"compile is left off: {trouble}")
    network = DistributedDataParallel(model) if world > 1 else model

    peak = world * matmul_peak(device, dtype)
    say(describe(model))
    say(f"{s.dataset}: {tokens_per_step:,} tokens per step on {world} x {device.type} in {s.dtype}, "
        f"matrix products at {peak / 1e9:,.0f} GFLOP/s; steps {step} to {s.max_steps}")

    def batches_of(step):
        """This process's micro-batches of a step; all processes together read the same windows, however many."""
        rng = np.random.default_rng((s.seed, step))
        positions = rng.integers(train_data[1].sum(), size=(s.grad_accum, s.batch_size))
        return [read(train_data, p) for p in positions[rank::world]]

    def total(*numbers):
        """The numbers, each summed over the processes."""
        if world > 1:
            numbers = torch.tensor(numbers, dtype=torch.float64, device=device)
            dist.all_reduce(numbers)
            numbers = numbers.tolist()
        return numbers

    @torch.no_grad()
    def evaluate():
        """Mean loss over the validation windows, in nats per token; None if a signal cuts it short."""
        windows = val_data[1].sum()
        positions = np.linspace(0, windows - 1, min(s.eval_windows, windows)).astype(np.int64)
        loss = 0.0
        for i in range(rank * s.batch_size, len(positions), world * s.batch_size):
            if stopped_by:
                break
            idx, targets = read(val_data, positions[i:i + s.batch_size])
            with autocast:
                loss += model(idx, targets)[1].item() * len(idx)
        loss, stopped = total(loss, len(stopped_by))
        return None if stopped else loss / len(positions)

    def save_checkpoint(best):
        if rank == 0:
            os.fsync(log_file.fileno())
            state = dict(step=step, model=model.state_dict(), optimizer=optimizer.state_dict()["state"],
                         scaler=scaler.state_dict(), config=asdict(model.config), settings=asdict(s), tokenizer=tokenizer,
                         best_val_loss=best_val_loss, seconds=seconds)
            try:
                save(state, s.out_dir, best, s.keep)
            except (OSError, RuntimeError) as error:    # torch turns a full disk into either
                reason = error if isinstance(error, OSError) else "is the disk full?"
                sys.exit(f"train.py: the checkpoint of step {step} could not be written ({reason}); those before it stay")

    def not_finite(found):
        sys.exit(f"train.py: step {step}: {found} at learning rate {learning_rate_at(step, s):.3g}; the step was not taken. "
                 f"Try a smaller --learning_rate or more --warmup_steps; checkpoints in {s.out_dir} stay")

    stopped_by = []     # the signal that asks to stop, once one has come; a second one ends the process at once

    if s.eval_only:
        val_loss = evaluate()
        say(f"step {step:6d}  validation loss {val_loss:.4f} nats per token")
        if tasks:
            scores = score_tasks(tasks, model, s.batch_size * s.block_size, device, autocast, rank, world, say)
            rows = accuracies(tasks, total(*scores))
            report(tasks, rows, s, tokenizer, say)
            if rank == 0:
                write_eval(s.out_dir, [(*row, s.num_fewshot, step, val_loss) for row in rows])
        if world > 1:
            leave_group(0)
        return

    def on_signal(number, frame):
        stopped_by.append(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)

    # the loop: row `step` of the log tells of the weights after `step` steps
    first, first_seconds, shown = step, seconds, (step, seconds)
    batches = batches_of(step)
    finished = stopped = False
    while not stopped:
        measured = {}       # what an evaluation adds to the row
        if step % s.eval_interval == 0 or step == s.max_steps:
            val_loss = evaluate()
            if val_loss is None:
                break
            if not math.isfinite(val_loss):
                not_finite(f"validation loss {val_loss}")
            best = val_loss < best_val_loss
            if best:
                best_val_loss = val_loss
            measured = dict(val_loss=val_loss)
            if s.log_alignment and rank == 0:
                kappa = model.visit_alignment(*batches[0]).flatten()            # (2 K,)
                measured["alignment"] = kappa.max().item() / model.n_loop
                measured["kappa"] = " ".join(f"{x:.4f}" for x in kappa.tolist())
            say(f"step {step:6d}  validation loss {val_loss:.4f} nats per token" + "  (best so far)" * best +
                (f"  kappa_R/R {measured['alignment']:.3f}" if "alignment" in measured else ""))
            save_checkpoint(best)
        if step == s.max_steps:
            log(step=step, seconds=f"{seconds:.3f}", **measured)
            finished = True
            break

        if measured and rank == 0:
            with torch.no_grad():
                probe = batches[0][0]
                before = model.hidden(probe)                                    # (B, T, d), float32

        step_began = time.perf_counter()
        lr = learning_rate_at(step, s)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = 0.0
        for i, (idx, targets) in enumerate(batches):
            more = i + 1 < len(batches)
            with network.no_sync() if more and world > 1 else nullcontext():    # gradients meet once a step
                with autocast:
                    micro_loss = network(idx, targets)[1] / len(batches)
                scaler.scale(micro_loss).backward()
            loss += micro_loss.detach()
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip)
        batches = batches_of(step + 1)                                          # while the device computes
        loss, stopped = total(loss.item(), len(stopped_by))
        loss, grad_norm = loss / world, grad_norm.item()
        if not math.isfinite(loss) or not math.isfinite(grad_norm) and not scaler.is_enabled():
            not_finite(f"loss {loss}, gradient norm {grad_norm}")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

        took = time.perf_counter() - step_began
        seconds += took
        if measured and rank == 0:
            with torch.no_grad():
                measured["hidden_change"] = ((model.hidden(probe) - before).norm() / before.norm()).item()
        log(step=step, train_loss=loss, lr=lr, grad_norm=grad_norm, tokens_per_s=f"{tokens_per_step / took:.1f}",
            seconds=f"{seconds:.3f}", **measured)
        step += 1
        if step % s.log_interval == 0 or step == first + 1:
            speed = tokens_per_step * (step - shown[0]) / (seconds - shown[1])          # since the last such line
            shown = step, seconds
            left = (seconds - first_seconds) / (step - first) * (s.max_steps - step)
            say(f"step {step:6d}/{s.max_steps}  loss {loss:.4f}  lr {lr:.2e}  gradient {grad_norm:.2f}  "
                f"{speed:,.0f} tokens/s  {speed * model.flops_per_token() / peak:.0%} of peak  {clock(left)} left")

    if finished:
        say(f"done: python sample.py --out_dir={s.out_dir}")
    else:
        save_checkpoint(best=False)
        say(f"stopped by a signal at step {step} and saved; go on with --resume=auto")
    status = 0 if finished else 128 + (stopped_by or [signal.SIGTERM])[0]       # what follows && must not run on half a model
    if world > 1:
        leave_group(status)
    if status:
        sys.exit(status)


if __name__ == "__main__":
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")       # a folder's name need not fit the terminal's encoding
    try:
        main()
    except KeyboardInterrupt:       # before the loop, which has its own way to stop
        sys.exit(130)
    except OSError as error:        # the log's disk is full, a shard's disk is gone
        sys.exit(f"train.py: {error}")
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            print("train.py: another process of this run ended, and this one with it; go on with --resume=auto",
                  file=sys.stderr, flush=True)
            os._exit(1)     # as in leave_group
        if "allocate" not in str(error) and not isinstance(error, MemoryError):
            raise
        sys.exit("train.py: out of memory; try a smaller --batch_size (with more --grad_accum), --recompute=True, "
                 "or a smaller model")
