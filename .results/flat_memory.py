"""Peak memory above start, and speed, of `prepare.py --input` on one text of 500 MB: python .results/flat_memory.py

Start is what the same command takes for a text of a few lines. Another prepare.py to compare with may be named:
python .results/flat_memory.py OTHER/prepare.py. Both are run in turn on the same text."""
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pydoc_data.topics import topics


def run(program, tokenizer, text, work):
    """-> (peak in bytes, seconds) of a child process."""
    child = subprocess.Popen([sys.executable, program, f"--dataset={text.stem}-{tokenizer}-{time.time_ns()}",
                              f"--tokenizer={tokenizer}", "--input", text], cwd=work, stdout=subprocess.DEVNULL)
    begin = time.monotonic()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024), time.monotonic() - begin


if __name__ == "__main__":
    programs = [Path(__file__).resolve().parent.parent / "prepare.py", *(Path(path).resolve() for path in sys.argv[1:])]
    manual = "\n".join(topics[name] for name in sorted(topics)).encode()
    with tempfile.TemporaryDirectory() as work:
        small, large = Path(work, "small.txt"), Path(work, "large.txt")
        small.write_bytes(manual[:1000])
        with open(large, "wb") as file:  # piece by piece: a child's peak is never below what its parent had
            for _ in range(500_000_000 // len(manual)):
                file.write(manual)
        for tokenizer in ("bytes", "gpt2"):
            for program in programs:
                start, peak = run(program, tokenizer, small, work)[0], run(program, tokenizer, large, work)
                print(f"{tokenizer:5}  {(peak[0] - start) / 1e6:7.0f} MB above start  "
                      f"{large.stat().st_size / 1e6 / peak[1]:5.1f} MB/s  {program}", flush=True)
