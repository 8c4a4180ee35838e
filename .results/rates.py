"""Which learning rate serves which residual scaling at how many rounds, and what moves first.

    python .results/rates.py [--jobs=2]     trains what is missing, the most telling first; stop and start it at will
    python .results/rates.py tables         prints the tables and charts of the rows so far, as markdown

A row of rates.csv is one training run. `plan` looks at the rows that are there and says what to train next.
"""
import argparse
import contextlib
import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
CSV = ROOT / ".results" / "rates.csv"
WORK = ROOT / "out-rates"       # the folders of runs in progress
sys.path.insert(0, str(ROOT))

import torch                                                            # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook     # noqa: E402
import prepare                                                          # noqa: E402
import train                                                            # noqa: E402
from model import GPT                                                   # noqa: E402

FLOOR = 3.1                     # nats per byte: a run that ends here or above knows how frequent bytes are, no more
RULES = {"preln": ["--scaling=preln"], "deepnorm": ["--scaling=deepnorm"], "deeploop": ["--scaling=deeploop"],
         "p=1/3": ["--scaling=deeploop", f"--exponent={1 / 3}"], "loop_preln": ["--scaling=loop_preln"]}
CONTROLS = {"": (), "blocks": ("qk", "beta"), "embedding": ("embedding",), "qk": ("qk",),
            "embedding and qk": ("embedding", "qk")}        # whose learning rate is multiplied by `factor`
PROBES = (25, 50, 75, 100, 150, 200, 300)                   # steps at which a run notes loss and movement
PARTS = ("embedding", "qk", "beta")


@dataclass(frozen=True)
class Run:
    """What tells one run from another. Seed 0: any seed."""
    rule: str
    scale_lr: bool
    n_loop: int
    learning_rate: float
    seed: int
    control: str = ""
    factor: float = 1.0
    n_embd: int = 64
    grad_accum: int = 1
    max_steps: int = 600
    warmup_steps: int = 150
    dataset: str = "pydocs"

    @property
    def tokens(self):
        return self.max_steps * self.grad_accum * 4 * 128

    def flags(self, out_dir):
        own = ("n_loop", "learning_rate", "seed", "n_embd", "grad_accum", "max_steps", "warmup_steps", "dataset")
        return [*RULES[self.rule], f"--scale_lr={self.scale_lr or self.control != ''}", f"--out_dir={out_dir}",
                f"--eval_interval={self.max_steps}", "--n_layer=2", "--n_head=4", "--block_size=128", "--batch_size=4",
                "--weight_decay=0.1", "--device=cpu", "--dtype=float32", "--compile=False",
                *(f"--{name}={getattr(self, name)}" for name in own)]

    def __str__(self):
        others = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)[4:]
                  if getattr(self, f.name) != f.default and (f.name, self.seed) != ("seed", 0)]
        return " ".join([self.rule, "scaled" * self.scale_lr or "plain", f"R={self.n_loop}",
                         f"at {self.learning_rate:g}", *others])


MEASURED = ["val_loss", "flops", "seconds", *(f"{what}_{step}" for step in PROBES for what in ("train_loss", *PARTS))]
COLUMNS = [*(f.name for f in fields(Run)), "commit", *MEASURED]


def read_rows():
    """{Run: what was measured}."""
    kinds = {bool: "True".__eq__, int: int, float: float, str: str}
    if not CSV.exists():
        return {}
    with open(CSV, newline="", encoding="utf-8") as f:
        return {Run(**{f.name: kinds[f.type](row[f.name]) for f in fields(Run)}):
                {name: float(row[name] or "nan") for name in MEASURED} for row in csv.DictReader(f)}


# ---- one run, in a process of its own ---------------------------------------------------------------------------

def part(name):
    return "embedding" if name.startswith("wte") else "qk" if ".qk." in name else "beta"


class Watch:
    """Gives the optimizer the rates of a run's control, and notes how far each part moves, ‖W - W0‖ / ‖W0‖."""

    def __init__(self, run):
        self.run, self.parent, self.steps, self.moved, self.start = run, os.getppid(), 0, {}, None
        self.rate_scales = GPT.rate_scales
        GPT.rate_scales = lambda model: self.controlled(model)
        register_optimizer_step_post_hook(self.after_step)

    def controlled(self, model):
        self.model = model
        self.start = self.start or {name: w.detach().clone() for name, w in model.named_parameters()}
        return [(name, w, (scale if self.run.scale_lr else 1.0) *
                 (self.run.factor if part(name) in CONTROLS[self.run.control] else 1.0))
                for name, w, scale in self.rate_scales(model)]

    @torch.no_grad()
    def after_step(self, *_):
        self.steps += 1
        if os.getppid() != self.parent:     # which was killed: nobody waits for this run
            os._exit(1)
        for kind in PARTS if self.steps in PROBES else ():
            pairs = [(w, self.start[name]) for name, w in self.model.named_parameters() if part(name) == kind]
            change = sum((w - w0).square().sum() for w, w0 in pairs) / sum(w0.square().sum() for _, w0 in pairs)
            self.moved[f"{kind}_{self.steps}"] = f"{change.sqrt().item():.4g}"


def measure(run):
    """Trains and returns the row; val_loss is nan if loss or gradient stopped being finite."""
    began, watch = time.monotonic(), Watch(run)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=WORK) as out_dir:
        try:
            with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
                train.main(run.flags(out_dir))
        except SystemExit as stop:
            if "the step was not taken" not in str(stop):
                raise
        with open(Path(out_dir) / "log.csv", newline="") as f:
            log = {int(row["step"]): row for row in csv.DictReader(f)}
    commit = subprocess.run(["git", "log", "-1", "--format=%h", "--", "model.py", "train.py"],
                            capture_output=True, text=True).stdout.strip()
    return dict(asdict(run), val_loss=log.get(run.max_steps, {}).get("val_loss") or "nan",
                flops=f"{watch.model.flops_per_token() * run.tokens:.4g}", seconds=f"{time.monotonic() - began:.1f}",
                commit=commit, **watch.moved,
                **{f"train_loss_{step}": log[step]["train_loss"][:7] for step in PROBES if step in log})


# ---- what to train ----------------------------------------------------------------------------------------------
# A level is a learning rate: 1.6e-2 · 2^(level/2). A family is a function of level and seed that returns the Run.

COARSE, LOWEST = (0, -2, 2, -4, 4), -8
ROUNDS, SEEDS = (1, 4, 16), (1, 2, 3)
DEFAULT_SIZE = dict(n_embd=128, grad_accum=2, max_steps=1200, warmup_steps=300)
CONTENDERS = (("preln", False), ("deepnorm", True), ("deeploop", True))


def setting(rule, scaled, n_loop):
    """Where scale_lr changes nothing, the plain setting stands for both."""
    return rule, scaled and n_loop > 1 and rule != "loop_preln", n_loop


def settings(rules=RULES, rounds=ROUNDS):
    return dict.fromkeys(setting(rule, scaled, R) for R in rounds for rule in rules for scaled in (False, True))


def family(rule, scaled, n_loop, **others):
    key = setting(rule, scaled, n_loop)
    return lambda level, seed: Run(*key, float(f"{1.6e-2 * 2 ** (level / 2):.4g}"), seed, **others)


def budget(times):
    """So many times 600 steps; the warmup grows along, up to 600."""
    return dict(max_steps=600 * times, warmup_steps=min(150 * times, 600))


def middle(losses):
    """The median; a run that broke off counts as infinitely bad."""
    return median(math.inf if math.isnan(loss) else loss for loss in losses)


def search(rows, run_at, seeds, levels, step):
    """Yields runs until the best level has a worse one `step` away on both sides; while all are at the floor, only
    lower ones. Returns that level, or None as long as runs are missing."""
    levels = list(levels)
    while True:
        runs = {level: [run_at(level, seed) for seed in seeds] for level in levels}
        wanted = [run for level in levels for run in runs[level]]
        yield from wanted
        if not rows.keys() >= set(wanted):
            return None
        losses = {level: middle(rows[run]["val_loss"] for run in runs[level]) for level in levels}
        best = min(levels, key=losses.get)
        near = (best - step, best + step) if losses[best] < FLOOR else (min(levels) - step,)
        beyond = [level for level in near if level not in levels and level >= LOWEST]
        if not beyond:
            return best
        levels += beyond


def one_seed(rows, rules, found):
    """Rates a factor 2 apart, then √2 around the best, which goes into found."""
    for level in COARSE:
        yield from (family(*key)(level, 1) for key in settings(rules))
    for key in settings(rules):
        coarse = yield from search(rows, family(*key), (1,), COARSE, 2)
        if coarse is not None:
            found[key] = yield from search(rows, family(*key), (1,), [coarse], 1)


def all_seeds(rows, found, best):
    """Every seed at what one seed found and at its neighbours; the level of the best median goes into best."""
    for key, level in found.items():
        if level is not None:
            best[key] = yield from search(rows, family(*key), SEEDS, [level], 1)


def one_rate(best):
    """The best rate of R = 1 at the other R."""
    for key in settings(rounds=ROUNDS[1:]):
        level = best.get((key[0], False, 1))
        if level is not None:
            yield from (family(*key)(level, seed) for seed in SEEDS)


def tuned(rows, run_at, level):
    """The best level to a factor 2, from `level` on and with one seed; then every seed there."""
    best = None if level is None else (yield from search(rows, run_at, (1,), [level], 2))
    if best is not None:
        yield from (run_at(best, seed) for seed in SEEDS)
    return best


def equal_compute(rows, best):
    """R = 1 for as long as R = 4 computes."""
    for rule in RULES:
        yield from tuned(rows, family(rule, False, 1, **budget(4)), best.get((rule, False, 1)))


def controls(rows, best):
    """At the best rate of R = 1: the blocks slower and the embedding not; the embedding, or q and k, or both faster.

    The factor √R for both is what scale_lr with a base rate √R times as large makes of DeepLoop.
    """
    for rule, R in ((rule, R) for rule in ("deeploop", "deepnorm", "preln") for R in ROUNDS):
        level = best.get((rule, False, 1))
        if level is not None:
            plain = family(rule, False, R)
            yield from tuned(rows, lambda power, seed: replace(
                plain(level, seed), control="blocks" * (power != 0), factor=2.0 ** (power / 2)), 0)
    level = best.get(("deeploop", False, 1))
    for R in ROUNDS[1:] if level is not None else ():
        for control in ("embedding", "qk", "embedding and qk"):
            yield from (family("deeploop", False, R, control=control, factor=R ** 0.5)(level, s) for s in SEEDS)


def default_size(rows, best):
    for R, near in ((1, 1), (4, 4), (12, 16)):
        for rule, scaled in (*CONTENDERS, ("p=1/3", True), ("deeploop", False)):
            level = best.get(setting(rule, scaled, near))
            if level is not None:           # twice the width and the tokens: from half the rate on
                yield from tuned(rows, family(rule, scaled, R, **DEFAULT_SIZE), level - 2)


def longer_warmup(rows):
    """What is at the floor at the lowest rate that leaves a seed there, again with twice the warmup."""
    for key in settings():
        stuck = [run for run in members(rows, family(*key)) if not rows[run]["val_loss"] < FLOOR]
        yield from (replace(run, warmup_steps=300) for run in stuck if run.learning_rate == stuck[0].learning_rate)


def budgets(rows, best):
    """On text of which nothing is read twice."""
    for rule, scaled in CONTENDERS:
        level = best.get((rule, scaled, 4))
        for times in (1, 4, 16):
            level = yield from tuned(rows, family(rule, scaled, 4, dataset="stdlib", **budget(times)), level)


def plan(rows):
    """(stage, run) of all that is known to be missing, in order; call it again when there is a new row."""
    found, best, seen = {}, {}, set(rows)
    stages = {"one seed": one_seed(rows, ("deeploop", "deepnorm", "preln"), found),
              "one seed, other rules": one_seed(rows, ("p=1/3", "loop_preln"), found),
              "all seeds": all_seeds(rows, found, best),
              "one rate": one_rate(best),
              "equal compute": equal_compute(rows, best),
              "controls": controls(rows, best),
              "default size": default_size(rows, best),
              "longer warmup": longer_warmup(rows),
              "budgets": budgets(rows, best)}
    for stage, runs in stages.items():
        for run in runs:
            if run not in seen:
                seen.add(run)
                yield stage, run


# ---- the loop ---------------------------------------------------------------------------------------------------

def make_stdlib():
    """data/stdlib: the .py files of Python's library, without tests, other packages and what differs by machine.

    Of Python 3.11.7: 728 files, 11,322,725 bytes, a tenth of them for validation.
    """
    library, folder = Path(sysconfig.get_path("stdlib")), WORK / "stdlib"
    left_out = re.compile(r"(site-packages|dist-packages|test|tests|idle_test|pydoc_data|config-.*|_sysconfigdata.*)$")
    for path in library.rglob("*.py"):
        name = path.relative_to(library)
        with contextlib.suppress(UnicodeDecodeError):       # a few are in older encodings
            if not any(map(left_out.match, name.parts)) and path.read_bytes().decode():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, folder / name)
    prepare.prepare_input("stdlib", [folder.relative_to(ROOT)], "bytes")
    shutil.rmtree(folder)


def start(run):
    """A process that trains and prints the row, with nearly all of the machine left to whoever else wants it."""
    if not Path("data", run.dataset, "meta.json").exists():
        {"pydocs": prepare.prepare_pydocs, "stdlib": make_stdlib}[run.dataset]()
    return subprocess.Popen([sys.executable, __file__, "run", json.dumps(asdict(run))], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env=dict(os.environ, OMP_NUM_THREADS="1"))


def append(row):
    new = not CSV.exists()
    with open(CSV, "a", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def time_left(rows, runs, jobs):
    """h:mm:ss for these runs, by the time that the rows took."""
    def work(runs):
        return sum(run.tokens * (run.n_loop + 1) * run.n_embd ** 1.5 for run in runs)
    seconds = sum(row["seconds"] for row in rows.values()) / work(rows) * work(runs) / jobs
    return timedelta(seconds=round(seconds))


def main_loop(jobs):
    """Trains what plan asks for. A run that fails by itself is left for the next start; three of them end this one."""
    failed, running = [], {}        # running: {run: (stage, process)}
    try:
        while True:
            waiting = [(stage, run) for stage, run in plan(read_rows()) if run not in running and run not in failed]
            for stage, run in waiting[:jobs - len(running)]:
                running[run] = stage, start(run)
            if not running:
                return
            while all(process.poll() is None for _, process in running.values()):
                time.sleep(0.2)
            run = next(run for run, (_, process) in running.items() if process.poll() is not None)
            stage, process = running.pop(run)
            out, err = process.communicate()
            if process.returncode:
                failed.append(run)
                print(f"{run} failed:\n{err[-2000:]}", file=sys.stderr)
                if len(failed) == 3:
                    sys.exit("rates.py: three runs failed")
                continue
            append(json.loads(out))
            rows = read_rows()
            here = [r for s, r in plan(rows) if s == stage]
            print(f"{stage}: {len(here)} to go, {time_left(rows, here, jobs)} left | {run}: "
                  f"{rows[run]['val_loss']:.4f} in {rows[run]['seconds']:.0f} s", flush=True)
    finally:
        for _, process in running.values():
            process.kill()
            process.wait()


# ---- tables and charts ------------------------------------------------------------------------------------------

def members(rows, run_at):
    """A family's runs, by rate and seed."""
    runs = [run for run in rows if run == replace(run_at(0, 1), learning_rate=run.learning_rate, seed=run.seed)]
    return sorted(runs, key=lambda run: (run.learning_rate, run.seed))


def by_rate(rows, run_at):
    """{rate: the losses of its seeds}, and the rate of the best median among those with the most seeds, or None."""
    losses = defaultdict(list)
    for run in members(rows, run_at):
        losses[run.learning_rate].append(rows[run]["val_loss"])
    return losses, min(losses, key=lambda rate: (-len(losses[rate]), middle(losses[rate])), default=None)


def show(losses, rate=None):
    """Median, every seed, how many train; "" without any."""
    if not losses:
        return ""
    trained = sum(loss < FLOOR for loss in losses)
    return "".join([f"**{middle(losses):.3f}** ({', '.join(f'{loss:.3f}' for loss in losses)})",
                    f" at {rate:g}" if rate else "", f", {trained} of {len(losses)} train"])


def table(title, header, lines):
    if not lines:
        return
    print(f"\n### {title}\n\n| {' | '.join(header)} |\n{'|---' * len(header)}|")
    for line in lines:
        print(f"| {' | '.join(map(str, line))} |")


def label(rule, scaled):
    return f"{rule}, {'scaled' if scaled else 'plain'}"


PAIRS = dict.fromkeys(key[:2] for key in settings())    # of rule and scaled


def best_table(rows, title, columns):
    """columns: {header: a function of rule and scaled that returns the family}."""
    lines = []
    for pair in PAIRS:
        found = [by_rate(rows, run_at(*pair)) for run_at in columns.values()]
        lines.append((label(*pair), *(show(losses.get(best), best) for losses, best in found)))
    table(title, ("rule, rates", *columns), [line for line in lines if any(line[1:])])


def chart(title, curves):
    """The curves of losses that stay below the floor, named in the title from the highest at its end to the lowest."""
    curves = {name: losses for name, losses in curves.items() if all(loss < FLOOR for loss in losses)}
    order = sorted(curves, key=lambda name: -curves[name][-1])
    lines = [f"    line [{', '.join(f'{loss:.3f}' for loss in curves[name])}]" for name in order]
    if lines:
        print(f'\n```mermaid\nxychart-beta\n    title "{title}: {", ".join(order)}"',
              f'    x-axis "R" {list(ROUNDS)}', '    y-axis "nats per byte"', *lines, "```", sep="\n")


def print_rates(rows):
    lines, transfer, best_curves, same_curves = [], [], {}, {}
    for key in settings():
        losses, best = by_rate(rows, family(*key))
        rates = list(losses)
        i = rates.index(best) if rates else 0
        beside = rates[max(0, i - 1):i] + rates[i + 1:i + 2]
        lines.append((label(*key[:2]), key[2], show(losses.get(best), best),
                      ", ".join(f"{middle(losses[rate]):.3f} at {rate:g}" for rate in beside)))
    for rule, scaled in PAIRS:
        _, rate = by_rate(rows, family(rule, False, 1))
        found = [by_rate(rows, family(rule, scaled, R)) for R in ROUNDS]
        transfer.append((label(rule, scaled), rate or "", *(show(losses.get(rate)) for losses, _ in found)))
        if (rule, scaled) in (*CONTENDERS, ("p=1/3", True), ("deeploop", False)):
            best_curves[label(rule, scaled)] = [middle(losses.get(best, [math.inf])) for losses, best in found]
            same_curves[label(rule, scaled)] = [middle(losses.get(rate, [math.inf])) for losses, _ in found]
    table("The best rate", ("rule, rates", "R", "median (seeds)", "next to it"), lines)
    chart("loss at the best rate", best_curves)
    table("The best rate of R = 1 for every R", ("rule, rates", "rate", *(f"R = {R}" for R in ROUNDS)), transfer)
    chart("loss at the best rate of R = 1", same_curves)


def columns(rows, rounds, **others):
    """{header: family} with the tokens and the FLOPs, which are the same for every rule, at each of these R."""
    found = {}
    for R in rounds:
        run = family("preln", False, R, **others)(0, 1)
        flops = next((f", {row['flops']:.1e} FLOPs" for other, row in rows.items()
                      if (other.n_loop, other.n_embd, other.max_steps) == (R, run.n_embd, run.max_steps)), "")
        found[f"R = {R}, {run.tokens:,} tokens{flops}"] = lambda rule, scaled, R=R: family(rule, scaled, R, **others)
    return found


def print_controls(rows):
    """Groups are runs that differ by the seed alone."""
    groups = defaultdict(list)
    for run in sorted(rows, key=lambda run: (run.rule, run.n_loop, run.control, run.factor, run.seed)):
        groups[replace(run, seed=0)].append(rows[run])
    losses = {group: show([row["val_loss"] for row in some]) for group, some in groups.items()}
    table("Controls: whose rate is multiplied; the others keep the best one of R = 1",
          ("rule", "R", "rate", "multiplied", "by", "loss", "loss at 1"),
          [(g.rule, g.n_loop, g.learning_rate, g.control, f"{g.factor:.3g}", losses[g],
            losses.get(replace(g, control="", factor=1.0), "")) for g in groups if g.control])
    table("Twice the warmup, for seeds at the floor", ("setting", "300 steps", "150 steps"),
          [(g, losses[g], losses.get(replace(g, warmup_steps=150), ""))
           for g in groups if (g.max_steps, g.warmup_steps) == (600, 300)])
    lines = []
    for group, some in groups.items():
        some = [row for row in some if not math.isnan(row[f"embedding_{PROBES[0]}"])]      # the first rows noted none
        fates = [(fate, [row for row in some if (row["val_loss"] < FLOOR) == leaves])
                 for fate, leaves in (("leave", True), ("stay", False))]
        for fate, same in fates if group.control or all(same for _, same in fates) else ():
            cells = [" / ".join(f"{middle(row[f'{what}_{n}'] for row in same):.2f}" for what in (*PARTS, "train_loss"))
                     for n in PROBES if same]
            lines += [(group, f"{len(same)} {fate}", *cells)] if same else []
    table("What moves first: ‖W - W0‖ / ‖W0‖ of embedding / q and k / other matrices, and the training loss; "
          "in controls and wherever seeds differ in fate", ("setting", "seeds", *(f"step {n}" for n in PROBES)), lines)


def print_tables(rows):
    print_rates(rows)
    best_table(rows, "Equal compute: fewer rounds, more steps",
               columns(rows, (4,)) | columns(rows, (1,), **budget(4)) | columns(rows, (16,)))
    print_controls(rows)
    best_table(rows, "Budgets, on the Python library, of which nothing is read twice",
               {k: v for n in (1, 4, 16) for k, v in columns(rows, (4,), dataset="stdlib", **budget(n)).items()})
    best_table(rows, "Default size", columns(rows, (1, 4, 12), **DEFAULT_SIZE))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="train", choices=("train", "tables", "run"))
    parser.add_argument("run", nargs="?", help="of run: the Run as JSON; prints the row as JSON")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, one thread each (default: 2)")
    args = parser.parse_args()
    os.chdir(ROOT)
    if args.what == "tables":
        print_tables(read_rows())
    elif args.what == "run":
        if hasattr(os, "nice"):
            os.nice(19)
        print(json.dumps(measure(Run(**json.loads(args.run)))))
    else:
        WORK.mkdir(exist_ok=True)
        held = open(WORK / ".lock", "w")        # to the end of this function
        if train.fcntl:
            train.fcntl.flock(held, train.fcntl.LOCK_EX | train.fcntl.LOCK_NB)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        for leftover in filter(Path.is_dir, WORK.iterdir()):        # of runs that were killed
            shutil.rmtree(leftover)
        main_loop(args.jobs)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except BlockingIOError:
        sys.exit("rates.py: another one is at work here; let it end")
