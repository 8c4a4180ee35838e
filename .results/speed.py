"""Speed beside two well-known trainers, in turn on the same batches, FLOPs counted for each by one rule.

    git clone https://github.com/karpathy/nanoGPT ../nanoGPT
    git clone https://github.com/LoopedLMs/nanoLOOP ../nanoLOOP
    OMP_NUM_THREADS=2 python .results/speed.py ../nanoGPT ../nanoLOOP [folder of our code before]

"Defaults" are ours --dtype=auto, with --compile=auto for a long run, and theirs torch.compile in float32. nanoLOOP
runs its full loop with passthrough, K = 2. Ratios are medians over the steps. SMALL=1 cuts all sizes down.
"""
import importlib.util
import os
import statistics
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
SMALL = "SMALL" in os.environ
OURS = ("ours", "before")


def load(name, folder):
    """The module model.py of a folder."""
    spec = importlib.util.spec_from_file_location(name, Path(folder, "model.py"))
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def auto_dtype():
    """What --dtype=auto takes on a CPU."""
    sys.path.insert(0, str(ROOT))
    from train import pick_dtype
    return getattr(torch, pick_dtype("auto", torch.device("cpu")))


def build(modules, d, heads, N, T, V):
    """{name: (model, optimizer, weights of its blocks that a token passes)}; the looped ones have K = 2 and R = N/2."""
    def matrices(model):
        return sum(w.numel() for name, w in model.named_parameters()
                   if w.dim() > 1 and not any(part in name for part in ("wte", "wpe", "lm_head")))

    common, made = dict(block_size=T, vocab_size=V, n_head=heads, n_embd=d), {}
    for name, module in modules.items():
        torch.manual_seed(0)
        with open(os.devnull, "w") as silence, redirect_stdout(silence):        # the others talk
            if name in OURS:
                model = module.GPT(module.GPTConfig(n_layer=2, n_loop=N // 2, **common))
                optimizer = model.configure_optimizer(1e-3, 0.1)
            else:
                shape = (dict(n_layer=N) if name == "nanoGPT" else
                         dict(n_prelude=0, n_block=2, n_coda=0, n_loop=N // 2, input_injection="passthrough"))
                model = module.GPT(module.GPTConfig(dropout=0.0, bias=False, **shape, **common))
                optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
        made[name] = model, optimizer, matrices(model) * (1 if name == "nanoGPT" else N // 2)
    return made


def train(modules, title, d, heads, N, T, B, V, steps, default=False, compiled=False):
    """Prints the FLOP/s of each in training, and ours over each of the others'."""
    if SMALL:
        d, heads, T, B, V, steps = 64, 2, 32, 2, min(V, 512), 2
    idx, times, dtype = torch.randint(V, (B, T)), {}, auto_dtype()
    made = build(modules, d, heads, N, T, V)
    for name, (model, optimizer, weights) in made.items():
        if name in OURS and compiled:
            for block in model.blocks:
                block.compile()                                 # what --compile does
        if name not in OURS and default:
            made[name] = torch.compile(model), optimizer, weights
    for _ in range(2 + steps):                                  # two to warm up
        for name, (model, optimizer, weights) in made.items():
            began = time.perf_counter()
            with torch.autocast("cpu", dtype, enabled=default and name in OURS and dtype != torch.float32):
                loss = model(idx, idx)[1]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            times.setdefault(name, []).append(time.perf_counter() - began)
    flops = {name: (6 * (weights + V * d) + 12 * N * d * T) * B * T for name, (_, _, weights) in made.items()}
    rates = {name: [flops[name] / t for t in times[name][2:]] for name in made}
    for name in list(rates)[1:]:
        ratio = statistics.median(a / b for a, b in zip(rates["ours"], rates[name]))
        print(f"{title}: ours {statistics.median(rates['ours']) / 1e9:.0f} GFLOP/s, {name} "
              f"{statistics.median(rates[name]) / 1e9:.0f}, ratio {ratio:.2f}", flush=True)


def generate(modules, n):
    """Prints the tokens/s of each in generation, and ours over each of the others'."""
    made = build({name: module for name, module in modules.items() if name != "nanoGPT"}, 128, 4, 8, 1024, 256)
    idx, took = torch.zeros(1, 1, dtype=torch.long), dict.fromkeys(made, 0.0)
    for _ in range(1 if SMALL else 3):                          # in turn
        for name, (model, _, _) in made.items():
            began = time.perf_counter()
            with torch.no_grad():
                for _ in model.eval().generate(idx, n):         # ours yields tokens, theirs returns all of them
                    pass
            took[name] += time.perf_counter() - began
    for name in list(took)[1:]:
        speeds = {who: (1 if SMALL else 3) * n / took[who] for who in ("ours", name)}
        print(f"{n} tokens: ours {speeds['ours']:.0f} tokens/s, {name} {speeds[name]:.0f}, "
              f"ratio {speeds['ours'] / speeds[name]:.1f}", flush=True)


def main():
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    modules = {name: load(name, folder) for name, folder in zip(("ours", "nanoGPT", "nanoLOOP", "before"),
                                                                (ROOT, *sys.argv[1:]))}
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    small, large = (128, 4, 8, 128, 16, 256, 40), (768, 6, 12, 256, 4, 50304, 10)
    train(modules, "d=128, N=8, T=128, B=16, float32", *small)
    train(modules, "d=128, N=8, T=128, B=16, defaults", *small, default=True)
    train(modules, "d=128, N=8, T=128, B=16, defaults of a long run", *small, default=True, compiled=True)
    train(modules, "d=768, N=12, T=256, B=4, defaults of a long run", *large, default=True, compiled=True)
    generate(modules, 16 if SMALL else 256)
    generate(modules, 32 if SMALL else 1024)


if __name__ == "__main__":
    main()
