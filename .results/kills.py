"""Kills a run again and again, and compares it with one left in peace: python .results/kills.py [kills] [steps]

Without numbers, thirty kills in 2,000 steps. It ends with: weights equal: True  log equal: True
"""
import csv
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def main():
    kills, steps = [int(n) for n in sys.argv[1:]] or (30, 2000)
    train = [sys.executable, "train.py", "--n_embd=64", f"--max_steps={steps}", "--eval_interval=50", "--keep=2",
             "--resume=auto"]
    options = dict(cwd=ROOT, env=os.environ | dict(OMP_NUM_THREADS="1"), stdout=subprocess.DEVNULL)
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        calm, killed = Path(folder, "calm"), Path(folder, "killed")
        subprocess.run([*train, f"--out_dir={calm}"], check=True, **options)
        for kill in range(1, kills + 1):
            run = subprocess.Popen([*train, f"--out_dir={killed}"], **options)
            time.sleep(random.uniform(3, 9))
            if run.poll() is not None:
                sys.exit(f"kills.py: the run was done before kill {kill}; give it more steps")
            run.kill()
            run.wait()
            print(f"kill {kill} of {kills}", flush=True)
        subprocess.run([*train, f"--out_dir={killed}"], check=True, **options)
        weights = [torch.load(out / "ckpt.pt", weights_only=True)["model"] for out in (calm, killed)]
        losses = []                     # step to gradient norm of each row; the times behind them differ
        for out in (calm, killed):
            with open(out / "log.csv", newline="") as f:
                losses.append([row[:5] for row in csv.reader(f)])
    equal = all(torch.equal(w, weights[1][name]) for name, w in weights[0].items())
    print("weights equal:", equal, " log equal:", losses[0] == losses[1])
    sys.exit(not (equal and losses[0] == losses[1]))


if __name__ == "__main__":
    main()
