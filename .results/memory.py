"""Peak memory, in MB: python .results/memory.py [folder of the code before ...] > .results/memory.csv

Each row is the largest resident set (ru_maxrss, Linux) of one process, its imports included:
    recompute   two steps of train.py, float32, R = 2 and 16, with and without --recompute
    vocabulary  two steps of a model over GPT-2's vocabulary, here and in the folders given
With MALLOC_MMAP_THRESHOLD_ set, glibc gives memory back as soon as it is free. SMALL=1 cuts all sizes down.
"""
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMALL = "SMALL" in os.environ
STEPS = """
import sys
import torch
from model import GPT, GPTConfig
torch.manual_seed(0)
T, B, d = map(int, sys.argv[1:])
gpt = GPT(GPTConfig(vocab_size=50304, block_size=T, n_loop=2, n_embd=d))
optimizer = gpt.configure_optimizer(1e-3, 0.1)
for _ in range(2):
    idx = torch.randint(50304, (B, T))
    gpt(idx, idx)[1].backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
"""


def peak(command, cwd, **environ):
    """MB that a process had at its largest; ends this program if it fails."""
    process = subprocess.Popen([sys.executable, *command], cwd=cwd, env=os.environ | environ, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"memory.py: {' '.join(map(str, command[:2]))} ... in {cwd} failed")
    return usage.ru_maxrss / 1024       # Linux counts KiB


def main():
    early = dict(MALLOC_MMAP_THRESHOLD_="1000000")
    sizes = (["--n_embd=64", "--batch_size=4", "--block_size=64"] if SMALL else
             ["--n_embd=256", "--batch_size=32", "--block_size=256"])
    print("measurement,setting,n_loop,malloc,MB")
    with tempfile.TemporaryDirectory() as folder:
        for name, environ in (("given back at once", early), ("default", {})):
            for recompute in ("False", "True"):
                for n_loop in (2, 16):
                    run = ["train.py", "--max_steps=2", "--eval_interval=1000", "--eval_windows=1", "--grad_accum=1",
                           "--dtype=float32", "--compile=False", f"--n_loop={n_loop}", f"--recompute={recompute}",
                           f"--out_dir={folder}/out", *sizes]
                    print(f"recompute,{recompute},{n_loop},{name},{peak(run, ROOT, **environ):.0f}", flush=True)
    for folder in (ROOT, *sys.argv[1:]):
        setting = "this code" if folder is ROOT else folder
        mb = peak(["-c", STEPS, *(("64", "4", "64") if SMALL else ("256", "16", "256"))], folder, **early)
        print(f"vocabulary,{setting},2,given back at once,{mb:.0f}", flush=True)


if __name__ == "__main__":
    main()
