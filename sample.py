"""Text from a checkpoint: python sample.py --prompt="The for statement" """
import os
import signal

if __name__ == "__main__":      # Ctrl-C, also while torch is being imported
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"interrupted\n"), os._exit(130)))

import argparse
import codecs
import sys

import torch

from model import load_checkpoint, pick_device
from prepare import load_tokenizer


def parse(argv):
    """The flags, checked, as a namespace; exits with one sentence on a bad one."""
    parser = argparse.ArgumentParser(prog="sample.py", usage=argparse.SUPPRESS, allow_abbrev=False,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter,
                                     description="Streams text from a model: sample.py [--name=value ...]")
    parser.add_argument("--out_dir", default="out", help="folder of the checkpoint, ckpt.pt")
    parser.add_argument("--prompt", default="", help="text to continue, FILE:path, or - for standard input")
    parser.add_argument("--num_samples", type=int, default=1, help="how many texts")
    parser.add_argument("--max_new_tokens", type=int, default=500, help="length of a sample, in tokens")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token every time")
    parser.add_argument("--top_k", type=int, default=None, help="sample among the k likeliest tokens only")
    parser.add_argument("--seed", type=int, default=1, help="of the sampling")
    parser.add_argument("--n_loop", type=int, default=None, help="rounds to run, if not those of the training")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "mps", "cpu"))
    args = parser.parse_args(argv)
    for name, least in dict(num_samples=1, max_new_tokens=1, temperature=0, top_k=1, seed=0, n_loop=1).items():
        value = getattr(args, name)
        if value is not None and not least <= value < 2 ** 31:
            parser.error(f"--{name}={value} is not a number from {least} to 2^31")
    return args


def read_prompt(prompt):
    """The prompt's text: itself, or the contents of the file or of standard input that it names."""
    if prompt == "-" and sys.stdin is None:
        raise ValueError("prompt=- asks for standard input, which is closed")
    if prompt == "-":
        return sys.stdin.buffer.read().decode()
    if not prompt.startswith("FILE:"):
        return prompt
    if not os.path.isfile(prompt[5:]):      # a pipe would be waited for
        raise ValueError(f"{prompt} names no regular file; to read a pipe there is --prompt=-")
    with open(prompt[5:], "rb") as f:
        return f.read().decode()


def main(argv=None):
    args = parse(argv)
    try:
        device = pick_device(args.device)
        model, checkpoint = load_checkpoint(os.path.join(args.out_dir, "ckpt.pt"))
        tokenizer = load_tokenizer(checkpoint["tokenizer"])
        prompt = read_prompt(args.prompt)
    except UnicodeDecodeError as error:
        sys.exit(f"sample.py: prompt={args.prompt} is not UTF-8 text: {error.reason} at byte {error.start}")
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"sample.py: {error}")
    ids = (tokenizer.start + tokenizer.encode(prompt)) or tokenizer.encode("\n")
    idx = torch.tensor([ids], device=device)                               # (1, T)
    if len(ids) > model.config.block_size:
        print(f"the prompt has {len(ids)} tokens; the model reads the last {model.config.block_size}", file=sys.stderr)
    model.to(device).eval()
    model.n_loop = args.n_loop or model.n_loop
    torch.manual_seed(args.seed)
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    for _ in range(args.num_samples):
        text = codecs.getincrementaldecoder("utf-8")(errors="replace")     # keeps bytes back until they are whole
        print(prompt, end="", flush=True)
        for token in model.generate(idx, args.max_new_tokens, args.temperature, args.top_k):
            if token.item() in tokenizer.start:                            # a new document would begin
                break
            print(text.decode(tokenizer.decode(token[0].tolist())), end="", flush=True)
        print(text.decode(b"", final=True))


if __name__ == "__main__":
    if sys.stdout is None:
        sys.exit("sample.py: standard output is closed, so there is nowhere to print to")
    try:
        main()
    except OSError as error:            # a full disk, or a reader such as head that has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())     # what is still in the buffer goes nowhere
        if not isinstance(error, BrokenPipeError):
            sys.exit(f"sample.py: the text could not be printed: {error.strerror}")
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        sys.exit("sample.py: out of memory; try fewer rounds with --n_loop")
