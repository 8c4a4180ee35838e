"""How fast prepare.py makes shards of a made OpenWebText archive: python .results/prepare_speed.py [MB of text, 200]

The archive and its shards lie in a temporary folder. GPT-2's tokenizer must be within reach (TIKTOKEN_CACHE_DIR).
"""
import io
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import tiktoken
from pydoc_data.topics import topics

PREPARE = Path(__file__).resolve().parents[1] / "prepare.py"


def make_archive(path, nbytes):
    """Writes an archive in the real layout, a tar of xz-compressed tars of texts, 2 MB each. -> its texts."""
    rng, texts, made = random.Random(0), [], 0
    paragraphs = [p for topic in sorted(topics) for p in topics[topic].split("\n\n")]
    with tarfile.open(path, "w") as archive:
        while made < nbytes:
            packed, size = io.BytesIO(), 0
            with tarfile.open(fileobj=packed, mode="w:xz", preset=1) as member:
                while size < 2e6:
                    texts.append("\n\n".join(rng.choices(paragraphs, k=rng.randint(3, 30))).strip())
                    size += add(member, f"{len(texts)}.txt", texts[-1].encode())
            add(archive, f"openwebtext/urlsf_subset00-{made}_data.xz", packed.getvalue())
            made += size
    return texts


def add(tar, name, data):
    """Adds a file to an open tar. -> its size."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
    return len(data)


def main():
    megabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 200
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work, "data", "openwebtext")
        (folder / "raw").mkdir(parents=True)
        texts = make_archive(folder / "raw" / "urlsf_subset00.tar", megabytes * 1e6)
        size = sum(len(text.encode()) for text in texts) / 1e6
        encode = tiktoken.get_encoding("gpt2").encode_ordinary
        began = time.perf_counter()
        for text in texts:
            encode(text)
        print(f"{size:.0f} MB of text; tiktoken alone, one thread: {size / (time.perf_counter() - began):.1f} MB/s",
              flush=True)
        for workers in (1, 2):
            for path in folder.glob("*.*"):
                path.unlink()
            began = time.perf_counter()
            subprocess.run([sys.executable, PREPARE, "--dataset=openwebtext", "--subsets=0", f"--workers={workers}",
                            "--keep_raw=True"], cwd=work, check=True, stdout=subprocess.DEVNULL)
            print(f"prepare.py, --workers={workers}: {size / (time.perf_counter() - began):.1f} MB/s", flush=True)


if __name__ == "__main__":
    main()
