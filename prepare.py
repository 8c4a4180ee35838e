"""Text -> token shards, data/<dataset>/.

    python prepare.py                                            pydocs: the manual inside CPython, no download
    python prepare.py --dataset=NAME --input FILE_OR_FOLDER ...  your own UTF-8 text
    python prepare.py --dataset=openwebtext --subsets=0-2        OpenWebText, 21 archives, or some of them
    python prepare.py --dataset=fineweb_edu --shards=10          FineWeb-Edu, already tokenized

A shard (llm.c's format) is 256 little-endian int32 (magic, version, number of tokens, zeros), then uint16 tokens.
`*train*.bin` and `*val*.bin` are the two splits. meta.json describes a dataset and is written last: a folder without
it is not finished. Running the same command again goes on where an interrupted one stopped.

Every file is written or downloaded under NAME.part, and renamed when it is whole. A dataset of texts is made in
new.part/, then put in the place of an older one. The big corpora grow: while they do, progress.json stands for
meta.json and says what is there already. OpenWebText's shards are made archive by archive and named after it
(openwebtext_train_05_000.bin), so their bytes depend neither on the order nor on the choice of archives.
"""

import os
import signal

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    # Ctrl-C ends this as a kill would, which every file survives; no import and no thread holds it up.
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"interrupted\n"), os._exit(130)))

import argparse
import codecs
import collections
import contextlib
import hashlib
import io
import itertools
import json
import multiprocessing
import re
import shutil
import stat
import sys
import tarfile
import threading
import time
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np

DATA, SPLITS = Path("data"), ("train", "val")
MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
VOCAB_SIZE = {"bytes": 256, "gpt2": 50304}  # GPT-2's 50257, padded to a multiple of 128
SHARD_TOKENS = 100_000_000
BLOCK = 1_000_000  # characters or bytes of a text that are read and tokenized at once
MEMBER_BYTES = 1 << 28  # an archive's member, packed or unpacked, is held in memory; real ones have 2 MB
VAL_ONE_IN = 2000  # OpenWebText's documents that go to validation

OPENWEBTEXT = {"tokenizer": "gpt2", "vocab_size": 50304, "source": "Skylion007/openwebtext",
               "revision": "8cfd553694d06979cfec29248b200468786f0294"}
OPENWEBTEXT_SUBSETS, OPENWEBTEXT_BYTES, OPENWEBTEXT_GROWTH = 21, 630e6, 1.4  # an archive's; shards / archive
FINEWEB_EDU = {"tokenizer": "gpt2", "vocab_size": 50304, "source": "karpathy/fineweb-edu-100B-gpt2-token-shards",
               "revision": "a33f75d78c7f74236fb03754ec1eb3cc77507d64"}
FINEWEB_EDU_BYTES = HEADER_BYTES + 2 * SHARD_TOKENS  # of each shard

ATTEMPTS, BACKOFF = 6, 1.0  # of a download that does not come further, and seconds between two, doubled each time


# -- files, shards and tokenizers: what train.py and sample.py import ----------------------------------------

def regular(path):
    """-> path. Raises OSError if nothing is there, ValueError if it is no file: to open a FIFO would wait for ever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{path} is not a regular file")
    return path


def rename_whole(part, path):
    """Give part the name path, so that even after a power cut path is what it was before, or all of part."""
    with open(part, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(part, path)
    with contextlib.suppress(OSError):  # Windows cannot open a folder, and some network disks cannot sync one
        folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def whole_file(path):
    """A binary file that gets the name path once all of it is on the disk. Raises OSError naming path."""
    part = f"{path}.part"
    try:
        with open(part, "wb") as file:
            yield file
        rename_whole(part, path)
    except OSError as error:
        if error.errno and error.filename in (None, part):  # it is this file's
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        with contextlib.suppress(OSError):
            os.remove(part)


def write_shards(folder, stem, pieces):
    """Write an iterable of uint16 arrays as folder/stem_000.bin, _001, ..., SHARD_TOKENS in each. -> their number."""
    total, pieces = 0, (piece for piece in pieces if len(piece))
    piece = next(pieces, None)
    while piece is not None:
        with whole_file(Path(folder, f"{stem}_{total // SHARD_TOKENS:03d}.bin")) as file:
            file.write(bytes(HEADER_BYTES))
            count = 0
            while piece is not None and count < SHARD_TOKENS:
                fitting, rest = np.split(piece, [SHARD_TOKENS - count])
                file.write(np.ascontiguousarray(fitting, "<u2").data)
                count += len(fitting)
                piece = rest if len(rest) else next(pieces, None)
            file.seek(0)
            file.write(np.array([MAGIC, VERSION, count], "<i4").data)
        total += count
    return total


def read_shard(path):
    """-> np.memmap (n,) uint16; only the header is read. Raises OSError, or ValueError naming path and its fault."""
    with open(regular(path), "rb") as file:
        head, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    magic, version, count = (int(n) for n in np.frombuffer(head.ljust(HEADER_BYTES, b"\0"), "<i4")[:3])
    need = HEADER_BYTES + 2 * count
    if not size:
        raise ValueError(f"{path} is empty")
    if magic != MAGIC:
        raise ValueError(f"{path} is not a token shard: its magic number is {magic}, not {MAGIC}. {NANOGPT}")
    if version != VERSION:
        raise ValueError(f"{path} is a shard of version {version}, not {VERSION}")
    if size != need:
        raise ValueError(f"{path} is {'cut' if size < need else 'padded'}: "
                         f"{count} tokens need {need} bytes, it has {size}")
    if not count:
        raise ValueError(f"{path} is empty: it holds no tokens")
    return np.memmap(path, "<u2", "r", offset=HEADER_BYTES, shape=(count,))


NANOGPT = ("nanoGPT's train.bin and val.bin become data/NAME by: python -c \"import numpy as np, prepare; prepare."
           "write_dataset('data/NAME', 'gpt2', *([np.memmap(s + '.bin', '<u2', 'r')] for s in prepare.SPLITS))\"")


def load_tokenizer(name):
    """"bytes" or "gpt2" -> an object with
        .name, .vocab_size
        .start                 list of the ids that begin a document: [], or [50256], end-of-text
        .seam                  matches after places that no token spans, where a text can be cut
        .encode(text)          list of ids; nothing in the text is taken for a special token
        .decode(ids)           bytes, not always whole UTF-8; ids without text give none
    Raises ValueError for another name, OSError when GPT-2's files cannot be had, ImportError without tiktoken."""
    if name == "bytes":
        return SimpleNamespace(name=name, vocab_size=VOCAB_SIZE[name], start=[], seam=re.compile("(?s)."),
                               encode=lambda text: list(text.encode("utf-8", "replace")),
                               decode=lambda ids: bytes(int(i) for i in ids if i < 256))
    if name != "gpt2":
        raise ValueError(f"tokenizer={name!r} is neither 'bytes' nor 'gpt2'")
    import tiktoken
    try:
        bpe = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:
        raise OSError("GPT-2's tokenizer cannot be loaded: tiktoken needs the network once, or its two files in the "
                      f"folder that TIKTOKEN_CACHE_DIR names ({type(error).__name__})") from error
    # In a token of GPT-2 white space never follows anything else, and nothing but letters follows a letter.
    return SimpleNamespace(name=name, vocab_size=VOCAB_SIZE[name], start=[bpe.eot_token],
                           seam=re.compile(r"(?<=\S)[ \n]|(?<=[A-Za-z一-龥])[!-@、。，]"), encode=bpe.encode_ordinary,
                           decode=lambda ids: bpe.decode_bytes([int(i) for i in ids if i < bpe.eot_token]))


def tokens_of(blocks, tokenizer):
    """Yield a document's tokens as uint16 arrays, start ids first. blocks are strings that together are the document;
    two of them, or a word that is longer, are all that is held of it."""
    yield np.array(tokenizer.start, np.uint16)
    text = ""
    for block in blocks:
        begin, text = len(text), text + block
        if seam := tokenizer.seam.search(text, begin):
            yield np.array(tokenizer.encode(text[:seam.start()]), np.uint16)
            text = text[seam.start():]
    yield np.array(tokenizer.encode(text), np.uint16)


# -- what is said of a dataset -------------------------------------------------------------------------------

def say(text, end="\n"):
    print(text.ljust(79) if sys.stdout.isatty() else text, end=end, flush=True)


def meter(what, total):
    """-> advance(nbytes), which threads may share and which shows now and then how far a long job is."""
    begin = shown = time.monotonic()
    done, lock, pause = 0, threading.Lock(), 0.5 if sys.stdout.isatty() else 15

    def advance(nbytes):
        nonlocal done, shown
        with lock:
            done, now = done + nbytes, time.monotonic()
            if now - shown > pause:
                shown, speed = now, max(done, 1) / (now - begin)
                minutes, seconds = divmod(int(max(total - done, 0) / speed), 60)
                say(f"{what}: {done / 1e9:.3f} of {total / 1e9:.3f} GB, {speed / 1e6:.1f} MB/s, "
                    f"{minutes}:{seconds:02d} left", end="\r" if sys.stdout.isatty() else "\n")

    return advance


def read_meta(folder, **wanted):
    """-> what folder holds, {} for nothing; is it finished. Raises ValueError if it is not what is wanted."""
    for path in (folder / "meta.json", folder / "progress.json"):
        if path.exists():
            try:
                meta = dict(json.loads(regular(path).read_text("utf-8")))
                meta["tokens"]["train"], meta["tokens"]["val"]
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path} is not a description that this program wrote: delete the folder {folder} or "
                                 "choose another --dataset name") from error
            for key, value in wanted.items():
                if meta.get(key) != value:
                    raise ValueError(f"{folder} was made with {key}={meta.get(key)!r}, not {value!r}: "
                                     "delete the folder or choose another --dataset name")
            return meta, path.name == "meta.json"
    return {}, False


def write_meta(path, meta):
    with whole_file(path) as file:
        file.write((json.dumps(meta, indent=1) + "\n").encode())


def tell(folder, meta, more=""):
    documents = f"{meta['documents']:,} document{'s' * (meta['documents'] != 1)}, " if "documents" in meta else ""
    say(f"{folder}: {documents}{meta['tokens']['train']:,} train and {meta['tokens']['val']:,} val tokens{more}")


FINISHED = "; finished, nothing to do; delete the folder to make it anew"


# -- pydocs and a person's own text --------------------------------------------------------------------------

def prepare_pydocs(tokenizer="bytes"):
    """Write data/pydocs/, unless it is there. Raises ValueError or OSError with a sentence for the user."""
    folder = DATA / "pydocs"
    meta, finished = read_meta(folder, tokenizer=tokenizer)
    if finished:
        return tell(folder, meta, FINISHED)
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("this Python comes without its manual (pydoc_data); install its documentation package, "
                         "or make a dataset of your own text with --input") from error
    folder.mkdir(parents=True, exist_ok=True)
    with whole_file(folder / "manual.txt") as file:
        file.write(("\n\n\n".join(topics[name].rstrip("\n") for name in sorted(topics)) + "\n").encode())
    write_texts(folder, tokenizer, {folder / "manual.txt": "manual.txt"},
                source=f"pydoc_data.topics of Python {sys.version.split()[0]}")


def prepare_input(name, given, tokenizer):
    """Write data/<name>/ from UTF-8 files and folders, unless it is there and they have not changed since."""
    folder, source = DATA / name, [Path(path).as_posix() for path in given]
    meta, finished = read_meta(folder, tokenizer=tokenizer, source=source)
    names, left_out = find_files(given)
    stats = {path: path.stat() for path in names}
    seen = json.dumps([(names[path], found.st_size, found.st_mtime_ns) for path, found in stats.items()])
    fingerprint = hashlib.sha256(seen.encode()).hexdigest()
    if finished and meta.get("fingerprint", fingerprint) == fingerprint:  # older datasets have none
        return tell(folder, meta, FINISHED)
    if finished:
        say(f"{folder}: the text of --input has changed since it was made, so it is made anew")
    left_out += [f"{names.pop(path)} is empty" for path, found in stats.items() if not found.st_size]
    for line in left_out:
        say(f"left out: {line}")
    if not names:
        raise ValueError(f"--input: there is no text in {', '.join(source)}")
    write_texts(folder, tokenizer, names, source=source, fingerprint=fingerprint)


def find_files(given):
    """-> {file: its name below the given path, whose own place does not count}, [what was left out, and why]"""
    names, left_out = {}, []

    def files_under(folder, known):  # to the bottom, sorted, without hidden ones
        for path in sorted(path for path in folder.iterdir() if not path.name.startswith(".")):
            try:
                if not path.is_dir():
                    yield regular(path)
                elif folder.resolve().is_relative_to(path.resolve()) or path.resolve() in known:
                    left_out.append(f"{path} leads to a folder that is read already")
                else:
                    known.add(path.resolve())
                    yield from files_under(path, known)
            except (OSError, ValueError) as error:
                left_out.append(str(error))

    for path in given:
        root = Path(path)
        if not path:
            raise ValueError("--input: '' is not a file or folder")
        for file in files_under(root, {root.resolve()}) if root.is_dir() else [regular(root)]:
            names.setdefault(file.resolve(), root.name if file == root else file.relative_to(root).as_posix())
    return names, left_out


def write_texts(folder, tokenizer, names, **meta):
    """Make a dataset of text files, {path: name}. One is cut after nine tenths of its bytes; of several, whole ones, in
    the order of a hash of their names, go to validation as far as they fit into a tenth of the bytes."""
    tokenizer, sizes = load_tokenizer(tokenizer), {path: path.stat().st_size for path in names}
    advance = meter(str(folder), sum(sizes.values()))
    if len(names) == 1:
        ((path, size),) = sizes.items()
        with open(path, "rb") as file:
            place = file.seek(max(size * 9 // 10 - 3, 0))
            around = file.read(size * 9 // 10 + 1 - place)
        cut = place + max((i for i, byte in enumerate(around) if byte >> 6 != 0b10), default=0)  # a character's first
        train, val = [(path, 0, cut)], [(path, cut, size)]
    else:
        held, room = set(), sum(sizes.values()) // 10
        for path in sorted(names, key=lambda path: name_hash(names[path])):
            if sizes[path] <= room:
                held.add(path)
                room -= sizes[path]
        held = held or {min(names, key=sizes.get)}
        train, val = ([(path, 0, sizes[path]) for path in names if (path in held) == val] for val in (False, True))
    pieces = [(piece for span in spans for piece in tokens_of(read_text(*span, advance), tokenizer))
              for spans in (train, val)]
    write_dataset(folder, tokenizer.name, *pieces, **meta, documents=len(names))


def name_hash(name):
    """A document's name -> a number that is the same everywhere."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def read_text(path, begin, end, advance):
    """Yield the text between two places of a file, in blocks. Raises ValueError naming what is not UTF-8, and where."""
    decoder, data = codecs.getincrementaldecoder("utf-8")(), True
    with open(path, "rb") as file:
        file.seek(begin)
        while data:
            data = file.read(min(BLOCK, end - file.tell()))
            advance(len(data))
            try:
                yield decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:  # its object is what the block before left over, and data
                raise ValueError(f"{path} is not UTF-8: byte {error.object[error.start]:#04x} "
                                 f"at offset {file.tell() - len(error.object) + error.start}") from error


def write_dataset(folder, tokenizer, train, val, **meta):
    """Write two iterables of uint16 arrays, whole and beside what folder holds, then in its place."""
    folder, new = Path(folder), Path(folder, "new.part")
    shutil.rmtree(new, ignore_errors=True)  # an interrupted run's
    new.mkdir(parents=True)
    try:
        tokens = {"train": write_shards(new, "train", train), "val": write_shards(new, "val", val)}
        for split, n in tokens.items():
            if n < 2:
                raise ValueError(f"the text is too short: {n} token{'s' * (n != 1)} for {split}, at least 2 are needed")
        (folder / "meta.json").unlink(missing_ok=True)
        for old in [*folder.glob("train_[0-9]*.bin*"), *folder.glob("val_[0-9]*.bin*")]:
            old.unlink()
        for shard in new.iterdir():
            rename_whole(shard, folder / shard.name)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    meta = {"tokenizer": tokenizer, "vocab_size": VOCAB_SIZE[tokenizer], **meta, "tokens": tokens}
    write_meta(folder / "meta.json", meta)
    tell(folder, meta)


# -- the big corpora: FineWeb-Edu's shards, OpenWebText's archives ---------------------------------------------

def hub_url(source, path):
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"HF_ENDPOINT={endpoint} is not an address like https://huggingface.co")
    return f"{endpoint.rstrip('/')}/datasets/{source['source']}/resolve/{source['revision']}/{path}"


def ask(url, **headers):
    """-> requests.Response of any status, body not yet read. Raises OSError when none comes."""
    import requests
    from urllib3.util import Retry
    session = requests.Session()
    retry = Retry(8, connect=3, backoff_factor=BACKOFF, raise_on_status=False,
                  status_forcelist=(429, 500, 502, 503, 504))  # it heeds Retry-After
    for scheme in ("http://", "https://"):
        session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=retry))
    try:
        return session.get(url, stream=True, timeout=30, headers={"Accept-Encoding": "identity", **headers})
    except requests.RequestException as error:
        raise OSError(f"cannot reach {url} ({type(error).__name__}); "
                      "the same command goes on where this stopped") from error


def announced(answer):
    """-> (size of the whole file, its sha256) as far as the headers tell, else None. A redirect may know the hash."""
    size = answer.headers.get("Content-Length" if answer.status_code == 200 else "Content-Range", "").rpartition("/")[2]
    etags = [hop.headers.get("X-Linked-Etag") or hop.headers.get("ETag", "") for hop in (*answer.history, answer)]
    sha256 = re.search("[0-9a-f]{64}", " ".join(etags).lower())
    return int(size) if size.isdigit() else None, sha256 and sha256[0]


def bytes_in(path):
    return path.stat().st_size if path.exists() else 0


def download(url, path, advance, check=lambda part: None):
    """Fetch url as path, going on from what an earlier try left in path.part. advance is told the bytes that come;
    check(part) raises ValueError for wrong content. What is wrong is fetched once more, from its beginning.
    Raises OSError when network or server do not give the file, ValueError when they give a wrong one."""
    import requests
    part, fruitless, again = Path(f"{path}.part"), 0, True
    best = bytes_in(part)
    while fruitless < ATTEMPTS:
        time.sleep(BACKOFF * (2 ** fruitless - 1))
        have = max(bytes_in(part) - 1, 0)  # the last byte comes again, so that there always is something to ask for
        with ask(url, Range=f"bytes={have}-") as answer:
            status, (size, sha256) = answer.status_code, announced(answer)
            if status not in (200, 206, 416):
                raise OSError(f"the server answers {status} to {url}")
            goes_on = answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            answer.raw.enforce_content_length = ended = False  # or urllib3 drops the last piece of a broken-off body
            with open(part, "ab") as file, contextlib.suppress(requests.RequestException):
                advance(have * goes_on - file.tell())
                file.truncate(have * goes_on)
                for chunk in answer.iter_content(1 << 16) if goes_on or status == 200 else ():
                    advance(file.write(chunk))
                ended = True
        have = bytes_in(part)
        if ended if size is None else have >= size:
            try:
                if sha256 not in (None, hashlib.sha256(np.memmap(part)).hexdigest()):
                    raise ValueError(f"{url} arrived damaged: its sha256 is not the announced {sha256}")
                check(part)
                return rename_whole(part, path)
            except ValueError:
                part.unlink()
                advance(-have)
                if not again:
                    raise
                again = False
        fruitless = 0 if have > best else fruitless + 1
        best = max(best, have)
    raise OSError(f"{url} broke off {ATTEMPTS} times after {best} bytes; the same command goes on where this stopped")


def announce(folder, downloads, each, disk):
    """Say what is to come when `downloads`, paths of about `each` bytes, are fetched. -> bytes to come. Raises OSError
    where they and what is made of them, `disk` bytes in all, have no room."""
    there = sum(bytes_in(path) or bytes_in(Path(f"{path}.part")) for path in downloads)
    to_come, need = (max(int(nbytes) - there, 0) for nbytes in (each * len(downloads), disk))
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    say(f"{folder}: {to_come / 1e9:.3f} GB to download; {need / 1e9:.3f} GB of disk needed, {free / 1e9:.3f} GB free")
    if need > free:
        raise OSError(f"{folder} needs {need / 1e9:.3f} GB of disk, and only {free / 1e9:.3f} GB are free")
    return to_come


def prepare_fineweb_edu(shards):
    """Bring data/fineweb_edu/ to the validation shard and the first `shards` training shards. More may be there."""
    folder = DATA / "fineweb_edu"
    meta, finished = read_meta(folder, **FINEWEB_EDU)
    names = ["edu_fineweb_val_000000.bin"] + [f"edu_fineweb_train_{i + 1:06d}.bin" for i in range(shards)]
    urls = {folder / name: hub_url(FINEWEB_EDU, name) for name in names if not (folder / name).exists()}
    if finished and not urls:
        return tell(folder, meta, f", {meta['shards']} training shards{FINISHED}")
    advance = meter(str(folder), announce(folder, urls, FINEWEB_EDU_BYTES, FINEWEB_EDU_BYTES * len(urls)))
    if finished:
        rename_whole(folder / "meta.json", folder / "progress.json")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda path: download(urls[path], path, advance, read_shard), urls))
    tokens = {split: [len(read_shard(path)) for path in folder.glob(f"edu_fineweb_{split}_*.bin")] for split in SPLITS}
    meta = {**FINEWEB_EDU, "tokens": {split: sum(tokens[split]) for split in SPLITS}, "shards": len(tokens["train"])}
    write_meta(folder / "progress.json", meta)
    rename_whole(folder / "progress.json", folder / "meta.json")
    tell(folder, meta)


def prepare_openwebtext(subsets, workers, keep_raw):
    """Add subsets, a list of numbers, to data/openwebtext/."""
    folder, raw = DATA / "openwebtext", DATA / "openwebtext" / "raw"
    meta, finished = read_meta(folder, **OPENWEBTEXT)
    done = meta.get("subsets", {})
    missing = [f"{subset:02d}" for subset in subsets if f"{subset:02d}" not in done]
    if finished and not missing:
        return tell(folder, meta, f", {len(done)} of {OPENWEBTEXT_SUBSETS} subsets{FINISHED}")
    import lzma  # some Pythons have none, and GPT-2's files may be missing: that shows before gigabytes have come
    load_tokenizer("gpt2")
    archives = {subset: raw / f"urlsf_subset{subset}.tar" for subset in missing}
    at_once = len(missing) if keep_raw else 1
    announce(folder, archives.values(), OPENWEBTEXT_BYTES,
             OPENWEBTEXT_BYTES * (OPENWEBTEXT_GROWTH * len(missing) + at_once))
    if finished:
        rename_whole(folder / "meta.json", folder / "progress.json")
    for shard in folder.glob("openwebtext_*.bin*"):  # an interrupted run's
        if shard.name.split("_")[2] not in done:
            shard.unlink()
    raw.mkdir(exist_ok=True)
    for subset, archive in archives.items():
        if not archive.exists():
            url = hub_url(OPENWEBTEXT, f"subsets/{archive.name}")
            download(url, archive, meter(archive.name, OPENWEBTEXT_BYTES - bytes_in(Path(f"{archive}.part"))))
        done[subset] = tokenize_archive(archive, folder, subset, workers)
        if not keep_raw:
            archive.unlink()
        meta = {**OPENWEBTEXT, "documents": sum(part["documents"] for part in done.values()),
                "tokens": {split: sum(part["tokens"][split] for part in done.values()) for split in SPLITS},
                "subsets": dict(sorted(done.items()))}
        write_meta(folder / "progress.json", meta)
        tell(folder, meta, f", {len(done)} of {OPENWEBTEXT_SUBSETS} subsets")
    with contextlib.suppress(OSError):  # kept archives keep it
        raw.rmdir()
    rename_whole(folder / "progress.json", folder / "meta.json")


def tokenize_archive(archive, folder, subset, workers):
    """Write the shards of one archive. -> what meta.json says of it. Raises ValueError if it is not a whole tar."""
    counts, val = collections.Counter(documents=0, left_out=0), []
    advance = meter(f"{archive.name} to tokens", bytes_in(archive))

    def train(file):
        for tokens, n in in_order(tokenize_member, tar_files(file, advance), workers):
            counts.update(n)
            val.append(tokens["val"])
            yield tokens["train"]

    try:
        with open(archive, "rb") as file:
            tokens = {"train": write_shards(folder, f"openwebtext_train_{subset}", train(file)),
                      "val": write_shards(folder, f"openwebtext_val_{subset}", val)}
    except tarfile.TarError as error:
        raise ValueError(f"{archive} is not a whole tar archive ({error}): "
                         "delete it and run the command again") from error
    say(f"{archive.name}: left out {counts['left_out']:,} that are empty, broken, not UTF-8, or not regular files")
    return {"tokens": tokens, **counts}


def tar_files(file, advance=lambda nbytes: None):
    """Yield (name, bytes) of what an open tar holds besides folders; None for the bytes of what is no regular file, or
    too large. Raises tarfile.TarError for a tar that is broken or cut."""
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for entry in tar:
            plain = entry.isreg() and not entry.issparse() and entry.size <= MEMBER_BYTES
            if not entry.isdir():
                yield entry.name, tar.extractfile(entry).read() if plain else None
            advance(entry.size)
        file.seek(tar.offset)
        if file.read(512) != bytes(512):  # tarfile takes a damaged header, or none, for the end
            raise tarfile.ReadError("no end mark")


def tokenize_member(name, data):
    """One xz member of an archive -> {"train": uint16 array, "val": ...}, counts of documents and of what was left out.
    It depends on its arguments alone: that is why the number of workers does not show."""
    import lzma
    tokens, counts = {split: [np.empty(0, np.uint16)] for split in SPLITS}, collections.Counter()
    try:
        files = list(tar_files(io.BytesIO(lzma.open(io.BytesIO(data)).read(MEMBER_BYTES))))
    except (lzma.LZMAError, tarfile.TarError, EOFError, ValueError, OverflowError):
        files = [(name, None)]  # what comes before the damage is left out too: xz finds it only at a block's end
    for file, content in files:
        try:
            text = re.sub(r"\n\n\n+", "\n\n", (content or b"").decode()).strip()
        except UnicodeDecodeError:
            text = ""
        if text:
            split = "train" if name_hash(f"{name}/{file}") % VAL_ONE_IN else "val"
            blocks = (text[i:i + BLOCK] for i in range(0, len(text), BLOCK))
            tokens[split] += tokens_of(blocks, load_tokenizer("gpt2"))
        counts["documents" if text else "left_out"] += 1
    return {split: np.concatenate(arrays) for split, arrays in tokens.items()}, counts


def in_order(function, jobs, workers):
    """Yield function(*job) of each job, in order, from processes. Not many jobs are read ahead: an archive is large."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of multiprocessing's helper, when Ctrl-C ends this
    try:
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker) as pool:
            while batch := list(itertools.islice(jobs, 32 * workers)):
                if os.name != "nt":  # Ctrl-C waits; a process that starts here takes this over, and never hears it
                    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
                results = pool.map(function, *zip(*batch))
                if os.name != "nt":
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
                yield from results
    except BrokenExecutor as error:
        raise OSError("a worker process died, perhaps for want of memory: try fewer --workers; "
                      "the same command goes on where this stopped") from error


def start_worker():
    """Ctrl-C is the parent's to handle, on Windows too; and a worker whose parent was killed would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


# -- the command line ----------------------------------------------------------------------------------------

def subsets(text):
    """"0-2,5" -> [0, 1, 2, 5]"""
    chosen = set()
    for part in text.split(","):
        span = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        first, last = (int(span[1]), int(span[2] or span[1])) if span else (0, -1)
        if not first <= last < OPENWEBTEXT_SUBSETS:
            raise argparse.ArgumentTypeError(f"{text!r} is not like 5, 0-2 or 0,3, with numbers from 0 to 20")
        chosen.update(range(first, last + 1))
    return sorted(chosen)


def parse_args(argv):
    parser = argparse.ArgumentParser("prepare.py", argparse.SUPPRESS, __doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="pydocs", help="pydocs, openwebtext, fineweb_edu, or a name for --input")
    parser.add_argument("--input", nargs="+", metavar="PATH", help="UTF-8 text: files, and folders read to the bottom")
    parser.add_argument("--tokenizer", choices=("bytes", "gpt2"),
                        help="of pydocs and --input, default bytes; the corpora are gpt2")
    parser.add_argument("--workers", type=int, help="openwebtext: processes that tokenize, default one for each core")
    parser.add_argument("--subsets", type=subsets, help="openwebtext: archives, as 5, 0-2 or 0,3; default 0-20")
    parser.add_argument("--keep_raw", choices=("True", "False"), help="openwebtext: keep the archives, default False")
    parser.add_argument("--shards", type=int, help="fineweb_edu: training shards of 100M tokens and 200 MB, default 10")
    args = parser.parse_args(argv)

    known = ("pydocs", "openwebtext", "fineweb_edu")
    if args.input and args.dataset in (*known, "tasks"):  # data/tasks/ is for evaluation tasks
        parser.error(f"--input makes a dataset of its own: name it with --dataset=NAME, which cannot be {args.dataset}")
    if not args.input and args.dataset not in known:
        parser.error(f"--dataset={args.dataset} is none of {', '.join(known)}, and there is no --input to make it from")
    if not re.fullmatch(r"\w[\w.-]*", args.dataset):
        parser.error(f"--dataset={args.dataset} is not a plain folder name")
    for flag in ("workers", "subsets", "keep_raw", "shards"):
        dataset = "fineweb_edu" if flag == "shards" else "openwebtext"
        if getattr(args, flag) is not None and args.dataset != dataset:
            parser.error(f"--{flag} belongs to --dataset={dataset}, not to --dataset={args.dataset}")
    if args.tokenizer == "bytes" and args.dataset in known[1:]:
        parser.error(f"--tokenizer=bytes does not go with --dataset={args.dataset}, which is gpt2")
    for flag in ("workers", "shards"):
        if getattr(args, flag) not in (None, *range(1, 1001)):  # the hub has 1000 training shards
            parser.error(f"--{flag}={getattr(args, flag)} is not from 1 to 1000")
    return args


def main(argv=None):
    """-> exit status."""
    args = parse_args(argv)
    try:
        if args.dataset == "openwebtext":
            workers = args.workers or min(os.cpu_count() or 1, 61)  # 61 is as many as Windows starts
            prepare_openwebtext(args.subsets or range(OPENWEBTEXT_SUBSETS), workers, args.keep_raw == "True")
        elif args.dataset == "fineweb_edu":
            prepare_fineweb_edu(args.shards or 10)
        elif args.input:
            prepare_input(args.dataset, args.input, args.tokenizer or "bytes")
        else:
            prepare_pydocs(args.tokenizer or "bytes")
        return 0
    except ImportError as error:
        message = f"{error.name} is missing: pip install {error.name}, or use a Python that was built with it"
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except (ValueError, MemoryError) as error:
        message = str(error) or "out of memory"
    print(f"prepare.py: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a file's name need not fit the terminal's encoding
    sys.exit(main())
