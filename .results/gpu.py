"""Does it work on a GPU, and how fast: python .results/gpu.py, under five minutes on one H200-class GPU.

Ten steps of --preset=small --n_loop=4 in bfloat16, compiled and not, and in float32 (TF32 products) on the same
batches; then generation, a second process for the one GPU, and the test suite in the time that is left, with the GPU
hidden: its laws are told on a CPU, some of them of two processes or to the last bit. The preset's steps are cut from
480 sequences to 120, which memory and tokens/s do not feel. The tokens are random and lie in a temporary folder with
all else that is written: no download, and data/ and out/ stay as they are.

Without CUDA everything is cut down to run on a CPU in a minute or two: a tiny model, and the suite's first tests.
"""
import csv
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from model import GPT, GPTConfig, load_checkpoint

CUDA = torch.cuda.is_available()
SECONDS = 290                   # for all of it
STEPS = 10
VOCABULARY = 50257              # of the random tokens; the model's is padded to 50304
SMALL = ["--preset=small", "--n_loop=4", "--grad_accum=8"]
TINY = ["--preset=tiny", "--n_loop=4", "--n_embd=64", "--batch_size=2"]
RUN = [*(SMALL if CUDA else TINY), "--dataset=random", f"--max_steps={STEPS}", "--warmup_steps=5", "--eval_windows=30"]
# train.py as it is, and then the most memory that it held
TRAIN = """
import atexit, runpy, sys, torch
sys.path.insert(0, sys.argv[1])
sys.argv = sys.argv[2:]
def peak():
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    import resource
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
atexit.register(lambda: print("peak bytes", peak()))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
rows = []                       # (what, result, whether it is right)


def tell(what, result, right=True):
    rows.append((what, result, right))
    print(f"{what}: {result}" + "  WRONG" * (not right), flush=True)


def make_tokens(folder):
    """data/random in folder: shards of random tokens in llm.c's format."""
    rng = np.random.default_rng(0)
    data = folder / "data" / "random"
    data.mkdir(parents=True)
    for split, n in (("train", 4_000_000 if CUDA else 100_000), ("val", 100_000)):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, n
        tokens = rng.integers(VOCABULARY, size=n).astype("<u2")
        (data / f"{split}_000.bin").write_bytes(header.tobytes() + tokens.tobytes())
    (data / "meta.json").write_text(json.dumps(dict(tokenizer="gpt2", vocab_size=50304)))


def matmul_peak(dtype):
    """FLOP/s of a plain matrix product, the best of about a second."""
    n, device = (8192, "cuda") if CUDA else (1024, "cpu")
    a = torch.randn(n, n, device=device, dtype=dtype)
    best, end = float("inf"), time.perf_counter() + 1
    while time.perf_counter() < end:
        began = time.perf_counter()
        (a @ a)[0, 0].item()    # waits for the device
        best = min(best, time.perf_counter() - began)
    return 2 * n ** 3 / best


def train(folder, name, flops_per_token, peak, *flags):
    """Trains a few steps in folder/name and tells speed, memory and MFU. -> its losses, None if it failed."""
    began = time.perf_counter()
    run = subprocess.run([sys.executable, "-c", TRAIN, ROOT, ROOT / "train.py", *RUN, *flags, f"--out_dir={name}"],
                         cwd=folder, capture_output=True, text=True)
    took = time.perf_counter() - began
    if run.returncode:
        return tell(f"train, {name}", (run.stderr.strip().splitlines() or ["no word"])[-1], right=False)
    if "compile is left off" in run.stdout:
        tell(f"compile, {name}", re.search("compile is left off.*", run.stdout)[0], right=not CUDA)
    with open(folder / name / "log.csv", newline="") as f:
        log = list(csv.DictReader(f))
    speed = statistics.median(float(row["tokens_per_s"]) for row in log[3:STEPS])
    memory = int(re.search(r"peak bytes (\d+)", run.stdout)[1])
    tell(f"train, {name}", f"{speed:,.0f} tokens/s, {speed * flops_per_token / 1e12:.3g} TFLOP/s, MFU "
         f"{speed * flops_per_token / peak:.0%}, {memory / 2 ** 30:.2f} GiB at most, {took:.0f} s with its start")
    return [float(row["train_loss"]) for row in log[:STEPS]] + [float(log[STEPS]["val_loss"])]


def compare(losses, name, tolerance):
    """Tells how far the losses of a run are from those in float32 without compile."""
    if losses.get(name) and losses.get("float32"):
        gap = max(abs(a - b) for a, b in zip(losses[name], losses["float32"]))
        tell(f"loss, {name}", f"{losses[name][0]:.4f} to {losses[name][-1]:.4f}, at most {gap:.1e} from float32",
             right=gap < tolerance)


def generate(path):
    """Tells how fast a checkpoint generates, and whether the cache changes what is likeliest."""
    model = load_checkpoint(path)[0].to("cuda" if CUDA else "cpu").eval()
    idx = torch.zeros(1, 1, dtype=torch.long, device=model.wte.weight.device)
    n = 256 if CUDA else 64
    for _ in range(2):          # the first to warm up
        began = time.perf_counter()
        tokens = [token.item() for token in model.generate(idx, n, temperature=0)]
        took = time.perf_counter() - began
    context = idx
    with torch.no_grad():
        for token in tokens[:32]:
            likeliest = model(context)[0][0, -1]
            if likeliest.max() - likeliest[token] > 1e-3:
                return tell("generation", "the cache changes what is likeliest", right=False)
            context = torch.cat((context, torch.tensor([[token]], device=idx.device)), dim=1)
    tell("generation", f"{n / took:,.0f} tokens/s with the cache, which agrees with no cache")


def second_process(folder):
    """Tells what train.py says to two processes that find one GPU; to a GPU that is not there, without CUDA."""
    n = 2 if CUDA else 1
    run = subprocess.run([sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={n}", ROOT / "train.py",
                          *RUN, "--device=cuda", "--out_dir=second"], cwd=folder, capture_output=True, text=True,
                         env=os.environ | (dict(CUDA_VISIBLE_DEVICES="0") if CUDA else {}))
    said = re.search(r"^train\.py: (.*)", run.stderr, re.M)
    tell(f"{n} process{'es' * (n - 1)} for {n - 1} GPU{'s' * (n == 1)}", said[1] if said else "no sentence of ours",
         right=bool(run.returncode and said))


def run_suite(seconds):
    """Tells how the suite ends, shared by as many processes as cores allow, and cut off after that many seconds."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    listed = subprocess.run([*pytest, "--collect-only"], cwd=ROOT, capture_output=True, text=True)
    tests = [line for line in listed.stdout.splitlines() if "::" in line]
    if not tests:
        return tell("suite", (listed.stdout.strip().splitlines() or ["no tests"])[-1], right=False)
    tests = tests if CUDA else tests[:40]
    n = max(1, min(8, os.cpu_count() // 2)) if CUDA else 1
    began, counts, wrong = time.perf_counter(), {}, []

    def share(mine):
        process = subprocess.Popen([*pytest, "-rfE", *mine], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                                   env=os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""))
        timer = threading.Timer(max(1, seconds), process.send_signal, (signal.SIGINT,))
        timer.start()
        said = process.communicate()[0]
        timer.cancel()
        for count, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)", said.splitlines()[-1] if said else ""):
            counts[kind] = counts.get(kind, 0) + int(count)
        wrong.extend(re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.M))

    threads = [threading.Thread(target=share, args=(tests[i::n],)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    right = sum(counts.values()) == len(tests) and set(counts) <= {"passed", "skipped"}
    tell("suite", f"{', '.join(f'{count} {kind}' for kind, count in counts.items()) or 'none ended'} of {len(tests)} "
         f"in {time.perf_counter() - began:.0f} s {' '.join(wrong)}".rstrip(), right)


def main():
    began = time.perf_counter()
    name = torch.cuda.get_device_name() if CUDA else "CPU, cut down"
    tell("machine", f"{name}, torch {torch.__version__}")
    torch.set_float32_matmul_precision("high")          # TF32, as train.py has it
    peaks = {dtype: matmul_peak(getattr(torch, dtype)) for dtype in ("bfloat16", "float32")}
    tell("matrix products", ", ".join(f"{peak / 1e12:.3g} TFLOP/s in {dtype}" for dtype, peak in peaks.items()))
    shape = (dict(block_size=1024, n_layer=12, n_head=6, n_embd=768) if CUDA else
             dict(block_size=128, n_layer=2, n_head=4, n_embd=64))      # those of RUN
    with torch.device("meta"):
        flops = GPT(GPTConfig(vocab_size=50304, n_loop=4, **shape)).flops_per_token()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        make_tokens(folder)
        losses = {}
        for name, dtype, compiled in (("bfloat16", "bfloat16", "False"), ("bfloat16 compiled", "bfloat16", "True"),
                                      ("float32", "float32", "False")):
            losses[name] = train(folder, name, flops, peaks[dtype], f"--dtype={dtype}", f"--compile={compiled}")
        for name in ("bfloat16", "bfloat16 compiled"):
            compare(losses, name, tolerance=0.05)
        if losses["bfloat16"]:
            generate(folder / "bfloat16" / "ckpt.pt")
        second_process(folder)
    run_suite(SECONDS - (time.perf_counter() - began))
    print(f"\n| what | result, in {time.perf_counter() - began:.0f} s | |\n|---|---|---|")
    for what, result, right in rows:
        print(f"| {what} | {result} | {'right' if right else 'WRONG'} |")
    sys.exit(not all(right for _, _, right in rows))


if __name__ == "__main__":
    main()
