"""Text -> token shards, data/<dataset>/.

    python prepare.py                                            pydocs: the manual inside CPython, no download
    python prepare.py --dataset=NAME --input FILE_OR_FOLDER ...  your own UTF-8 text
    python prepare.py --dataset=openwebtext --subsets=0-2        OpenWebText, 21 archives, or some of them
    python prepare.py --dataset=fineweb_edu --shards=10          FineWeb-Edu, already tokenized
    python prepare.py --dataset=tasks                            the questions of eight downstream tasks

A shard (llm.c's format) is 256 little-endian int32 (magic, version, number of tokens, zeros), then uint16 tokens.
`*train*.bin` and `*val*.bin` are the two splits. meta.json describes a dataset and is written last: a folder without
it is not finished. Running the same command again goes on where an interrupted one stopped.

Every file is written or downloaded under NAME.part, and renamed when it is whole. The big corpora note what they have
in progress.json, which gets the name meta.json when all that was asked for is there. Asking for more later gives it
the first name back, until that is there too. OpenWebText's shards are made archive by archive and named after it
(openwebtext_train_05_000.bin), so their bytes depend neither on the order nor on the choice of archives.

data/tasks/<task>.jsonl holds one question a line, as lm-evaluation-harness would put it to a model:
    {"context": text, "choices": [text, ...], "label": which choice is right, "example": text}
A choice follows its context as it is, the space between them included. Where each choice has a context of its own
(WinoGrande), "context" is a list. "example" is a solved question that stands before the context in a 1-shot prompt.
"""

import argparse
import collections
import contextlib
import functools
import hashlib
import io
import json
import os
import platform
import random
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

DATA = Path("data")
MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024
SHARD_TOKENS = 100_000_000
PIECE_CHARS = 1_000_000  # of a document that are tokenized at once: bounds the Python lists
MEMBER_BYTES = 1 << 28  # an archive's member, packed or unpacked, is held in memory; real ones have 2 MB
VAL_ONE_IN = 2000  # OpenWebText's documents that go to validation

OPENWEBTEXT = ("Skylion007/openwebtext", "8cfd553694d06979cfec29248b200468786f0294")
OPENWEBTEXT_SUBSETS, OPENWEBTEXT_BYTES, OPENWEBTEXT_GROWTH = 21, 630e6, 1.4  # growth: shards / archive, in bytes
FINEWEB_EDU = ("karpathy/fineweb-edu-100B-gpt2-token-shards", "a33f75d78c7f74236fb03754ec1eb3cc77507d64")
FINEWEB_EDU_SHARDS, FINEWEB_EDU_BYTES = 1000, HEADER_BYTES + 2 * 100_000_000

TIMEOUT = 30  # seconds without a byte
RETRIES, ATTEMPTS = 8, 6  # of a request, and of a body that breaks off without having come further
BACKOFF = 1.0  # seconds, doubled each time
AT_ONCE = 4  # downloads of small files
PAGE_ROWS = 100  # that the rows service gives at once, at most


# -- shards and tokenizers: what train.py and sample.py import -----------------------------------------------

@contextlib.contextmanager
def whole_file(path):
    """A binary file that gets the name path once all of it is on the disk. Raises OSError naming path."""
    part = f"{path}.part"
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(part)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_shard(path, tokens):
    """Write a sequence of token ids, each in 0..65535, as one shard. Raises ValueError, OSError."""
    tokens = np.asarray(tokens)
    if tokens.dtype != np.uint16 and tokens.size and not 0 <= tokens.min() <= tokens.max() <= 65535:
        raise ValueError(f"{path}: token ids from {tokens.min()} to {tokens.max()} do not fit in 16 bits")
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    with whole_file(path) as file:
        file.write(header.data)
        file.write(np.ascontiguousarray(tokens, "<u2").data)


def read_shard(path):
    """-> np.memmap (n,) uint16; only the header is read. Raises OSError, or ValueError naming path and its fault."""
    with open(path, "rb") as file:
        head, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
    magic, version, count = (int(n) for n in np.frombuffer(head.ljust(HEADER_BYTES, b"\0"), "<i4")[:3])
    need = HEADER_BYTES + 2 * count
    if not size:
        raise ValueError(f"{path} is empty")
    if magic != MAGIC:
        raise ValueError(f"{path} is not a token shard: its magic number is {magic}, not {MAGIC}")
    if version != VERSION:
        raise ValueError(f"{path} is a shard of version {version}, not {VERSION}")
    if size != need:
        raise ValueError(f"{path} is {'cut' if size < need else 'padded'}: "
                         f"{count} tokens need {need} bytes, it has {size}")
    if not count:
        raise ValueError(f"{path} is empty: it holds no tokens")
    return np.memmap(path, "<u2", "r", offset=HEADER_BYTES, shape=(count,))


@functools.cache
def load_tokenizer(name):
    """"bytes" or "gpt2" -> an object with
        .name, .vocab_size     256, or 50304: GPT-2's 50257 padded to a multiple of 128
        .start                 list of the ids that begin a document: [], or [50256], end-of-text
        .encode(text)          list of ids; nothing in the text is taken for a special token
        .decode(ids)           bytes, not always whole UTF-8; ids without text give none
    Raises ValueError for another name, OSError when GPT-2's files cannot be had, ImportError without tiktoken."""
    if name == "bytes":
        return SimpleNamespace(name=name, vocab_size=256, start=[], decode=lambda ids: bytes(int(i) for i in ids if i < 256),
                               encode=lambda text: list(text.encode("utf-8", "replace")))
    if name != "gpt2":
        raise ValueError(f"tokenizer={name!r} is neither 'bytes' nor 'gpt2'")
    import tiktoken
    try:
        bpe = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:
        raise OSError("GPT-2's tokenizer cannot be loaded: tiktoken needs the network once, or its two files in the "
                      f"folder that TIKTOKEN_CACHE_DIR names ({type(error).__name__})") from error
    return SimpleNamespace(name=name, vocab_size=50304, start=[bpe.eot_token], encode=bpe.encode_ordinary,
                           decode=lambda ids: bpe.decode_bytes([int(i) for i in ids if i < bpe.eot_token]))


# -- from text to shards -------------------------------------------------------------------------------------

def tokens_of(text, tokenizer, advance=lambda nbytes: None):
    """Yield one document's tokens as uint16 arrays, start ids first. advance is told the bytes of text behind it."""
    yield np.array(tokenizer.start, np.uint16)
    begin = 0
    while begin < len(text):
        # No token of GPT-2 spans this place: white space opens a token, and never follows anything else in one.
        place = re.compile(r"(?<=\S)[ \n]").search(text, begin + PIECE_CHARS)
        end = place.start() if place else len(text)
        yield np.array(tokenizer.encode(text[begin:end]), np.uint16)
        advance(len(text[begin:end].encode("utf-8", "replace")))
        begin = end


def write_shards(folder, stem, pieces):
    """Write an iterable of uint16 arrays as folder/stem_000.bin, _001, ..., SHARD_TOKENS in each. -> their number."""
    shard, filled, total = np.empty(SHARD_TOKENS, np.uint16), 0, 0

    def flush():
        write_shard(folder / f"{stem}_{(total - 1) // SHARD_TOKENS:03d}.bin", shard[:filled])

    for piece in pieces:
        while len(piece):
            room = piece[:SHARD_TOKENS - filled]
            shard[filled:filled + len(room)] = room
            piece, filled, total = piece[len(room):], filled + len(room), total + len(room)
            if filled == SHARD_TOKENS:
                flush()
                filled = 0
    if filled:
        flush()
    return total


def say(text, end="\n"):
    print(text.ljust(79) if sys.stdout.isatty() else text, end=end, flush=True)


def size_of(nbytes):
    return f"{nbytes / 1e9:,.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:,.1f} MB"


def meter(what, total, done=0):
    """-> advance(nbytes), which threads may share and which shows now and then how far a long job is."""
    begin = last = time.monotonic()
    first, lock = done, threading.Lock()

    def advance(nbytes):
        nonlocal done, last
        with lock:
            done, now = done + nbytes, time.monotonic()
            if now - last < (0.5 if sys.stdout.isatty() else 15) or now - begin < 2:
                return
            last, speed = now, max(done - first, 1) / (now - begin)
            minutes, seconds = divmod(int(max(total - done, 0) / speed), 60)
            say(f"{what}: {size_of(done)} of {size_of(total)}, {speed / 1e6:.1f} MB/s, {minutes}:{seconds:02d} left",
                end="\r" if sys.stdout.isatty() else "\n")

    return advance


# -- what a dataset's folder says of itself ------------------------------------------------------------------

def read_meta(folder, **wanted):
    """-> (what folder holds, is it finished), ({}, False) for nothing. Raises ValueError if it is not what is wanted."""
    for path in (folder / "meta.json", folder / "progress.json"):
        if path.exists():
            try:
                meta = dict(json.loads(path.read_text("utf-8")))
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


def summary(folder, meta):
    documents = f"{meta['documents']:,} document{'s' * (meta['documents'] != 1)}, " if "documents" in meta else ""
    return f"{folder}: {documents}{meta['tokens']['train']:,} train and {meta['tokens']['val']:,} val tokens"


def announce(folder, download, disk):
    """Say what is to come, in bytes; raise OSError where it cannot fit."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    say(f"{folder}: {size_of(download)} to download; {size_of(disk)} of disk needed, {size_of(free)} free")
    if disk > free:
        raise OSError(f"{folder} needs {size_of(disk)} of disk, and only {size_of(free)} are free")


# -- pydocs and a person's own text --------------------------------------------------------------------------

def write_texts(folder, tokenizer, texts, nbytes, **meta):
    """Write the two iterables of documents, texts["train"] and texts["val"], as a dataset."""
    folder.mkdir(parents=True, exist_ok=True)
    advance = meter(str(folder), nbytes)

    def clear():
        for split in texts:
            for leftover in folder.glob(f"{split}_[0-9]*.bin*"):
                leftover.unlink()

    clear()
    # The names do not carry the dataset's own, which might contain "train" or "val".
    tokens = {split: write_shards(folder, split, (piece for text in texts[split]
                                                  for piece in tokens_of(text, tokenizer, advance)))
              for split in texts}
    for split, n in tokens.items():
        if n < 2:
            clear()
            raise ValueError(f"the text is too short: {n} token{'s' * (n != 1)} for {split}, at least 2 are needed")
    meta = {"tokenizer": tokenizer.name, "vocab_size": tokenizer.vocab_size, **meta, "tokens": tokens}
    write_meta(folder / "meta.json", meta)
    say(summary(folder, meta))


def cut_text(text):
    """-> the first nine tenths of a text's bytes, the rest; no character is split."""
    data = text.encode()
    head = data[:len(data) * 9 // 10].decode(errors="ignore")
    return {"train": [head], "val": [text[len(head):]]}


def prepare_pydocs(tokenizer="bytes"):
    """Write data/pydocs/, unless it is there. Raises ValueError or OSError with a sentence for the user."""
    folder = DATA / "pydocs"
    meta, finished = read_meta(folder, tokenizer=tokenizer)
    if finished:
        return say(f"{summary(folder, meta)}; finished, nothing to do; delete the folder to make it anew")
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("this Python comes without its manual (pydoc_data); install its documentation package, "
                         "or make a dataset of your own text with --input") from error
    text = "\n\n\n".join(topics[name].rstrip("\n") for name in sorted(topics)) + "\n"
    write_texts(folder, load_tokenizer(tokenizer), cut_text(text), len(text.encode()),
                source=f"pydoc_data.topics of Python {platform.python_version()}", documents=1)


def files_under(path):
    """-> path itself, or a folder's files to the bottom, sorted, without hidden ones and links in a circle."""
    if not path.is_dir():
        return [path]
    entries = [entry for entry in sorted(path.iterdir())
               if not entry.name.startswith(".") and not path.resolve().is_relative_to(entry.resolve())]
    return [file for entry in entries for file in files_under(entry)]


def read_text(path):
    """Raises ValueError naming path and place if it is not UTF-8."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {error.object[error.start]:#04x} "
                         f"at offset {error.start}") from error


def prepare_input(name, paths, tokenizer):
    """Write data/<name>/ from UTF-8 files and folders. One document is cut 90/10; of several, whole ones, in the order
    of a hash of their names, go to validation as far as they fit into a tenth of the bytes."""
    folder, source = DATA / name, [Path(path).as_posix() for path in paths]
    meta, finished = read_meta(folder, tokenizer=tokenizer, source=source)
    if finished:
        return say(f"{summary(folder, meta)}; finished, nothing to do; delete the folder to make it anew")
    names = {}  # of each file: below the folder that was given, so that its place does not count
    for given in paths:
        for path in files_under(Path(given)):
            if not given or not path.is_file():  # a pipe would be waited for
                raise ValueError(f"--input: {str(path) if given else given!r} is not a file or folder")
            names.setdefault(path.resolve(), path.relative_to(given).as_posix() if path != Path(given) else path.name)
    sizes = {path: path.stat().st_size for path in names}
    empty = [names[path] for path in names if not sizes[path]]
    if empty:
        say(f"left out {len(empty)} empty file{'s' * (len(empty) != 1)}: "
            f"{', '.join(empty[:3])}{', ...' * (len(empty) > 3)}")
    files = [path for path in names if sizes[path]]
    if not files:
        raise ValueError(f"--input: there is no text in {', '.join(source)}")
    total = sum(sizes.values())
    if len(files) == 1:
        texts = cut_text(read_text(files[0]))
    else:
        val, room = set(), total // 10
        for path in sorted(files, key=lambda path: name_hash(names[path])):
            if sizes[path] <= room:
                val.add(path)
                room -= sizes[path]
        val = val or {min(files, key=sizes.get)}
        texts = {"train": (read_text(path) for path in files if path not in val),
                 "val": (read_text(path) for path in files if path in val)}
    write_texts(folder, load_tokenizer(tokenizer), texts, total, source=source, documents=len(files))


def name_hash(name):
    """A document's name -> a number that is the same everywhere."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8], "big")


# -- downloads -----------------------------------------------------------------------------------------------

def hub_url(repo, path):
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"HF_ENDPOINT={endpoint} is not an address like https://huggingface.co")
    return f"{endpoint.rstrip('/')}/datasets/{repo[0]}/resolve/{repo[1]}/{path}"


def ask(method, url, retries=RETRIES, **headers):
    """-> requests.Response of any status, body not yet read. Raises OSError when none comes."""
    import requests
    from urllib3.util import Retry
    session = requests.Session()
    retry = Retry(retries, backoff_factor=BACKOFF, raise_on_status=False,
                  status_forcelist=(429, 500, 502, 503, 504))  # it heeds Retry-After
    session.mount("http://", requests.adapters.HTTPAdapter(max_retries=retry))
    session.mount("https://", requests.adapters.HTTPAdapter(max_retries=retry))
    try:
        return session.request(method, url, stream=True, timeout=TIMEOUT, allow_redirects=True,
                               headers={"Accept-Encoding": "identity", **headers})
    except requests.RequestException as error:
        raise OSError(f"cannot reach {url} ({type(error).__name__}); "
                      "the same command goes on where this stopped") from error


def announced(answer):
    """-> (size of the whole file, its sha256) as far as the headers tell, else None. The hub's redirect knows best."""
    linked = [r.headers for r in answer.history if "X-Linked-Size" in r.headers or "X-Linked-Etag" in r.headers]
    linked = linked[0] if linked else {}
    whole = answer.headers.get("Content-Length" if answer.status_code == 200 else "Content-Range", "")
    size = linked.get("X-Linked-Size", whole.rpartition("/")[2])
    etag = linked.get("X-Linked-Etag", answer.headers.get("ETag", "")).removeprefix("W/").strip('"').lower()
    return int(size) if size.isdigit() else None, etag if re.fullmatch("[0-9a-f]{64}", etag) else None


def remote_size(url, guess):
    """Bytes to come from url; a guess for servers that do not tell. Raises OSError when url cannot be had."""
    with ask("HEAD", url, retries=3) as answer:
        if answer.status_code in (401, 403, 404, 410):
            raise OSError(f"the server answers {answer.status_code} to {url}")
        return announced(answer)[0] or int(guess)


def check_download(part, url, size, sha256):
    """Raises ValueError if part is not what was announced, as far as that is known."""
    if size is not None and part.stat().st_size != size:
        raise ValueError(f"{url} is {size} bytes long, but {part.stat().st_size} came")
    if sha256:
        digest = hashlib.sha256()
        with open(part, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        if digest.hexdigest() != sha256:
            raise ValueError(f"{url} arrived damaged: its sha256 is not the announced {sha256}")


def download(url, path, advance, check=lambda part: None):
    """Fetch url as path, going on from what an earlier try left in path.part. advance is told the bytes that come;
    check(part) raises ValueError for wrong content. Raises OSError when network or server do not give the file,
    ValueError when they give a wrong one."""
    import requests
    part = Path(f"{path}.part")
    best = have = part.stat().st_size if part.exists() else 0
    fresh, fruitless = False, 0  # fresh: all of part was written by this call
    while fruitless < ATTEMPTS:
        time.sleep(BACKOFF * (2 ** fruitless - 1))
        fresh, ended = fresh or not have, False
        with ask("GET", url, **({"Range": f"bytes={have}-"} if have else {})) as answer:
            status, (size, sha256) = answer.status_code, announced(answer)
            asked = answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            if status == 200 or status == 206 and asked:
                if status == 200:  # from the beginning, asked for or not
                    advance(-have)
                    have, fresh = 0, True
                answer.raw.enforce_content_length = False  # or urllib3 drops the last piece of a broken-off body
                with open(part, "ab" if have else "wb") as file, contextlib.suppress(requests.RequestException):
                    for chunk in answer.iter_content(1 << 16):
                        file.write(chunk)
                        have += len(chunk)
                        advance(len(chunk))
                    ended = True
            elif status == 416 and size == have:  # nothing is left to send
                ended = True
            elif status in (206, 416):  # another range than was asked for
                part.unlink(missing_ok=True)
                advance(-have)
                have = 0
            else:
                raise OSError(f"the server answers {status} to {url}")
        if ended if size is None else have >= size:
            try:
                check_download(part, url, size, sha256)
                check(part)
                return os.replace(part, path)
            except ValueError:
                part.unlink()
                if fresh:
                    raise
                advance(-have)
                have = 0
        fruitless = 0 if have > best else fruitless + 1
        best = max(best, have)
    raise OSError(f"{url} broke off {ATTEMPTS} times after {best} bytes; the same command goes on where this stopped")


def download_all(urls, count, check):
    """Download urls, {path: url}, a few at a time. count and check as in download, whose exceptions end it all."""
    from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
    pool, stop = ThreadPoolExecutor(AT_ONCE), threading.Event()

    def advance(nbytes):
        if stop.is_set():
            raise OSError("stopped")
        count(nbytes)

    try:
        waiting = {pool.submit(download, url, path, advance, check) for path, url in urls.items()}
        while waiting:
            done, waiting = wait(waiting, timeout=1, return_when=FIRST_EXCEPTION)  # on Windows Ctrl-C comes between
            for job in done:
                job.result()
    except BaseException as error:
        stop.set()
        pool.shutdown(wait=not isinstance(error, KeyboardInterrupt), cancel_futures=True)
        raise


# -- OpenWebText ---------------------------------------------------------------------------------------------

def tar_files(file):
    """Yield (name, bytes) of what an open tar holds besides folders; None instead of bytes for what is no regular file or
    too large. Raises tarfile.TarError for a tar that is broken or cut."""
    import tarfile
    with tarfile.open(fileobj=file, mode="r:") as tar:
        for entry in tar:
            plain = entry.isreg() and not entry.issparse() and entry.size <= MEMBER_BYTES
            if not entry.isdir():
                yield entry.name, tar.extractfile(entry).read() if plain else None
        file.seek(tar.offset)
        if file.read(512) != bytes(512):  # tarfile takes a damaged header, or none, for the end
            raise tarfile.ReadError("no end mark")


def tokenize_member(name, data):
    """One xz member of an archive -> {"train": uint16 array, "val": ...}, counts of documents and of what was left out.
    It depends on its arguments alone: that is why the number of workers does not show."""
    import lzma
    import tarfile
    tokens, counts = {"train": [np.empty(0, np.uint16)], "val": [np.empty(0, np.uint16)]}, collections.Counter()
    try:
        documents = list(tar_files(io.BytesIO(lzma.open(io.BytesIO(data)).read(MEMBER_BYTES))))
    except (lzma.LZMAError, tarfile.TarError, EOFError, ValueError, OverflowError):
        # What comes before the damage is left out too: xz finds it only at a block's end.
        documents, counts["broken xz members"] = [], 1
    for file, content in documents:
        try:
            text = content and re.sub(r"\n\n\n+", "\n\n", content.decode()).strip()
        except UnicodeDecodeError:
            counts["documents that are not UTF-8"] += 1
            continue
        if text:
            split = "train" if name_hash(f"{name}/{file}") % VAL_ONE_IN else "val"
            tokens[split] += tokens_of(text, load_tokenizer("gpt2"))
            counts["documents"] += 1
        else:
            counts["members that are not regular files" if text is None else "empty documents"] += 1
    return {split: np.concatenate(arrays) for split, arrays in tokens.items()}, counts


def start_worker():
    """Ctrl-C is the parent's to handle; and a worker whose parent was killed would wait for ever."""
    import multiprocessing
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def in_order(function, jobs, workers):
    """Yield function(*job) of each job, in order, from processes; only a few jobs are read ahead."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker)
    waiting, handler = collections.deque(), signal.getsignal(signal.SIGINT)
    try:
        for job in jobs:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # for a process that starts here, until it can do so itself
            waiting.append(pool.submit(function, *job))
            signal.signal(signal.SIGINT, handler)
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise OSError("a worker process died, perhaps for want of memory: try fewer --workers; "
                      "the same command goes on where this stopped") from error
    finally:
        signal.signal(signal.SIGINT, handler)
        pool.shutdown(cancel_futures=True)


def tokenize_archive(archive, folder, subset, workers):
    """Write the shards of one archive. -> what meta.json says of it. Raises ValueError if archive is not a whole tar."""
    import tarfile
    counts, val = collections.Counter(), []
    advance = meter(f"{archive.name} to tokens", archive.stat().st_size)

    def jobs(file):
        for name, data in tar_files(file):
            if data is None:
                counts["members that are not regular files"] += 1
            else:
                advance(len(data))
                yield name, data

    def train(file):
        for tokens, n in in_order(tokenize_member, jobs(file), workers):
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
    return {"documents": counts.pop("documents", 0), "tokens": tokens, "left_out": dict(sorted(counts.items()))}


def prepare_openwebtext(subsets, workers, keep_raw):
    """Add subsets, a list of numbers, to data/openwebtext/."""
    try:
        import lzma  # noqa: F401
    except ImportError as error:
        raise ValueError("this Python was built without lzma, which OpenWebText's archives need") from error
    folder, raw = DATA / "openwebtext", DATA / "openwebtext" / "raw"
    source = {"tokenizer": "gpt2", "vocab_size": 50304, "source": OPENWEBTEXT[0], "revision": OPENWEBTEXT[1]}
    meta, finished = read_meta(folder, **source)
    done = meta.get("subsets", {})
    missing = [f"{subset:02d}" for subset in subsets if f"{subset:02d}" not in done]
    if finished and not missing:
        return say(f"{summary(folder, meta)}, {len(done)} of {OPENWEBTEXT_SUBSETS} subsets; "
                   "finished, nothing to do; delete the folder to make it anew")

    load_tokenizer("gpt2")  # fails here rather than after gigabytes
    archives = {subset: raw / f"urlsf_subset{subset}.tar" for subset in missing}
    urls = {subset: hub_url(OPENWEBTEXT, f"subsets/{archives[subset].name}") for subset in missing}
    sizes = {subset: path.stat().st_size if path.exists() else remote_size(urls[subset], OPENWEBTEXT_BYTES)
             for subset, path in archives.items()}
    there = {subset: bytes_there(path) for subset, path in archives.items()}
    kept = sum(sizes.values()) if keep_raw else max(sizes.values(), default=0)
    announce(folder, sum(sizes.values()) - sum(there.values()),
             int(OPENWEBTEXT_GROWTH * sum(sizes.values())) + max(kept - sum(there.values()), 0))
    raw.mkdir(exist_ok=True)
    if finished:
        os.replace(folder / "meta.json", folder / "progress.json")
    for shard in folder.glob("openwebtext_*.bin*"):  # an interrupted run's
        if shard.name.split("_")[2] not in done:
            shard.unlink()

    for subset, archive in archives.items():
        if not archive.exists():
            download(urls[subset], archive, meter(archive.name, sizes[subset], there[subset]))
        done[subset] = tokenize_archive(archive, folder, subset, workers)
        if not keep_raw:
            archive.unlink()
        done = dict(sorted(done.items()))
        left_out = sum((collections.Counter(part["left_out"]) for part in done.values()), collections.Counter())
        meta = {**source, "documents": sum(part["documents"] for part in done.values()),
                "tokens": {split: sum(part["tokens"][split] for part in done.values())
                           for split in ("train", "val")},
                "left_out": dict(sorted(left_out.items())), "subsets": done}
        write_meta(folder / "progress.json", meta)
        say(f"{summary(folder, meta)}, {len(done)} of {OPENWEBTEXT_SUBSETS} subsets")
    os.replace(folder / "progress.json", folder / "meta.json")
    with contextlib.suppress(OSError):  # kept archives keep it
        raw.rmdir()
    for kind, n in meta["left_out"].items():
        say(f"left out: {n:,} {kind}")
    say(summary(folder, meta))


def bytes_there(path):
    """Bytes of path that need not be downloaded any more."""
    return next((p.stat().st_size for p in (path, Path(f"{path}.part")) if p.exists()), 0)


# -- FineWeb-Edu ---------------------------------------------------------------------------------------------

def prepare_fineweb_edu(shards):
    """Bring data/fineweb_edu/ to the validation shard and the first `shards` training shards."""
    from concurrent.futures import ThreadPoolExecutor
    folder = DATA / "fineweb_edu"
    source = {"tokenizer": "gpt2", "vocab_size": 50304, "source": FINEWEB_EDU[0], "revision": FINEWEB_EDU[1]}
    meta, finished = read_meta(folder, **source)
    if finished and shards <= meta["shards"]:
        return say(f"{summary(folder, meta)}, {meta['shards']} training shards; "
                   "finished, nothing to do; delete the folder to make it anew")

    shards = max(shards, meta.get("shards", 0))
    names = ["edu_fineweb_val_000000.bin"] + [f"edu_fineweb_train_{i + 1:06d}.bin" for i in range(shards)]
    paths = {folder / name: hub_url(FINEWEB_EDU, name) for name in names if not (folder / name).exists()}
    total = sum(ThreadPoolExecutor(AT_ONCE).map(lambda url: remote_size(url, FINEWEB_EDU_BYTES), paths.values()))
    there = sum(bytes_there(path) for path in paths)
    announce(folder, total - there, total - there)
    if finished:
        os.replace(folder / "meta.json", folder / "progress.json")
    for shard in folder.glob("edu_fineweb_*.bin*"):  # an interrupted run's that wanted more
        if shard.name.removesuffix(".part") not in names:
            shard.unlink()

    download_all(paths, meter(str(folder), total, there), read_shard)
    lengths = {name: len(read_shard(folder / name)) for name in names}
    meta = {**source, "tokens": {split: sum(n for name, n in lengths.items() if split in name)
                                 for split in ("train", "val")}, "shards": shards}
    write_meta(folder / "progress.json", meta)
    os.replace(folder / "progress.json", folder / "meta.json")
    say(summary(folder, meta))


# -- downstream tasks ----------------------------------------------------------------------------------------
# The templates of lm-evaluation-harness 0.4.13. Each takes a row of the source and gives the context, or a list of one
# for each choice; the choices; and the right one's index. Strings are joined by +, which fails where a cell is missing.

def arc(row):
    """tasks/arc/arc_easy.yaml, arc_challenge.yaml, version 1.0. The labels are A to D in most rows, 1 to 4 in some."""
    choices = row["choices"]
    return "Question: " + row["question"] + "\nAnswer:", choices["text"], choices["label"].index(row["answerKey"])


def hellaswag(row):
    """tasks/hellaswag/hellaswag.yaml and utils.py, version 1.0. Brackets are what WikiHow's layout left in the text."""
    def clean(text):
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")
    context = row["activity_label"] + ": " + row["ctx_a"] + " " + row["ctx_b"].capitalize()
    return clean(context), [clean(ending) for ending in row["endings"]], int(row["label"])


def openbookqa(row):
    """tasks/openbookqa/openbookqa.yaml, version 1.0"""
    choices = row["choices"]
    return row["question_stem"], choices["text"], choices["label"].index(row["answerKey"].lstrip())


def piqa(row):
    """tasks/piqa/piqa.yaml, version 1.0"""
    return "Question: " + row["goal"] + "\nAnswer:", [row["sol1"], row["sol2"]], row["label"]


def sciq(row):
    """tasks/sciq/sciq.yaml, version 1.0. The right answer always comes last."""
    context = row["support"].lstrip() + "\nQuestion: " + row["question"] + "\nAnswer:"
    return context, [row[name] for name in ("distractor1", "distractor2", "distractor3", "correct_answer")], 3


def social_iqa(row):
    """tasks/siqa/siqa.yaml, version 0.0"""
    context = "Q: " + row["context"] + " " + row["question"] + "\nA:"
    return context, [row["answerA"], row["answerB"], row["answerC"]], int(row["label"]) - 1


def winogrande(row):
    """tasks/winogrande/default.yaml and preprocess_winogrande.py, version 1.0. The candidates stand in the contexts,
    and what is scored after each is the same end of the sentence: partial evaluation, arXiv 1806.02847."""
    before, after = row["sentence"].split("_", 1)
    return [before + row["option1"], before + row["option2"]], [after.strip()] * 2, ("1", "2").index(row["answer"])


TASKS = {  # name in the harness: (template, dataset on the hub, its configuration, the split that is evaluated)
    "arc_challenge": (arc, "allenai/ai2_arc", "ARC-Challenge", "test"),
    "arc_easy": (arc, "allenai/ai2_arc", "ARC-Easy", "test"),
    "hellaswag": (hellaswag, "Rowan/hellaswag", "default", "validation"),
    "openbookqa": (openbookqa, "allenai/openbookqa", "main", "test"),
    "piqa": (piqa, "baber/piqa", "default", "validation"),
    "sciq": (sciq, "allenai/sciq", "default", "test"),
    "social_iqa": (social_iqa, "lighteval/siqa", "default", "validation"),
    "winogrande": (winogrande, "allenai/winogrande", "winogrande_xl", "validation"),
}


def page_urls(task, split, offsets):
    """-> {path: url} of the pages of rows that begin at the offsets. Raises ValueError for a bad HF_DATASETS_SERVER."""
    from urllib.parse import urlencode
    server = os.environ.get("HF_DATASETS_SERVER") or "https://datasets-server.huggingface.co"
    if not server.startswith(("http://", "https://")):
        raise ValueError(f"HF_DATASETS_SERVER={server} is not an address like https://datasets-server.huggingface.co")
    _, dataset, config, _ = TASKS[task]
    query = dict(dataset=dataset, config=config, split=split, length=PAGE_ROWS)
    return {DATA / "tasks" / "raw" / f"{task}-{split}-{offset:06d}.json":
            f"{server.rstrip('/')}/rows?{urlencode({**query, 'offset': offset}, safe='/')}" for offset in offsets}


def read_page(path):
    """-> (rows of a page, rows in the whole split). Raises ValueError for what is no page or not all of it."""
    split, offset = re.match(r"(.+)-(\d+)\.json", path.name).groups()
    source = f"the rows service, asked for {split} from row {int(offset)} on,"
    try:
        page = json.loads(path.read_text("utf-8"))
        rows, total = [dict(entry["row"]) for entry in page["rows"]], page["num_rows_total"]
        cut = any(entry.get("truncated_cells") for entry in page["rows"])
        whole = 0 < total and len(rows) == min(PAGE_ROWS, total - int(offset))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{source} sent no page of rows ({type(error).__name__}: {error})") from error
    if cut:
        raise ValueError(f"{source} cut long cells short, so its rows cannot be used")
    if not whole:
        raise ValueError(f"{source} sent {len(rows)} of {total} rows in all, and {PAGE_ROWS} or the rest were due")
    return rows, total


def pose(task, row):
    """A row of a task's source -> (a context for each choice, the choices with the space before them, the label).
    Raises ValueError if it is not such a row or has no label."""
    try:
        context, choices, label = TASKS[task][0](row)
        choices = [" " + choice for choice in choices]
        contexts = context if isinstance(context, list) else [context] * len(choices)
        "".join(contexts)  # TypeError for what is not text
        if type(label) is not int or not 0 <= label < len(choices):
            raise ValueError(f"label {label!r}")
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        text = json.dumps(row)
        raise ValueError(f"{TASKS[task][1]} has a row that is malformed or has no label ({type(error).__name__}: "
                         f"{error}): {text[:200]}{'...' * (len(text) > 200)}") from error
    return contexts, choices, label


def draw_examples(rows, pool, split):
    """Yield for each row the one of pool that is its solved example, as the harness's ContextSampler draws it: by one
    generator for the task, and where no test split is evaluated two at a time, of which the first other row counts."""
    rng = random.Random(1234)
    for row in rows:
        drawn = rng.sample(pool, 1) if split == "test" else [other for other in rng.sample(pool, 2) if other != row]
        yield (drawn or rng.sample([other for other in pool if other != row], 1))[0]


def write_task(path, task, rows, pool):
    """Write rows as the questions of a task, each with one of pool as its example."""
    with whole_file(path) as file:
        for row, example in zip(rows, draw_examples(rows, pool, TASKS[task][3])):
            contexts, choices, label = pose(task, row)
            solved_contexts, solved_choices, solved = pose(task, example)
            line = {"context": contexts if len(set(contexts)) > 1 else contexts[0], "choices": choices, "label": label,
                    "example": solved_contexts[solved] + solved_choices[solved] + "\n\n"}
            file.write((json.dumps(line) + "\n").encode())


def prepare_tasks():
    """Write data/tasks/<task>.jsonl for each of TASKS, unless it is there.

    All training rows are fetched, since the draws of examples fall on nearly every page of them."""
    folder, raw = DATA / "tasks", DATA / "tasks" / "raw"
    paths = {task: folder / f"{task}.jsonl" for task in TASKS}
    missing = [task for task, path in paths.items() if not path.exists()]
    if not missing and (folder / "meta.json").exists():
        return say(f"{folder}: {len(TASKS)} tasks; finished, nothing to do; delete the folder to make it anew")

    if any(folder.glob("*.bin")):
        raise ValueError(f"{folder} holds a dataset of --input: rename the folder, so that the tasks can have it")

    def fetch(pages, count):
        download_all({path: url for urls in pages.values() for path, url in urls.items() if not path.exists()},
                     count, read_page)

    pages = {(task, split): page_urls(task, split, [0]) for task in missing for split in (TASKS[task][3], "train")}
    remote_size(next(iter(pages[missing[0], "train"].values())), 0)  # no server: known before anything is made
    raw.mkdir(parents=True, exist_ok=True)
    (folder / "meta.json").unlink(missing_ok=True)
    fetch(pages, lambda nbytes: None)  # each split's first page tells how many there are
    expected = there = 0  # bytes, as if all pages were as long as the first
    for (task, split), urls in pages.items():
        (first,) = urls
        urls.update(page_urls(task, split, range(PAGE_ROWS, read_page(first)[1], PAGE_ROWS)))
        expected += first.stat().st_size * len(urls)
        there += sum(bytes_there(path) for path in urls)
    announce(folder, max(expected - there, 0), max(2 * expected - there, 0))
    fetch(pages, meter(str(folder), expected, there))

    rows = {}
    for (task, split), urls in pages.items():
        read = [read_page(path) for path in urls]
        rows[task, split] = [row for page, _ in read for row in page]
        if any(total != len(rows[task, split]) for _, total in read):
            raise ValueError(f"{TASKS[task][1]} changed while its rows came: delete {raw} and run the command again")
    for task in missing:
        write_task(paths[task], task, rows[task, TASKS[task][3]], rows[task, "train"])
    questions = {task: len(path.read_bytes().splitlines()) for task, path in paths.items()}
    write_meta(folder / "meta.json", {"harness": "lm-evaluation-harness 0.4.13", "questions": questions})
    shutil.rmtree(raw)
    for task, path in paths.items():
        say(f"{path}: {questions[task]:,} questions")


# -- the command line ----------------------------------------------------------------------------------------

def parse_subsets(text):
    """"0-2,5" -> [0, 1, 2, 5]"""
    subsets = set()
    for part in text.split(","):
        span = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        first, last = (int(span[1]), int(span[2] or span[1])) if span else (0, -1)
        if not first <= last < OPENWEBTEXT_SUBSETS:
            raise argparse.ArgumentTypeError(f"{text!r} is not like 5, 0-2 or 0,3, with numbers from 0 to 20")
        subsets.update(range(first, last + 1))
    return sorted(subsets)


def parse_args(argv):
    parser = argparse.ArgumentParser("prepare.py", argparse.SUPPRESS, __doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="pydocs",
                        help="pydocs, openwebtext, fineweb_edu, tasks, or a name for --input")
    parser.add_argument("--input", nargs="+", metavar="PATH", help="UTF-8 text: files, and folders read to the bottom")
    parser.add_argument("--tokenizer", choices=("bytes", "gpt2"),
                        help="of pydocs and --input, default bytes; the corpora are gpt2, and tasks stay text")
    parser.add_argument("--workers", type=int, help="openwebtext: processes that tokenize, default one for each core")
    parser.add_argument("--subsets", type=parse_subsets, help="openwebtext: archives, as 5, 0-2 or 0,3; default 0-20")
    parser.add_argument("--keep_raw", choices=("True", "False"), help="openwebtext: keep the archives, default False")
    parser.add_argument("--shards", type=int, help="fineweb_edu: training shards of 100M tokens and 200 MB, default 10")
    args = parser.parse_args(argv)

    known = ("pydocs", "openwebtext", "fineweb_edu", "tasks")
    if args.input and args.dataset in known:
        parser.error("--input makes a dataset of its own: name it with --dataset=NAME, "
                     f"which cannot be {', '.join(known[:-1])} or {known[-1]}")
    if not args.input and args.dataset not in known:
        parser.error(f"--dataset={args.dataset} is none of {', '.join(known)}, and there is no --input to make it from")
    if not re.fullmatch(r"\w[\w.-]*", args.dataset):
        parser.error(f"--dataset={args.dataset} is not a plain folder name")
    for flag in ("workers", "subsets", "keep_raw", "shards"):
        dataset = "fineweb_edu" if flag == "shards" else "openwebtext"
        if getattr(args, flag) is not None and args.dataset != dataset:
            parser.error(f"--{flag} belongs to --dataset={dataset}, not to --dataset={args.dataset}")
    if args.dataset in known[1:] and args.tokenizer not in (None, "gpt2" if args.dataset != "tasks" else None):
        parser.error(f"--tokenizer={args.tokenizer} does not go with --dataset={args.dataset}, which is "
                     f"{'text' if args.dataset == 'tasks' else 'gpt2'}")
    if args.workers is not None and args.workers < 1:
        parser.error(f"--workers={args.workers} is not at least 1")
    if args.shards is not None and not 1 <= args.shards <= FINEWEB_EDU_SHARDS:
        parser.error(f"--shards={args.shards} is not from 1 to {FINEWEB_EDU_SHARDS}")
    return args


def main(argv=None):
    """-> exit status."""
    args = parse_args(argv)
    try:
        if args.dataset == "openwebtext":
            prepare_openwebtext(args.subsets or range(OPENWEBTEXT_SUBSETS),
                                args.workers or min(os.cpu_count() or 1, 61),  # 61 is as many as Windows starts
                                args.keep_raw == "True")
        elif args.dataset == "fineweb_edu":
            prepare_fineweb_edu(args.shards or 10)
        elif args.dataset == "tasks":
            prepare_tasks()
        elif args.input:
            prepare_input(args.dataset, args.input, args.tokenizer or "bytes")
        else:
            prepare_pydocs(args.tokenizer or "bytes")
        return 0
    except KeyboardInterrupt:
        message, status = "interrupted; the same command goes on where this stopped", 130
    except ImportError as error:
        message, status = f"{error.name} is missing: pip install {error.name}", 1
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        status = 1
    except (ValueError, MemoryError) as error:
        message, status = str(error) or "out of memory", 1
    print(f"prepare.py: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a file's name need not fit the terminal's encoding
    status = main()
    if status == 130 and threading.active_count() > 1:
        os._exit(status)  # a thread may still listen to a silent server; what it leaves is good to go on from
    sys.exit(status)
