"""The laws of the project, as tests: `pytest`. Each compares with a value or a computation made another way."""
import contextlib
import csv
import functools
import hashlib
import http.server
import importlib.util
import io
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import threading
import time
import urllib.parse
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F

import prepare
import sample
import train
from model import GPT, SCALINGS, GPTConfig, cross_entropy, first_step_change, load_checkpoint, norm

HERE = Path(__file__).resolve().parent
os.environ["CUDA_VISIBLE_DEVICES"] = ""     # the laws are the CPU's; .results/gpu.py is for the other
torch.set_num_threads(1)    # as in the programs that the tests start, so that sums come out alike


def make(seed=0, gain=4.0, **config):
    """A small GPT whose branches are far from small, so that a fault in any of them shows in the output."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**dict(vocab_size=31, block_size=24, n_loop=3, n_head=4, n_embd=32), **config}))
    with torch.no_grad():
        for w in model.blocks.parameters():
            w *= gain
    return model


def tokens(*shape, vocab_size=31, seed=0):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


# ---- residual scaling -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("scaling, n_layer, n_loop, alpha, beta", [
    ("deeploop", 2, 4, 4.0, 0.125),
    ("deepnorm", 2, 4, 2.0, 0.3535534),
    ("deeploop", 12, 7, 12.9614814, 0.0385758),     # √168, 1/√672
    ("deepnorm", 12, 7, 3.6002057, 0.1964072),
    ("deeploop", 1, 1, 1.4142136, 0.3535534),
    ("preln", 12, 7, 1.0, 1.0),
])
def test_alpha_and_beta_by_hand(scaling, n_layer, n_loop, alpha, beta):
    config = GPTConfig(n_layer=n_layer, n_loop=n_loop, scaling=scaling)
    assert config.n_unrolled == n_layer * n_loop
    assert config.alpha == pytest.approx(alpha, rel=1e-6) and config.beta == pytest.approx(beta, rel=1e-6)


@pytest.mark.parametrize("n_loop", [1, 3, 50])
def test_beta_over_alpha(n_loop):
    N = 2 * n_loop
    deepnorm, deeploop = (GPTConfig(n_loop=n_loop, scaling=scaling) for scaling in ("deepnorm", "deeploop"))
    assert deepnorm.beta / deepnorm.alpha == pytest.approx(1 / (2 * math.sqrt(N)))
    assert deeploop.beta / deeploop.alpha == pytest.approx(1 / (4 * N))


def test_exponent_overrides_the_scaling():
    assert GPTConfig(exponent=0.3).alpha == GPTConfig(scaling="deepnorm", exponent=0.3).alpha == 16 ** 0.3
    assert GPTConfig(exponent=0.3).beta == pytest.approx(64 ** -0.3)


def test_rounds_add_no_parameters():
    shapes = [{name: w.shape for name, w in make(n_loop=n_loop).named_parameters()} for n_loop in (1, 7)]
    assert shapes[0] == shapes[1]
    assert make().num_params() == 31 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 128)    # h: 8·32/3 = 85.3, up to 128


@pytest.mark.parametrize("wrong, named", [
    (dict(n_layer=0), "n_layer=0"), (dict(n_loop=-1), "n_loop=-1"), (dict(n_loop=2.0), "n_loop=2.0"),
    (dict(n_head=True), "n_head=True"), (dict(block_size=0), "block_size=0"), (dict(vocab_size="9"), "vocab_size='9'"),
    (dict(n_embd=100, n_head=3), "n_embd=100 is not divisible by n_head=3"), (dict(n_embd=12, n_head=4), "n_embd=12"),
    (dict(scaling="postln"), "scaling='postln'"), (dict(exponent=-0.1), "exponent=-0.1"),
    (dict(exponent=math.nan), "exponent=nan"), (dict(exponent=1.5), "exponent=1.5"),
    (dict(exponent=0.5, scaling="preln"), "exponent=0.5"),
])
def test_nonsense_is_refused_by_name(wrong, named):
    with pytest.raises(ValueError, match=named):
        GPTConfig(**wrong)


# ---- initialization ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("scaling", SCALINGS)
def test_initial_spread(scaling):
    d, h = 256, 704
    model = make(gain=1.0, n_embd=d, n_loop=8, vocab_size=512, scaling=scaling)
    beta, N = {"deeploop": 128 ** -0.5, "deepnorm": 128 ** -0.25}.get(scaling, 1.0), 16
    last = 1 / math.sqrt(2 * N) if scaling == "preln" else 1.0
    square, wide = math.sqrt(2 / (d + d)), math.sqrt(2 / (d + h))               # Xavier's standard deviations
    for block in model.blocks:
        q, k = block.attn.qk.weight.split(d)
        for w, std in ((q, square), (k, square), (block.attn.v.weight, beta * square),
                       (block.attn.out.weight, beta * square * last), (block.mlp.gate.weight, beta * wide),
                       (block.mlp.up.weight, beta * wide), (block.mlp.down.weight, beta * wide * last)):
            assert w.std().item() == pytest.approx(std, rel=0.02) and abs(w.mean().item()) < 0.02 * std
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_beta_does_not_enter_the_forward_pass(monkeypatch):
    model, idx = make(), tokens(2, 9)
    before = model(idx, idx)[0]
    monkeypatch.setattr(GPTConfig, "beta", property(lambda self: 1e9))
    assert torch.equal(model(idx, idx)[0], before)


# ---- the forward pass -------------------------------------------------------------------------------------------

def reference_logits(model, idx):
    """The design's formulas in numpy and float64, one sequence (T,) at a time: (T, V)."""
    c = model.config
    p = {name: w.detach().double().numpy() for name, w in model.state_dict().items()}
    T, hs, N = len(idx), c.n_embd // c.n_head, c.n_layer * c.n_loop
    alpha = {"deeploop": (2 * N) ** 0.5, "deepnorm": (2 * N) ** 0.25}.get(c.scaling)
    epsilon = {"preln": 1.0, "loop_preln": 1 / (c.n_loop * c.n_layer ** 0.5)}.get(c.scaling)
    rms = lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True))
    turn = np.exp(1j * np.outer(np.arange(T), 10000.0 ** (-2 * np.arange(hs // 2) / hs)))   # (T, hs/2)

    def rope(x):
        z = (x[:, :hs // 2] + 1j * x[:, hs // 2:]) * turn
        return np.concatenate([z.real, z.imag], axis=1)

    def attn(x, name):
        qk, v = x @ p[name + "qk.weight"].T, x @ p[name + "v.weight"].T
        heads = []
        for i in range(c.n_head):
            at = slice(i * hs, (i + 1) * hs)
            q, k = rope(rms(qk[:, :c.n_embd][:, at])), rope(rms(qk[:, c.n_embd:][:, at]))
            weight = np.exp(q @ k.T / np.sqrt(hs)) * np.tril(np.ones((T, T)))
            heads.append(weight / weight.sum(-1, keepdims=True) @ v[:, at])
        return np.concatenate(heads, axis=1) @ p[name + "out.weight"].T

    def mlp(x, name):
        gate, up = x @ p[name + "gate.weight"].T, x @ p[name + "up.weight"].T
        return (gate / (1 + np.exp(-gate)) * up) @ p[name + "down.weight"].T

    x = rms(p["wte.weight"][idx])
    for _, k in itertools.product(range(c.n_loop), range(c.n_layer)):
        for branch, name in ((attn, f"blocks.{k}.attn."), (mlp, f"blocks.{k}.mlp.")):
            x = rms(alpha * x + branch(x, name)) if alpha else x + epsilon * branch(rms(x), name)
    return (x if alpha else rms(x)) @ p["wte.weight"].T


@pytest.mark.parametrize("scaling, n_loop", itertools.product(SCALINGS, (1, 3)))
def test_forward_equals_float64_reference(scaling, n_loop):
    model, idx = make(scaling=scaling, n_loop=n_loop), tokens(2, 24)
    targets = tokens(2, 24, seed=1)
    targets[0, :5] = -1
    logits, loss = model(idx, targets)
    expected = np.stack([reference_logits(model, row.numpy()) for row in idx])
    assert np.abs(logits.detach().numpy() - expected).max() < 1e-5 * np.abs(expected).max()
    logp = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
    picked = [logp[b, t, targets[b, t]] for b in range(2) for t in range(24) if targets[b, t] >= 0]
    assert loss.item() == pytest.approx(-np.mean(picked), rel=1e-6)
    last, none = model(idx)
    assert none is None and last.shape == (2, 1, 31) and torch.allclose(last[:, 0], logits[:, -1], atol=1e-6)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_loop_equals_its_untied_twin(scaling):
    model, idx, targets = make(scaling=scaling), tokens(2, 24), tokens(2, 24, seed=1)
    twin = model.untie()
    assert (twin.config.n_layer, twin.config.n_loop, twin.config.alpha) == (6, 1, model.config.alpha)
    (logits, loss), (twin_logits, twin_loss) = model(idx, targets), twin(idx, targets)
    assert torch.equal(logits, twin_logits)
    loss.backward()
    twin_loss.backward()
    for k, block in enumerate(model.blocks):
        for name, w in block.named_parameters():
            visits = [twin.blocks[r * 2 + k].get_parameter(name).grad for r in range(3)]
            assert not torch.allclose(visits[0], visits[1], rtol=0.1)           # the visits do differ
            assert torch.allclose(w.grad, sum(visits), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_gradient_equals_finite_differences(scaling):
    model, idx, targets = make(scaling=scaling, gain=2.0).double(), tokens(2, 12), tokens(2, 12, seed=1)
    model.zero_grad()
    F.cross_entropy(F.linear(model.hidden(idx), model.wte.weight).flatten(0, 1), targets.flatten()).backward()
    direction = [torch.randn(w.shape, generator=torch.Generator().manual_seed(i)).double()
                 for i, w in enumerate(model.parameters())]
    slope = sum((w.grad * u).sum() for w, u in zip(model.parameters(), direction)).item()

    def loss_at(eps):
        with torch.no_grad():
            for w, u in zip(model.parameters(), direction):
                w += eps * u
            logits = F.linear(model.hidden(idx), model.wte.weight)
            for w, u in zip(model.parameters(), direction):
                w -= eps * u
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()

    assert (loss_at(1e-6) - loss_at(-1e-6)) / 2e-6 == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_no_token_sees_a_later_one(scaling):
    model, idx = make(scaling=scaling), tokens(1, 24)
    changed = idx.clone()
    changed[0, 10] = (idx[0, 10] + 1) % 31
    before, after = model(idx, idx)[0][0], model(changed, changed)[0][0]
    assert torch.equal(before[:10], after[:10])
    assert not torch.isclose(before[10:], after[10:], rtol=1e-3).all(dim=-1).any()


def test_rope_is_relative():
    model = make(block_size=64)
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    attn = lambda start: model.blocks[0].attn(x, (model.cos[start:start + 16], model.sin[start:start + 16]))
    assert torch.allclose(attn(0), attn(48), atol=1e-5)
    stretched = model.blocks[0].attn(x, (model.cos[:32:2], model.sin[:32:2]))
    assert not torch.allclose(attn(0), stretched, atol=1e-2)                    # but distances do matter


def test_context_is_bounded():
    with pytest.raises(ValueError, match="25 tokens do not fit block_size=24"):
        make()(tokens(1, 25))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1e-6), (torch.float64, 1e-8)])
@pytest.mark.parametrize("rms", [0.02, 1.0, 20.0])
def test_norm(dtype, tolerance, rms):
    x = (torch.randn(8, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * rms).to(dtype)
    exact = x.double() / x.double().square().mean(-1, keepdim=True).sqrt()
    for amp in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            y = norm(x)
        assert y.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert (y.double() - exact).abs().max() < tolerance * exact.abs().max()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 1.9e-3)])
def test_cross_entropy_over_a_big_vocabulary(dtype, tolerance):
    """In pieces of a few rows, against float64 at once; rows without a target count for nothing."""
    V = 50304
    logits = torch.randn(100, V, generator=torch.Generator().manual_seed(0)).mul(3).to(dtype).requires_grad_()
    targets = tokens(100, vocab_size=V)
    targets[[0, 50, 99]] = -1
    exact = logits.detach().double().requires_grad_()
    expected = -exact.log_softmax(-1)[targets >= 0, targets[targets >= 0]].mean()
    loss = cross_entropy(logits, targets)
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-6)
    (3 * loss).backward()
    (3 * expected).backward()
    assert ((logits.grad - exact.grad).norm() / exact.grad.norm()).item() < tolerance


@pytest.mark.parametrize("scaling", SCALINGS)
def test_autocast_keeps_the_stream_in_float32(scaling):
    model, idx = make(scaling=scaling, gain=1.0), tokens(2, 24)
    seen = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(idx, idx)
    assert set(seen) == {torch.float32} and len(seen) == 6 and loss.dtype == torch.float32
    assert loss.item() == pytest.approx(model(idx, idx)[1].item(), abs=0.01)


# ---- generation -------------------------------------------------------------------------------------------------

def greedy_without_cache(model, idx, n):
    """The rule of the design, the plain way: past block_size, go on from the last block_size // 2 tokens."""
    out, window = [], idx[:, -model.config.block_size:]
    for _ in range(n):
        if window.size(1) > model.config.block_size:
            window = window[:, -(model.config.block_size // 2):]
        new = model(window, window)[0][:, -1].argmax(-1, keepdim=True)
        out.append(new)
        window = torch.cat((window, new), dim=1)
    return torch.cat(out, dim=1)


@pytest.mark.parametrize("prompt", [1, 5, 24, 40])
def test_cached_generation_equals_uncached(prompt):
    model, idx = make(gain=16.0), tokens(3, prompt)    # wide enough of the embedding to leave its fixed points
    with torch.no_grad():
        expected = greedy_without_cache(model, idx, 50)
    got = torch.cat(list(model.generate(idx, 50, temperature=0)), dim=1)
    assert torch.equal(got, expected)
    assert len(set(got[0].tolist())) >= 4                                       # not one token over and over


def test_cache_takes_several_tokens_at_once():
    model, idx = make(), tokens(2, 20)
    with torch.no_grad():
        whole, cache = model(idx, idx)[0], model.new_cache(2)
        for start, end in ((0, 7), (7, 8), (8, 20)):
            assert torch.allclose(model(idx[:, start:end], cache=cache)[0][:, 0], whole[:, end - 1], atol=1e-5)
        with pytest.raises(ValueError, match="25 tokens"):
            model(idx[:, :5], cache=cache)


def test_sampling_follows_temperature_and_top_k():
    model, idx = make(), tokens(1, 4).expand(4000, -1)
    with torch.no_grad():
        model.wte.weight *= 10                                                  # logits far enough apart to matter
        logits = model(idx[:1])[0][0, 0].double()
    torch.manual_seed(0)
    drawn = next(model.generate(idx, 1, temperature=0.3, top_k=5)).flatten().bincount(minlength=31) / 4000
    expected = torch.zeros(31, dtype=torch.float64)
    best = logits.topk(5).indices
    expected[best] = (logits[best] / 0.3).exp() / (logits[best] / 0.3).exp().sum()
    assert (drawn - expected).abs().max() < 0.03 and drawn[expected == 0].sum() == 0
    assert torch.equal(next(model.generate(idx[:1], 1, top_k=1)), next(model.generate(idx[:1], 1, temperature=0)))


@pytest.mark.parametrize("bad", [dict(temperature=-1.0), dict(temperature=math.nan), dict(top_k=0), dict(idx=tokens(1, 0))])
def test_generation_refuses_nonsense(bad):
    with pytest.raises(ValueError):
        next(make().generate(**{**dict(idx=tokens(1, 3), max_new_tokens=2), **bad}))


def test_rounds_can_change_after_training():
    model, idx = make(n_loop=3), tokens(2, 9)
    model.n_loop = 5
    other = make(n_loop=5)
    other.load_state_dict(model.state_dict())
    assert not torch.allclose(model(idx)[0], other(idx)[0], atol=1e-3)          # alpha is still the trained one
    for block in other.blocks:
        block.alpha = make(n_loop=3).config.alpha
    assert torch.equal(model(idx)[0], other(idx)[0])
    assert torch.cat(list(model.generate(idx, 30, temperature=0)), 1).shape == (2, 30)


# ---- the theory -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("p", [1 / 4, 1 / 3, 1 / 2])
def test_the_first_step_grows_with_the_rounds_as_the_law_says(p):
    """Slopes of log change against log R, tied and untied, against the powers written out here, within 0.15."""
    idx, targets = tokens(4, 64, vocab_size=256), tokens(4, 64, vocab_size=256, seed=1)
    expected = {("sgd", True): 2 - 4 * p, ("sgd", False): 1 - 4 * p, ("adam", True): 1 - 2 * p,
                ("adam", False): 1 - 2 * p, ("scaled", True): 1 - 3 * p, ("scaled", False): 1 - 3 * p}
    for (step, tied), slope in expected.items():
        low, high = (make(gain=1.0, vocab_size=256, block_size=64, n_loop=n_loop, n_embd=64, exponent=p).double()
                     for n_loop in (4, 16))
        low, high = (first_step_change(model if tied else model.untie(), idx, targets, step) for model in (low, high))
        assert math.log(high / low) / math.log(4) == pytest.approx(slope, abs=0.15), (step, tied)


@pytest.mark.parametrize("step, optimizer", [("sgd", lambda w: torch.optim.SGD(w, lr=0.1)),
                                             ("adam", lambda w: torch.optim.Adam(w, lr=1e-5, eps=1e-30))])
def test_first_step_change_is_the_step(step, optimizer):
    model, idx, targets = make().double(), tokens(2, 24), tokens(2, 24, seed=1)
    twin = make().double()
    twin(idx, targets)[1].backward()
    before = twin.hidden(idx).detach()
    optimizer(twin.blocks.parameters()).step()
    expected = (twin.hidden(idx) - before).norm() / before.norm()
    assert first_step_change(model, idx, targets, step) == pytest.approx(expected.item(), rel=1e-4)


def test_visit_alignment_by_explicit_jacobians():
    model, idx, targets = make(n_embd=8, n_head=2, n_layer=1, n_loop=3, gain=2.0), tokens(1, 4), tokens(1, 4, seed=1)
    twin = model.untie()
    for part, kappa in zip(("attn", "mlp"), model.visit_alignment(idx, targets, n_probe=3000)[0]):
        G, U = [], []
        for block in twin.blocks:
            weights = list(getattr(block, part).parameters())
            G.append(torch.cat([g.flatten() for g in torch.autograd.grad(twin(idx, targets)[1], weights)]))
            rows = [torch.autograd.grad(y, weights, retain_graph=True) for y in twin.hidden(idx).flatten()]
            U.append(torch.stack([torch.cat([g.flatten() for g in row]) for row in rows]))     # (T·d, parameters)
        expected = sum(U).norm() * sum(G).norm() / (3 * max(u.norm() for u in U) * max(g.norm() for g in G))
        assert kappa.item() == pytest.approx(expected.item(), rel=0.02)


@pytest.mark.parametrize("n_loop", [1, 4, 16])
def test_visit_alignment_of_equal_visits_is_n_loop(n_loop):
    # with branches this small no visit changes the state, so that all visits see, write and read the same
    model = make(gain=1.0, n_loop=n_loop, exponent=1.0)
    kappa = model.visit_alignment(tokens(2, 24), tokens(2, 24, seed=1))
    assert kappa.shape == (2, 2)
    assert torch.allclose(kappa, torch.full((2, 2), float(n_loop)), rtol=1e-2 if n_loop > 1 else 1e-5)


def test_visit_alignment_leaves_the_run_alone():
    model, idx = make(), tokens(2, 24)
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    model.visit_alignment(idx, idx)
    assert torch.equal(torch.get_rng_state(), random) and all(w.grad is None for w in model.parameters())
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


def test_flops_count_every_visit():
    def by_hand(n_loop):
        d, h, T, V = 32, 128, 24, 31
        products = 4 * d * d + 3 * d * h                    # weights per block
        attention = 2 * T * d                               # scores and sums, multiply-adds per token
        return 6 * (2 * n_loop * (products + attention) + V * d)
    assert [make(n_loop=r).flops_per_token() for r in (1, 5)] == [by_hand(1), by_hand(5)]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_recomputed_visits_give_the_same_gradients(scaling):
    grads = []
    for recompute in (False, True):
        model = make(scaling=scaling)
        model.recompute = recompute
        model(tokens(2, 24), tokens(2, 24, seed=1))[1].backward()
        grads.append([w.grad for w in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


# ---- training ---------------------------------------------------------------------------------------------------

SMALL = ("--n_embd=32 --n_head=2 --block_size=32 --batch_size=4 --grad_accum=1 --max_steps=12 --warmup_steps=4 --eval_interval=4 "
         "--eval_windows=10 --log_interval=1 --learning_rate=1e-2 --dtype=float32").split()


def start(program, *flags, cwd, **more):
    return subprocess.Popen([sys.executable, str(HERE / program), *flags], cwd=cwd, encoding="utf-8", stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=dict(os.environ, OMP_NUM_THREADS="1", **more))


def run(program, *flags, cwd, **more):
    process = start(program, *flags, cwd=cwd, **more)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out, err


def train_here(folder, *flags, small=SMALL):
    """A run of train.py in this process, for tests that do not need one of its own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.chdir(folder)
        train.main([*small, *flags])
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return out.getvalue()


def log_of(out_dir):
    """log.csv without its two columns of time."""
    with open(out_dir / "log.csv", newline="") as f:
        return [row[:5] for row in csv.reader(f)]


def weights_of(out_dir):
    return torch.load(out_dir / "ckpt.pt", weights_only=True)["model"]


def same_run(a, b):
    assert log_of(a) == log_of(b)
    wa, wb = weights_of(a), weights_of(b)
    return wa.keys() == wb.keys() and all(torch.equal(wa[name], wb[name]) for name in wa)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with a small run of 12 steps in out/."""
    folder = tmp_path_factory.mktemp("trained")
    train_here(folder)
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    """A folder with the dataset and no run."""
    shutil.copytree(trained / "data", tmp_path / "data")
    return tmp_path


def test_log_has_every_step_once(trained):
    rows = log_of(trained / "out")
    assert rows[0] == ["step", "train_loss", "val_loss", "lr", "grad_norm"]
    assert [int(row[0]) for row in rows[1:]] == list(range(13))
    assert [int(row[0]) for row in rows[1:] if row[2]] == [0, 4, 8, 12]
    rates = [float(row[3]) for row in rows[1:-1]]
    assert rates[:4] == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2])             # warmup
    assert rates[4:] == pytest.approx([1e-2 * (0.1 + 0.9 * (1 + math.cos(math.pi * i / 8)) / 2) for i in range(8)])
    assert float(rows[-1][2]) < float(rows[1][2]) - 1


def test_losses_are_those_of_the_logged_weights(trained):
    model, checkpoint = load_checkpoint(trained / "out" / "ckpt.pt")
    text = np.memmap(next((trained / "data" / "pydocs").glob("*val*")), "<u2", "r", offset=1024)
    starts = np.linspace(0, len(text) - 33, 10).astype(int)
    losses = [model(torch.from_numpy(text[i:i + 32].astype(np.int64))[None],
                    torch.from_numpy(text[i + 1:i + 33].astype(np.int64))[None])[1].item() for i in starts]
    assert checkpoint["step"] == 12
    assert float(log_of(trained / "out")[-1][2]) == pytest.approx(np.mean(losses), rel=1e-5)


def test_a_run_repeats_itself_and_validation_does_not_disturb_it(trained, folder):
    train_here(folder, "--eval_interval=3", "--eval_windows=6")
    a, b = log_of(trained / "out"), log_of(folder / "out")
    assert [row[:2] + row[3:] for row in a] == [row[:2] + row[3:] for row in b]
    train_here(folder, "--seed=2", "--eval_interval=12")
    c = log_of(folder / "out")
    assert [row[1] for row in c[1:-1]] != [row[1] for row in a[1:-1]]
    assert (folder / "out" / "previous-1" / "ckpt.pt").is_file()                # a fresh run overwrites nothing


def test_validation_loss_does_not_depend_on_when_it_is_asked(trained, folder):
    train_here(folder, "--eval_interval=12")
    assert [log_of(folder / "out")[i] for i in (1, -1)] == [log_of(trained / "out")[i] for i in (1, -1)]


def wait_for(process, text):
    """Reads the process's output up to the line that holds text."""
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize("moment", ["step      1/", "step      6/", "step      8 "])
def test_a_killed_run_resumes_to_the_last_bit(trained, folder, moment):
    process = start("train.py", *SMALL, cwd=folder)
    wait_for(process, moment)
    process.kill()
    process.communicate()
    train_here(folder, "--resume=auto")
    assert same_run(trained / "out", folder / "out")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to send")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_and_stops(trained, folder, number):
    process = start("train.py", *SMALL, "--eval_interval=1000", cwd=folder)
    wait_for(process, "step      5/")
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == 128 + number and "--resume=auto" in out and err == ""
    assert 5 <= torch.load(folder / "out" / "ckpt.pt", weights_only=True)["step"] < 12
    run("train.py", "--resume=True", "--eval_interval=4", cwd=folder)           # model and all come from the checkpoint
    assert weights_of(folder / "out").keys() == weights_of(trained / "out").keys()
    assert all(torch.equal(w, weights_of(trained / "out")[name]) for name, w in weights_of(folder / "out").items())


def test_windows_stay_in_their_shard_and_are_drawn_in_proportion(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs("data/three")
    for i, n in enumerate((50, 8, 200)):                                        # the second is shorter than a window
        Path(f"data/three/three_train_{i}.bin").write_bytes(shard_of(np.arange(n) + 1000 * i))
    split = train.Split("three", "train", block_size=8, vocab_size=2200)
    assert split.counts.tolist() == [42, 0, 192] and split.windows == 234
    idx, targets = split.read(np.arange(234), torch.device("cpu"))
    assert torch.equal(targets, idx + 1)                                        # consecutive numbers: one shard each
    assert idx[:, 0].tolist() == [*range(42), *range(2000, 2192)]
    with pytest.raises(SystemExit, match="three_train_2.bin holds token 2199"):
        train.Split("three", "train", 8, vocab_size=2199).read(np.array([3, 233, 5]), torch.device("cpu"))


def test_a_public_shard_trains_as_it_is(tmp_path):
    """A shard written by llm.c's description alone, 1,024 bytes of header and GPT-2 tokens, and two lines of meta.json."""
    ids = np.random.default_rng(0).integers(50257, size=3000)
    os.makedirs(tmp_path / "data" / "edu [1]")
    for split in ("train", "val"):
        shard = struct.pack("<3i", 20240520, 1, 3000) + bytes(1012) + struct.pack("<3000H", *ids)
        (tmp_path / "data" / "edu [1]" / f"edu_fineweb_{split}_000001.bin").write_bytes(shard)
    (tmp_path / "data" / "edu [1]" / "meta.json").write_text('{"tokenizer": "gpt2", "vocab_size": 50304}')
    train_here(tmp_path, "--dataset=edu [1]", "--max_steps=3", "--n_embd=16")
    rows = log_of(tmp_path / "out")
    assert float(rows[1][1]) == pytest.approx(math.log(50304), abs=0.1) and len(rows) == 5


def test_batches_do_not_depend_on_the_number_of_processes(trained, folder):
    flags = [flag for flag in SMALL if "batch_size" not in flag] + ["--batch_size=1", "--grad_accum=4"]
    for world in (2, 4):
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}",
                        str(HERE / "train.py"), *flags, f"--out_dir=out{world}"], cwd=folder, check=True,
                       env=dict(os.environ, OMP_NUM_THREADS="1"), capture_output=True)
        rows = log_of(folder / f"out{world}")
        for row, expected in zip(rows[1:], log_of(trained / "out")[1:], strict=True):
            assert [float(x) for x in row if x] == pytest.approx([float(x) for x in expected if x], rel=1e-5)


def test_when_one_process_dies_the_other_stops_and_the_checkpoint_is_whole(folder):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    flags = [*SMALL, "--grad_accum=2", "--max_steps=100000", "--eval_interval=2"]
    both = [start("train.py", *flags, cwd=folder, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
                  MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)) for rank in (0, 1)]
    wait_for(both[0], "step      5/")
    both[1].kill()
    err = both[0].communicate(timeout=60)[1]
    both[1].communicate()
    complaints = [line for line in err.splitlines() if line.startswith("train.py: ")]
    assert both[0].returncode == 1 and len(complaints) == 1 and "another process" in complaints[0] and "Traceback" not in err
    saved = load_checkpoint(folder / "out" / "ckpt.pt")[1]
    assert saved["step"] >= 4


@pytest.mark.parametrize("warmup", [30, 0])     # the gradient overflows first, or the weights do
def test_a_step_that_is_not_finite_is_not_taken(warmup, folder):
    process = start("train.py", *SMALL, "--learning_rate=1e38", "--max_steps=40", f"--warmup_steps={warmup}",
                    "--eval_interval=1", cwd=folder)
    out, err = process.communicate()
    assert process.returncode == 1 and len(err.splitlines()) == 1 and "not taken" in err and "--learning_rate" in err
    assert ("validation loss" in err) == (warmup == 0)
    step = int(re.search(r"step (\d+):", err)[1])
    saved = torch.load(folder / "out" / "ckpt.pt", weights_only=True)
    assert saved["step"] == step - (warmup == 0) and all(w.isfinite().all() for w in saved["model"].values())


def test_a_checkpoint_that_cannot_be_written_costs_none(trained, folder, monkeypatch):
    shutil.copytree(trained / "out", folder / "out")
    before = (folder / "out" / "ckpt.pt").read_bytes()

    def full(state, file):
        file.write(before[:1000])
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SystemExit, match="No space left on device.*those before it stay"):
        train_here(folder, "--resume=True", "--max_steps=14")
    assert (folder / "out" / "ckpt.pt").read_bytes() == before


def test_older_checkpoints_are_kept_as_asked(folder):
    train_here(folder, "--keep=2", "--eval_interval=2")
    names = ["ckpt.pt", "ckpt-00000012.pt", "ckpt-00000010.pt", "ckpt-00000008.pt", "best.pt"]
    assert [os.path.basename(path) for path in train.checkpoints(folder / "out")] == names
    steps = [torch.load(folder / "out" / name, weights_only=True)["step"] for name in names[:4]]
    assert steps == [12, 12, 10, 8]


def test_resume_writes_where_it_read(folder):
    train_here(folder, "--out_dir=first", "--max_steps=8")
    shutil.copytree(folder / "first", folder / "out")                           # its settings still say out_dir=first
    before = {path.name: path.read_bytes() for path in (folder / "first").iterdir()}
    train_here(folder, "--resume=True")
    assert torch.load(folder / "out" / "ckpt.pt", weights_only=True)["step"] == 12
    assert {path.name: path.read_bytes() for path in (folder / "first").iterdir()} == before


def test_a_run_from_before_scale_lr_goes_on_without_it(folder):
    train_here(folder, "--scale_lr=False", "--out_dir=calm")
    process = start("train.py", *SMALL, "--scale_lr=False", cwd=folder)
    wait_for(process, "step      6/")
    process.kill()
    process.communicate()
    state = torch.load(folder / "out" / "ckpt.pt", weights_only=True)
    del state["settings"]["scale_lr"], state["settings"]["timeout"]
    torch.save(state, folder / "out" / "ckpt.pt")
    train_here(folder, "--resume=True", small=())
    assert same_run(folder / "calm", folder / "out")


@pytest.mark.parametrize("broken", [None, b"", b"PK"])
def test_a_run_survives_its_latest_checkpoint(trained, folder, broken):
    train_here(folder, "--keep=3", "--max_steps=8")
    whole = (folder / "out" / "ckpt.pt").read_bytes()
    (folder / "out" / "ckpt.pt").write_bytes(whole[:-100])
    assert train.newest_checkpoint(folder / "out")[1]["step"] == 8              # not that of step 4, nor of step 0
    for name in ("ckpt.pt", "ckpt-00000008.pt", "best.pt"):
        path = folder / "out" / name
        path.unlink() if broken is None else path.write_bytes(broken)
    train_here(folder, "--keep=3", "--resume=auto")
    assert same_run(trained / "out", folder / "out")
    steps = {name: torch.load(folder / "out" / name, weights_only=True)["step"] for name in ("ckpt-00000004.pt", "best.pt")}
    assert steps == {"ckpt-00000004.pt": 4, "best.pt": 12}


def test_what_an_evaluation_measures(trained, folder):
    """kappa of the weights at that step over the step's batch, and how far the step then moves the final hidden state."""
    train_here(folder, "--log_alignment=True", "--eval_interval=1", "--keep=12")
    assert [row[1] for row in log_of(folder / "out")] == [row[1] for row in log_of(trained / "out")]    # the run is the same
    with open(folder / "out" / "log.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    data = np.fromfile(folder / "data" / "pydocs" / "train_000.bin", np.uint16)[512:]
    for step in (0, 5, 11):
        starts = np.random.default_rng((1, step)).integers(len(data) - 32, size=(1, 4))[0]
        idx, targets = (torch.tensor(np.stack([data[s + i:s + i + 32] for s in starts]).astype(np.int64)) for i in (0, 1))
        gpt, after = (load_checkpoint(folder / "out" / f"ckpt-{s:08d}.pt")[0] for s in (step, step + 1))
        kappa = gpt.visit_alignment(idx, targets)
        assert [float(x) for x in rows[step]["kappa"].split()] == pytest.approx(kappa.flatten().tolist(), abs=1e-3)
        assert float(rows[step]["alignment"]) == pytest.approx(kappa.max().item() / 4, rel=1e-4)
        with torch.no_grad():
            F0, F1 = (m.double().hidden(idx).float() for m in (gpt, after))
        assert float(rows[step]["hidden_change"]) == pytest.approx(((F1 - F0).norm() / F0.norm()).item(), rel=1e-3)
    assert rows[12]["hidden_change"] == "" and 0 < float(rows[12]["alignment"]) <= 1


def test_an_evaluation_may_ask_for_other_rounds(trained, folder):
    shutil.copytree(trained / "out", folder / "out")
    before = (folder / "out" / "ckpt.pt").read_bytes()
    data = np.fromfile(folder / "data" / "pydocs" / "val_000.bin", np.uint16)[512:].astype(np.int64)
    starts = np.linspace(0, len(data) - 33, 10).astype(int)
    idx, targets = (torch.tensor(np.stack([data[s + i:s + i + 32] for s in starts])) for i in (0, 1))
    for n_loop in (1, 6):
        out = train_here(folder, "--resume=True", "--eval_only=True", f"--n_loop={n_loop}")
        gpt = load_checkpoint(folder / "out" / "ckpt.pt")[0]
        gpt.n_loop = n_loop
        with torch.no_grad():
            assert float(re.search(r"loss ([\d.]+)", out)[1]) == pytest.approx(gpt(idx, targets)[1].item(), abs=1e-4)
    assert (folder / "out" / "ckpt.pt").read_bytes() == before


def test_the_plan_of_the_papers_runs_needs_no_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for preset, n_loop, params, (K, d, h) in (("small", 3, 124e6, (12, 768, 2048)), ("medium", 7, 353e6, (24, 1024, 2752))):
        train.main([f"--preset={preset}", f"--n_loop={n_loop}", "--dry_run=True"])
        out = capsys.readouterr().out
        assert int(re.search(r"([\d,]+) parameters", out)[1].replace(",", "")) == pytest.approx(params, rel=0.01)
        assert int(re.search(r"checkpoints of ([\d,]+) MB", out)[1].replace(",", "")) == pytest.approx(params * 12 / 1e6, rel=0.01)
        assert "100,000 steps of 491,520 tokens, 49,152,000,000 tokens" in out
        per_token = 6 * (n_loop * K * (4 * d * d + 3 * d * h + 2 * d * 1024) + 50304 * d)
        assert float(re.search(r"(\S+) FLOPs", out)[1]) == pytest.approx(49.152e9 * per_token, rel=0.005)
    assert not any(tmp_path.iterdir())


def test_auto_takes_bfloat16_where_it_is_fast_and_a_resumed_run_stays_with_it(folder, monkeypatch):
    has = {"avx512_bf16": False, "amx_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has, raising=False)

    def dtype_of(*flags):
        train_here(folder, *flags, small=[flag for flag in SMALL if "dtype" not in flag])
        return torch.load(folder / "out" / "ckpt.pt", weights_only=True)["settings"]["dtype"]
    assert dtype_of("--max_steps=4") == "bfloat16"
    has["amx_bf16"] = False
    assert dtype_of("--resume=True", "--max_steps=5") == "bfloat16"
    assert dtype_of("--max_steps=4") == "float32"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such lock")
def test_two_runs_do_not_share_a_folder(trained, folder):
    first = start("train.py", *SMALL, "--max_steps=100000", cwd=folder)
    wait_for(first, "step      1/")
    with pytest.raises(SystemExit, match="another run is writing to out_dir=out"):
        train_here(folder)
    first.kill()
    first.communicate()
    train_here(folder)                                                          # the dead hold nothing
    assert same_run(trained / "out", folder / "out")
    assert torch.load(folder / "out" / "previous-1" / "ckpt.pt", weights_only=True)["settings"]["max_steps"] == 100000


def test_nobody_reading_does_not_stop_a_run(trained, folder):
    process = start("train.py", *SMALL, cwd=folder)
    process.stdout.close()
    assert process.wait() == 0, process.stderr.read()
    assert same_run(trained / "out", folder / "out")


def test_a_garbled_log_costs_only_its_garbage(trained, folder):
    shutil.copytree(trained / "out", folder / "out")
    with open(folder / "out" / "log.csv", "ab") as f:
        f.write(b"\xff\xfe garbage\n\xc2\xb2,1\n5,cut")
    train_here(folder, "--resume=True")
    assert log_of(folder / "out") == log_of(trained / "out")


def test_recomputing_bounds_memory(tmp_path):
    """Bytes held for the backward pass grow with each visit's inside, or with one state per visit."""
    def held(n_loop, recompute):
        model, idx = make(n_loop=n_loop, block_size=64), tokens(8, 64)
        model.recompute = recompute
        kept = {}

        def pack(x):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = model(idx, idx)[1]
        return sum(kept.values()), loss
    plain, recomputed = ([held(n_loop, recompute)[0] for n_loop in (2, 16)] for recompute in (False, True))
    state = 8 * 64 * 32 * 4
    assert plain[1] - plain[0] > 28 * 10 * state                # 28 more visits, more than ten states inside each
    assert recomputed[1] - recomputed[0] <= 28 * 2 * state


# ---- what users can get wrong -----------------------------------------------------------------------------------

def complaint(main, argv, capsys):
    """The one line that a program leaves on bad flags."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code not in (0, None)
    text = stop.value.code if isinstance(stop.value.code, str) else capsys.readouterr().err
    assert len(text.strip().splitlines()) == 1
    return text


BAD_TRAIN_FLAGS = [
    ("--no_such_flag=1", "no_such_flag"), ("stray", "stray"), ("--n_lay=3", "n_lay"), ("--preset=huge", "preset"),
    ("--resume=maybe", "resume"), ("--seed=-1", "seed=-1"), ("--batch_size=0", "batch_size=0"),
    ("--batch_size=1.5", "1.5"), ("--grad_accum=0", "grad_accum=0"), ("--block_size=0", "block_size=0"),
    ("--n_layer=0", "n_layer=0"), ("--n_loop=-3", "n_loop=-3"), ("--n_loop=four", "four"), ("--n_head=3", "n_head=3"),
    ("--n_embd=100", "n_embd=100"), ("--n_embd=4", "n_embd=4"), ("--scaling=postln", "postln"),
    ("--exponent=2", "exponent=2"), ("--exponent=nan", "exponent=nan"), ("--max_steps=0", "max_steps=0"),
    ("--learning_rate=0", "learning_rate=0"), ("--learning_rate=inf", "learning_rate=inf"),
    ("--learning_rate=nan", "learning_rate=nan"), ("--learning_rate=", "learning_rate"),
    ("--warmup_steps=-1", "warmup_steps=-1"), ("--weight_decay=-1", "weight_decay=-1"), ("--grad_clip=0", "grad_clip=0"),
    ("--eval_interval=0", "eval_interval=0"), ("--eval_windows=0", "eval_windows=0"), ("--log_interval=0", "log_interval=0"),
    ("--keep=-1", "keep=-1"), ("--device=tpu", "tpu"), ("--dtype=int8", "int8"), ("--compile=1", "compile"),
    ("--recompute=yes", "recompute"), ("--dataset=nowhere", "python prepare.py --dataset=nowhere"),
    ("--dataset=../..", "dataset=../.. is not the name"), ("--dataset=", "dataset= is not the name"),
    ("--out_dir=", "out_dir="), ("--resume=True", "no checkpoint"), ("--out_dir=/dev/null/x", "/dev/null/x"),
    ("--timeout=0", "timeout=0"), ("--scale_lr=1", "scale_lr"),
    ("--block_size=1000000", "block_size=1000000"), ("--eval_only=yes", "eval_only"), ("--num_fewshot=2", "num_fewshot"),
    ("--eval_only=True", "add --resume=True"), ("--tasks=all", "--eval_only=True"), ("--num_fewshot=1", "--tasks=NAMES"),
    ("--eval_only=True --resume=auto", "out holds no checkpoint"), ("--dataset=tasks", "dataset=tasks"),
]


@pytest.mark.parametrize("flag, named", BAD_TRAIN_FLAGS)
def test_train_refuses(flag, named, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert named in complaint(train.main, flag.split(), capsys)


@pytest.mark.parametrize("meta", ["{", "[]", "{}", '{"tokenizer": "words", "vocab_size": 300}',
                                  '{"tokenizer": "gpt2", "vocab_size": 256}', '{"tokenizer": "bytes", "vocab_size": "x"}',
                                  '{"tokenizer": "bytes", "vocab_size": 1e400}', '{"tokenizer": "bytes", "vocab_size": 256.5}'])
def test_train_refuses_a_dataset_that_does_not_describe_itself(meta, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    Path("data/pydocs/meta.json").write_text(meta)
    assert "meta.json" in complaint(train.main, ["--max_steps=1"], capsys)


@pytest.mark.parametrize("flag", ["--n_loop=5", "--n_embd=64", "--scaling=preln", "--exponent=0.3", "--preset=small",
                                  "--scale_lr=False"])
def test_resume_refuses_another_model(trained, flag, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    name = flag[2:].split("=")[0]
    assert f"{name}=" in (text := complaint(train.main, ["--resume=True", flag], capsys)) and "contradicts" in text


def test_resume_falls_back_to_the_newest_whole_checkpoint(trained, tmp_path, capsys):
    for name in ("ckpt.pt", "best.pt"):
        shutil.copy(trained / "out" / name, tmp_path)
    whole = (tmp_path / "ckpt.pt").read_bytes()
    (tmp_path / "ckpt.pt").write_bytes(whole[:len(whole) // 2])
    model, checkpoint = train.newest_checkpoint(tmp_path)
    assert "ckpt.pt is not a whole checkpoint" in capsys.readouterr().err
    assert checkpoint["step"] == torch.load(tmp_path / "best.pt", weights_only=True)["step"]
    (tmp_path / "best.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="ckpt.pt is not a whole checkpoint"):
        train.newest_checkpoint(tmp_path)


@pytest.mark.parametrize("flag, named", [
    ("--num_samples=0", "num_samples=0"), ("--max_new_tokens=0", "max_new_tokens=0"), ("--temperature=-1", "temperature=-1"),
    ("--temperature=nan", "temperature=nan"), ("--top_k=0", "top_k=0"), ("--seed=-1", "seed=-1"), ("--n_loop=0", "n_loop=0"),
    ("--n_loop=x", "n_loop"), ("--device=tpu", "tpu"), ("--nothing", "nothing"), ("--prompt=FILE:nowhere.txt", "nowhere.txt"),
    ("--prompt=FILE:broken.txt", "UTF-8"), ("--out_dir=elsewhere", "elsewhere"), ("--prompt=FILE:out", "no regular file"),
    (f"--prompt=FILE:{os.devnull}", "no regular file"),
])
def test_sample_refuses(trained, flag, named, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    Path("broken.txt").write_bytes(b"abc\xff")
    assert named in complaint(sample.main, [flag], capsys)


def test_foreign_checkpoints_are_refused(trained, tmp_path):
    state = torch.load(trained / "out" / "ckpt.pt", weights_only=True)
    path = tmp_path / "ckpt.pt"
    other = {**state, "config": {**state["config"], "n_embd": 64}}
    without = {name: value for name, value in state.items() if name != "tokenizer"}
    moments = {**state["optimizer"][0], "exp_avg": torch.zeros(3)}
    for content in (other, without, {"model": 1}, [1, 2], {**state, "config": {**state["config"], "depth": 3}},
                    {**state, "step": "12"}, {**state, "optimizer": {**state["optimizer"], 0: moments}}):
        torch.save(content, path)
        with pytest.raises(ValueError, match="ckpt.pt is not a whole checkpoint"):
            load_checkpoint(path)
    path.write_text("hello")
    with pytest.raises(ValueError, match="ckpt.pt is not a whole checkpoint"):
        load_checkpoint(path)


ALONE = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")


@pytest.mark.parametrize("variables", [
    dict(RANK="1"), dict(WORLD_SIZE="2"), ALONE, dict(ALONE, MASTER_PORT="x"), dict(ALONE, MASTER_PORT="0"),
    dict(ALONE, MASTER_PORT="29500", RANK="2"), dict(ALONE, MASTER_PORT="29500", RANK="-1"),
    dict(ALONE, MASTER_PORT="29500", LOCAL_RANK="1"), dict(ALONE, MASTER_PORT="29500", WORLD_SIZE="two"),
    dict(ALONE, MASTER_PORT="29500", LOCAL_RANK=""),
])
def test_processes_that_cannot_be_told_apart_are_refused(variables, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    text = complaint(train.main, SMALL, capsys)
    assert "torchrun" in text and all(f"{name}={value}" in text for name, value in variables.items() if value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_partner_that_never_comes_is_one_sentence(rank, folder):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    process = start("train.py", *SMALL, "--grad_accum=2", "--timeout=2", cwd=folder,
                    **dict(ALONE, MASTER_PORT=port, RANK=str(rank)))
    out, err = process.communicate()
    told = [line for line in err.splitlines() if line.startswith("train.py: ")]  # torch has lines of its own
    assert process.returncode == 1 and len(told) == 1 and "timeout=2" in told[0] and "Traceback" not in err
    assert not (folder / "out").exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no named pipes among its files")
@pytest.mark.parametrize("name", ["data/pydocs/meta.json", "data/pydocs/train_000.bin", "out/ckpt.pt"])
def test_a_pipe_in_a_files_place_is_named_and_not_waited_for(name, trained, folder, monkeypatch, capsys):
    shutil.copytree(trained / "out", folder / "out")
    (folder / "out" / "best.pt").unlink()
    monkeypatch.chdir(folder)
    os.remove(name)
    os.mkfifo(name)
    assert name in complaint(train.main, ["--resume=True"], capsys)


@pytest.mark.skipif(os.name == "nt", reason="SIGINT is not sent so on Windows")
@pytest.mark.parametrize("program, library", [("model.py", "torch"), ("train.py", "torch"), ("sample.py", "torch"),
                                              ("prepare.py", "numpy")])
def test_ctrl_c_during_an_import_is_one_word(program, library, tmp_path):
    (tmp_path / f"{library}.py").write_text("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)")
    process = start(program, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    out, err = process.communicate()
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


def test_programs_end_with_one_line_and_no_traceback(trained, tmp_path):
    for program, flag in (("train.py", "--n_loop=x"), ("train.py", "--dataset=nowhere"), ("sample.py", "--out_dir=none")):
        process = start(program, flag, cwd=tmp_path)
        out, err = process.communicate()
        assert process.returncode in (1, 2) and out == "" and len(err.splitlines()) == 1 and program in err


@pytest.mark.skipif(os.name == "nt", reason="SIGINT is not sent so on Windows")
@pytest.mark.parametrize("program", ["model.py", "train.py", "sample.py"])
def test_ctrl_c_ends_the_imports_with_one_word(program, tmp_path):
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)")
    process = start(program, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    wait_for(process, "importing")
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", "interrupted\n") and process.returncode == 130


# ---- sampling ---------------------------------------------------------------------------------------------------

def test_a_sample_ends_where_its_document_ends(monkeypatch, capsys):
    """Letters whose next one is certain, a b c end d e f ...: a sample ends at the end, or after max_new_tokens."""
    model, order = make(), [1, 2, 3, 0, *range(4, 31)]
    with torch.no_grad():
        for block in model.blocks:                                              # no branch changes the state
            block.attn.out.weight.zero_()
            block.mlp.down.weight.zero_()
        for i, letter in enumerate(order):                                      # 3 * 0.6 * 0.8 > 1: the next is likelier
            model.wte.weight[letter] = 3 ** i * (0.6 * torch.eye(32)[i] + 0.8 * torch.eye(32)[i + 1])
    letters = SimpleNamespace(start=[0], encode=lambda text: [ord(letter) - 96 for letter in text],
                              decode=lambda ids: bytes(96 + i for i in ids if i))
    monkeypatch.setattr(sample, "load_checkpoint", lambda path: (model, dict(tokenizer="letters")))
    monkeypatch.setattr(sample, "load_tokenizer", lambda name: letters)
    for prompt, n, text in (("a", 9, "abc"), ("ab", 1, "abc"), ("a", 1, "ab"), ("c", 5, "c"), ("", 3, "def")):
        sample.main(["--temperature=0", "--num_samples=2", f"--prompt={prompt}", f"--max_new_tokens={n}"])
        assert capsys.readouterr().out == f"{text}\n{text}\n"


def test_a_prompt_is_text_or_a_regular_file_or_standard_input(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("The é".encode())))
    assert sample.read_prompt("-") == "The é" == sample.read_prompt("The é")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")                                            # nobody writes to it
        process = start("sample.py", f"--prompt=FILE:{tmp_path}/pipe", cwd=trained)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 1 and out == "" and len(err.splitlines()) == 1 and "no regular file" in err


def test_sample_streams_the_model(trained):
    flags = ["--max_new_tokens=60", "--temperature=0"]
    out, err = run("sample.py", "--prompt=The é", *flags, cwd=trained)
    model, _ = load_checkpoint(trained / "out" / "ckpt.pt")
    prompt = list("The é".encode())
    with torch.no_grad():
        ids = greedy_without_cache(model, torch.tensor([prompt]), 60)[0].tolist()
    assert out == bytes(prompt + ids).decode(errors="replace") + "\n" and err == ""
    torch.manual_seed(1)                                                        # bytes at random: hardly any are UTF-8
    ids = [token.item() for token in model.generate(torch.tensor([prompt]), 60, temperature=50.0)]
    wild = run("sample.py", "--prompt=The é", "--max_new_tokens=60", "--temperature=50", cwd=trained)[0]
    assert wild == "The é" + bytes(ids).decode(errors="replace") + "\n" and "\ufffd" in wild
    (trained / "prompt.txt").write_text("The é", encoding="utf-8")
    assert run("sample.py", "--prompt=FILE:prompt.txt", *flags, cwd=trained)[0] == out


def test_sample_cuts_a_long_prompt_with_a_note(trained):
    out, err = run("sample.py", "--prompt=" + "x" * 40 + "The " * 8, "--max_new_tokens=5", "--temperature=0", cwd=trained)
    cut, _ = run("sample.py", "--prompt=" + "The " * 8, "--max_new_tokens=5", "--temperature=0", cwd=trained)
    assert out.removeprefix("x" * 40) == cut and "72 tokens" in err and "32" in err


# ---- data -----------------------------------------------------------------------------------------------------

UNICODE = "naïve – 东京 🙂 <|endoftext|> e\u0301\u00a0\u2028 \r\n\t" + "\x1c\x85 'll  we've 12345   "


TINY = r"""
import itertools


def gpt2():  # the real pattern and end-of-text; of the merges, each pair of some bytes
    ranks = {bytes([i]): i for i in range(256)}
    for pair in itertools.product(b"awthe d1?!'s\n\t", repeat=2):
        ranks[bytes(pair)] = len(ranks)
    return dict(name="gpt2", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256},
                pat_str=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


ENCODING_CONSTRUCTORS = {"gpt2": gpt2}
"""


@pytest.fixture
def tiny(tmp_path_factory, monkeypatch):
    """A small tokenizer in the place of GPT-2's, for this process and those that it starts. -> its encode"""
    plugins = tmp_path_factory.mktemp("tiny")
    (plugins / "tiktoken_ext").mkdir()
    (plugins / "tiktoken_ext" / "openai_public.py").write_text(TINY)  # found before tiktoken's own
    monkeypatch.setenv("PYTHONPATH", str(plugins), prepend=os.pathsep)
    monkeypatch.setattr(sys, "path", [str(plugins), *sys.path])  # a worker process has its parent's
    exec(TINY, made := {})
    encoding = tiktoken.Encoding(**made["gpt2"]())
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    return encoding.encode_ordinary


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder, whose programs find ours."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    return tmp_path


def python(*args, **env):
    return subprocess.run([sys.executable, *map(str, args)], text=True, capture_output=True, timeout=60,
                          env={**os.environ, **env})


def refused(args, capsys):
    """-> the one line that prepare.py ends with."""
    assert prepare.main(args) == 1
    error = capsys.readouterr().err
    assert error.startswith("prepare.py: ") and error.count("\n") == 1, error
    return error


def shard_of(tokens, magic=20240520, version=1, count=None):
    """By llm.c's description of the format."""
    count = len(tokens) if count is None else count
    return struct.pack("<256i", magic, version, count, *[0] * 253) + np.asarray(tokens, "<u2").tobytes()


def tokens_in(folder, split):
    """All tokens of a split, read by the format's description alone."""
    return np.concatenate([np.fromfile(path, "<u2", offset=1024) for path in sorted(folder.glob(f"*{split}*.bin"))]
                          or [np.empty(0, "<u2")]).tolist()


def bytes_in(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_shards_have_llm_cs_layout_are_cut_at_their_size_and_lose_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 10)
    for total, lengths in [(0, []), (1, [1]), (10, [10]), (11, [10, 1]), (35, [10, 10, 10, 5])]:
        folder = tmp_path / str(total)
        folder.mkdir()
        tokens = np.random.default_rng(0).integers(0, 65536, total, np.uint16)
        assert prepare.write_shards(folder, "train", [tokens[:3], tokens[3:3], tokens[3:]]) == total
        assert sorted(os.listdir(folder)) == [f"train_{i:03d}.bin" for i in range(len(lengths))]
        for i, length in enumerate(lengths):
            assert (folder / f"train_{i:03d}.bin").read_bytes() == shard_of(tokens[10 * i:][:length])
            read = prepare.read_shard(folder / f"train_{i:03d}.bin")
            assert isinstance(read, np.memmap) and read.dtype == np.uint16 and (read == tokens[10 * i:][:length]).all()


def test_a_shard_that_fails_is_named(tmp_path):
    path, good = tmp_path / "x_train_0.bin", shard_of([1, 2, 3])
    for raw, why in [(good[:-1], "cut"), (good[:700], "cut"), (good + b"\0\0", "padded"), (b"", "empty"),
                     (shard_of([]), "empty"), (shard_of([1], magic=20240519), "magic"), (b"hello", "magic"),
                     (shard_of([1], version=2), "version"), (shard_of([1, 2], count=-1), "padded")]:
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=f"(?s){path.name}.*{why}"):
            prepare.read_shard(path)


def test_nanogpts_shards_come_in_by_the_command_that_their_refusal_names(here):
    rng = np.random.default_rng(1)
    for split, n in (("train", 1000), ("val", 100)):
        rng.integers(0, 50257, n).astype("<u2").tofile(f"{split}.bin")
    with pytest.raises(ValueError, match="nanoGPT.*python -c ") as refused:
        prepare.read_shard("train.bin")
    subprocess.run(str(refused.value).partition("by: ")[2].replace("NAME", "mine"), shell=True, check=True)
    for split in ("train", "val"):
        assert tokens_in(Path("data/mine"), split) == np.fromfile(f"{split}.bin", "<u2").tolist()
    meta = json.loads(Path("data/mine/meta.json").read_text())
    assert meta == {"tokenizer": "gpt2", "vocab_size": 50304, "tokens": {"train": 1000, "val": 100}}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFO")
def test_what_is_no_file_is_named_and_never_waited_for(here):
    for name in ("data/a/meta.json", "data/b/train_000.bin"):
        Path(name).parent.mkdir(parents=True)
        os.mkfifo(name)
    for path in ("data/b/train_000.bin", "data", "/dev/zero"):
        run = python("-c", "import sys, prepare; prepare.read_shard(sys.argv[1])", path)
        assert run.stderr.endswith(f"ValueError: {path} is not a regular file\n")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    for dataset, path, named in [("a", HERE / "prepare.py", "data/a/meta.json is not"),
                                 ("b", "socket", "socket is not a regular file"),
                                 ("b", "data/b/train_000.bin", "train_000.bin is not a regular file"),
                                 ("b", "/dev/null", "/dev/null is not a regular file"), ("b", "gone", "gone: ")]:
        run = python(HERE / "prepare.py", f"--dataset={dataset}", "--input", path)
        assert run.returncode == 1 and run.stderr.count("\n") == 1 and named in run.stderr, run.stderr


def test_an_unfinished_shard_has_no_shards_name(tmp_path, monkeypatch):
    def die(source, target):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(OSError, match="No space") as error:
        prepare.write_shards(tmp_path, "train", [np.array([1, 2], np.uint16)])
    assert error.value.filename.endswith("train_000.bin") and not list(tmp_path.iterdir())
    monkeypatch.undo()
    with prepare.whole_file(tmp_path / "train_000.bin") as file:
        file.write(b"half")
        assert list(tmp_path.iterdir()) and not [*tmp_path.glob("*train*.bin"), *tmp_path.glob("*val*.bin")]


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot open a folder")
def test_a_file_then_its_name_are_on_the_disk(tmp_path, monkeypatch):
    synced, replace, sync = [], os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda source, target: (synced.append("named"), replace(source, target)))
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), sync(fd)))
    with prepare.whole_file(tmp_path / "a") as file:
        file.write(b"a")
    assert synced == [os.stat(tmp_path / "a").st_ino, "named", os.stat(tmp_path).st_ino]


def test_bytes_tokenizer():
    tokenizer = prepare.load_tokenizer("bytes")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.start) == ("bytes", 256, [])
    ids = list(UNICODE.encode())
    assert tokenizer.encode(UNICODE) == ids and tokenizer.decode(np.array(ids)) == UNICODE.encode()
    assert tokenizer.encode("a\udcff") == [97, 63]
    with pytest.raises(ValueError, match="'words'"):
        prepare.load_tokenizer("words")


def test_gpt2_tokenizer():
    try:
        tokenizer = prepare.load_tokenizer("gpt2")
    except OSError as error:
        pytest.skip(f"its merges are what is tested. {error}")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.start) == ("gpt2", 50304, [50256])
    assert tokenizer.encode("Hello world, 12345") == [15496, 995, 11, 17031, 2231]
    assert tokenizer.encode(UNICODE) == tiktoken.get_encoding("gpt2").encode(UNICODE, disallowed_special=())
    assert 50256 not in tokenizer.encode(UNICODE)
    ids = [50256, *tokenizer.encode(UNICODE), 50257, 50303]
    assert tokenizer.decode(np.array(ids, np.uint16)) == UNICODE.encode()


@pytest.mark.parametrize("blocks", [1, 7, 500])
def test_a_long_document_is_tokenized_in_pieces_as_if_at_once(blocks, tiny):
    tokenizer, rng = prepare.load_tokenizer("gpt2"), random.Random(0)
    words = ["a", "wad", "theta", " ", "  ", "\n\n", "\t", "'s", "d's", "1", "?!", "'", "\x1c", "\u00a0", "东", "，", "🙂"]
    text = "".join(rng.choices(words, k=4000))
    pieces = list(prepare.tokens_of((text[i:i + blocks] for i in range(0, len(text), blocks)), tokenizer))
    assert len(pieces) > len(text) / blocks / 9
    assert np.concatenate(pieces).tolist() == [50256] + tiny(text) != [50256] + list(text.encode())


def test_missing_gpt2_files_are_one_sentence(here):
    run = python(HERE / "prepare.py", "--tokenizer=gpt2", TIKTOKEN_CACHE_DIR="none", HTTPS_PROXY="http://127.0.0.1:9",
                 NO_PROXY="")
    assert run.returncode == 1 and run.stderr.count("\n") == 1 and "TIKTOKEN_CACHE_DIR" in run.stderr


@pytest.mark.parametrize("hidden", ["pydoc_data", "lzma"])
def test_import_takes_only_numpy(hidden, here):
    Path("a.txt").write_text("hello, world, hello, world")
    code = ("import sys\n"
            f"for name in ('requests', 'tiktoken', 'lzma', 'torch', 'urllib3', '{hidden}'): sys.modules[name] = None\n"
            "import prepare\nprepare.main(['--dataset=own', '--input', 'a.txt'])\n"
            "sys.exit(prepare.main([]) or prepare.main(['--dataset=openwebtext']))")
    run = python("-c", code)
    assert Path("data/own/meta.json").exists() and run.returncode == 1
    assert run.stderr.count("\n") == 1 and {"pydoc_data": "manual", "lzma": "lzma"}[hidden] in run.stderr, run.stderr


def test_pydocs_is_the_manual(here):
    from pydoc_data.topics import topics
    prepare.prepare_pydocs()
    train, val = (tokens_in(Path("data/pydocs"), split) for split in ("train", "val"))
    text, place = bytes(train + val).decode(), 0
    for name in sorted(topics):
        place = text.index(topics[name].rstrip("\n"), place) + 1
    assert len(text) < sum(len(topic) + 4 for topic in topics.values())
    meta = json.loads(Path("data/pydocs/meta.json").read_text())
    assert (meta["tokenizer"], meta["vocab_size"]) == ("bytes", 256) and sys.version.split()[0] in meta["source"]
    assert meta["tokens"] == {"train": len(train), "val": len(val)}


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2"])
def test_a_text_is_cut_at_nine_tenths_and_read_in_blocks_as_if_at_once(tokenizer, tiny, here, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 100)
    monkeypatch.setattr(prepare, "BLOCK", 3)
    encode = tiny if tokenizer == "gpt2" else lambda text: list(text.encode())
    for n in range(6):  # the cut falls on every byte of a character
        text = "x" * n + UNICODE * 9 + "🙂" * 60
        Path("a.txt").write_text(text, encoding="utf-8", newline="")
        assert prepare.main([f"--dataset=d{n}", f"--tokenizer={tokenizer}", "--input", "a.txt"]) == 0
        head = text.encode()[:len(text.encode()) * 9 // 10].decode(errors="ignore")
        for split, part in (("train", head), ("val", text[len(head):])):
            assert tokens_in(Path(f"data/d{n}"), split) == [50256] * (tokenizer == "gpt2") + encode(part)
    data = text.encode()
    for place in (0, 1, 2, 3, len(data) // 2, len(data) * 9 // 10, len(data) - 1):  # a fault is named as at once
        for fault in (b"\xff", b"\xe4\xb8", b"\xf0\x9f\x99"):
            bad = data[:place] + fault + data[place:]
            Path("bad.txt").write_bytes(bad)
            with pytest.raises(UnicodeDecodeError) as error:
                bad.decode()
            said = f"byte {bad[error.value.start]:#04x} at offset {error.value.start}\n"
            error = refused(["--dataset=bad", f"--tokenizer={tokenizer}", "--input", "bad.txt"], capsys)
            assert error == f"prepare.py: {here / 'bad.txt'} is not UTF-8: {said}"
    assert not list(Path("data/bad").iterdir())


def test_a_large_text_is_prepared_in_flat_memory(here):
    pytest.importorskip("resource")
    code = ("import resource, subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]], check=True); "
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * (1 if sys.platform == 'darwin' else 1024))")
    peaks = []  # measured from a small process: a child's peak is never below what its parent has
    for lines in (1, 4_000_000):
        Path("a.txt").write_bytes(b"some text, with lines in it\n" * lines)
        run = python("-c", code, HERE / "prepare.py", f"--dataset=d{lines}", "--input", "a.txt")
        peaks.append(int(run.stdout.split()[-1]))
    assert peaks[1] - peaks[0] < 60e6  # of 112 MB


def make_files(folder, sizes):
    rng = random.Random(1)
    for name, size in sizes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(rng.choice(b"abc de\n") for _ in range(size)))


def test_several_texts_are_split_by_document(tiny, here):
    sizes = {f"{i % 7}/{i}.txt": 50 + 13 * i for i in range(100)}
    make_files(here / "in", sizes)
    make_files(here / "in", {".hidden": 9, ".git/x": 9, "0/.y": 9})
    assert prepare.main(["--dataset=own", "--input", "in"]) == 0
    room, val = sum(sizes.values()) // 10, []
    for name in sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).hexdigest()):
        if sizes[name] <= room:
            room, val = room - sizes[name], val + [name]
    content = {name: (here / "in" / name).read_bytes() for name in sizes}
    assert bytes(tokens_in(Path("data/own"), "val")) == b"".join(content[name] for name in sorted(val))
    assert bytes(tokens_in(Path("data/own"), "train")) == b"".join(content[n] for n in sorted(set(sizes) - set(val)))
    assert json.loads(Path("data/own/meta.json").read_text())["documents"] == 100
    assert sum(sizes.values()) * 0.09 < len(tokens_in(Path("data/own"), "val")) <= sum(sizes.values()) * 0.1

    # A document begins with end-of-text under gpt2.
    assert prepare.main(["--dataset=gpt2", "--tokenizer=gpt2", "--input", "in"]) == 0
    for split, names in (("train", set(sizes) - set(val)), ("val", val)):
        documents = split_documents(tokens_in(Path("data/gpt2"), split))
        assert documents == [tiny(content[name].decode()) for name in sorted(names)]

    make_files(here, {"a": 300, "b": 200, "c": 250})  # none fits into a tenth: the smallest is held out
    assert prepare.main(["--dataset=few", "--input", "a", "b", "c"]) == 0
    assert bytes(tokens_in(Path("data/few"), "val")) == Path("b").read_bytes()
    assert bytes(tokens_in(Path("data/few"), "train")) == Path("a").read_bytes() + Path("c").read_bytes()

    # A folder's place, and a file given twice, change nothing.
    os.rename("in", "elsewhere")
    assert prepare.main(["--dataset=moved", "--input", "elsewhere", "elsewhere/1/../0/0.txt"]) == 0
    assert tokens_in(Path("data/moved"), "val") == tokens_in(Path("data/own"), "val")
    assert tokens_in(Path("data/moved"), "train") == tokens_in(Path("data/own"), "train")


def test_texts_that_cannot_be_used_are_one_sentence(here, capsys):
    for name, content in [("bad", b"abc\xe4\xb8def"), ("empty", b""), ("x", b"x"), ("ok", b"enough to cut in two")]:
        Path(name).write_bytes(content)
    os.mkdir("nothing")
    for paths, words in [(["bad"], ["bad", "UTF-8", "offset 3"]), (["ok", "bad"], ["bad", "offset 3"]),
                         (["empty"], ["no text in empty"]), (["nothing"], ["no text"]), (["x"], ["too short"]),
                         (["x", "ok"], ["too short", "1 token"]), (["gone"], ["gone"]), ([""], ["''"])]:
        error = refused(["--dataset=own", "--input", *paths], capsys)
        assert all(word in error for word in words) and not Path("data/own/meta.json").exists()
    assert prepare.main(["--dataset=own", "--input", "ok", "empty"]) == 0
    assert "left out: empty is empty\n" in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no FIFO")
def test_what_a_folder_holds_besides_files_is_left_out_and_told(here, monkeypatch, capsys):
    make_files(here / "in", {"a": 100, "x/b": 100, "y/c": 100, "locked/d": 100})
    os.mkfifo("in/fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("in/socket")
    for target, link in [("gone", "dangling"), ("/dev/zero", "device"), ("..", "up"), (".", "self"), ("../y", "x/y"),
                         ("../x", "y/x"), ("round", "round"), ("/proc/self/nothing/x", "nowhere")]:
        os.symlink(target, f"in/{link}")
    scan = Path.iterdir  # permissions do not stop root
    monkeypatch.setattr(Path, "iterdir", lambda path: Path("gone").stat() if path.name == "locked" else scan(path))
    assert prepare.main(["--dataset=own", "--input", "in"]) == 0
    left_out = re.findall("left out: (.*)", capsys.readouterr().out)
    for name in ("fifo", "socket", "dangling", "device", "up", "self", "round", "nowhere"):
        assert sum(f"in/{name}" in line for line in left_out) == 1, left_out
    assert len(left_out) == 11  # and the locked folder, and each folder's second way
    assert sorted(tokens_in(Path("data/own"), "train") + tokens_in(Path("data/own"), "val")) == sorted(
        b"".join((here / "in" / name).read_bytes() for name in ("a", "x/b", "y/c")))
    os.symlink("in", "way")  # a link that is given is followed
    assert prepare.main(["--dataset=way", "--input", "way/x"]) == 0
    assert prepare.main(["--dataset=new", "--input", "in/locked"]) == 1 and "gone" in capsys.readouterr().err


def test_a_text_that_changed_is_prepared_anew_and_a_kill_leaves_a_whole_dataset(here, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 100)
    args, folder, own = ["--dataset=own", "--input", "in"], Path("data/own"), {"mine.txt": b"stays"}
    made = []
    for size in (500, 350):  # the one as it was, and the other as it is to be
        make_files(here / "in", {"a": size, "b": 70})
        os.utime("in/a", ns=(size, size))
        assert prepare.main(args) == 0
        made.append(bytes_in(folder) | own)
        os.rename("data", f"made-{size}")
    Path("made-500/own/mine.txt").write_bytes(b"stays")
    calls = [(os, "replace"), (os, "fsync"), (Path, "unlink"), (shutil, "rmtree")]

    def counted(call, left):
        def counting(*args, **flags):
            if next(left) == 0:
                raise KeyboardInterrupt
            return call(*args, **flags)
        return counting

    for k in itertools.count():  # each call in turn is the one that does not happen any more
        shutil.rmtree("data", ignore_errors=True)
        shutil.copytree("made-500", "data")
        with monkeypatch.context() as patch:
            left = itertools.count(k, -1)
            patch.setattr(os, "remove", lambda path: None)  # a kill tidies nothing
            for place, name in calls:
                patch.setattr(place, name, counted(getattr(place, name), left))
            try:
                assert prepare.main(args) == 0
                break
            except KeyboardInterrupt:
                left = itertools.count(-1, -1)
        if (folder / "meta.json").exists():
            assert {name: data for name, data in bytes_in(folder).items() if "new.part" not in name} in made
        assert prepare.main(args) == 0 and bytes_in(folder) == made[1]
    assert k > 10 and "changed since" in capsys.readouterr().out
    assert prepare.main(args) == 0 and "nothing to do" in capsys.readouterr().out
    Path("in/a").write_bytes(b"\xff" * 100)  # what cannot be used does not cost the old one
    assert prepare.main(args) == 1 and bytes_in(folder) == made[1]
    meta = json.loads((folder / "meta.json").read_text())  # as made before changes were noticed
    del meta["fingerprint"]
    (folder / "meta.json").write_text(json.dumps(meta))
    assert prepare.main(args) == 0 and "nothing to do" in capsys.readouterr().out


def test_a_finished_dataset_is_left_alone(here, capsys):
    Path("a").write_text("some text that is long enough")
    for args, other in [([], ["--tokenizer=gpt2"]), (["--dataset=trainval", "--input", "a"], ["--input", "a", "b"])]:
        assert prepare.main(args) == 0
        folder = Path("data", "trainval" if args else "pydocs")
        before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
        capsys.readouterr()
        assert prepare.main(args) == 0 and "nothing to do" in capsys.readouterr().out
        assert re.search(r"data.*was made with .*delete the folder", refused(args + other, capsys))
        assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert len(tokens_in(folder, "train")) + len(tokens_in(folder, "val")) == 29  # its name does not mix the splits
    (folder / "meta.json").write_text("[1")
    assert "meta.json" in refused(args, capsys)


def test_a_full_disk_is_one_sentence(here):
    resource = pytest.importorskip("resource")
    Path("a.txt").write_bytes(b"text" * 20_000)
    run = subprocess.run([sys.executable, HERE / "prepare.py", "--dataset=own", "--input", "a.txt"], text=True,
                         capture_output=True,
                         preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)))
    assert run.returncode == 1 and run.stderr.count("\n") == 1 and "train_000.bin" in run.stderr
    assert not list(here.rglob("*.bin")) and not list(here.rglob("meta.json"))


@pytest.mark.parametrize("args", [
    "--dataset=nowhere", "--dataset=../up --input prepare.py", "--dataset=a/b --input x", "--dataset=. --input x",
    "--dataset= --input x", "--dataset=-x --input x", "--input x", "--dataset=pydocs --input x", "--tokenizer=words",
    "--dataset=own --input", "--workers=2", "--subsets=0", "--keep_raw=True", "--shards=1", "--data=pydocs", "extra",
    "--dataset=tasks --input x", "--dataset=tasks",
    *("--dataset=openwebtext " + flags for flags in (
        "--input x", "--tokenizer=bytes", "--shards=1", "--workers=0", "--workers=x", "--keep_raw=yes", "--subsets=",
        "--subsets=21", "--subsets=2-0", "--subsets=-1", "--subsets=1-", "--subsets=1,,2", "--subsets=all")),
    *("--dataset=fineweb_edu " + flags for flags in (
        "--tokenizer=bytes", "--workers=2", "--subsets=0", "--shards=0", "--shards=1001", "--shards=many"))])
def test_bad_flags(args, here, capsys):
    with pytest.raises(SystemExit) as stop:
        prepare.main(args.split())
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "prepare.py: error: " in error, error
    assert not list(here.iterdir())


def test_subsets_are_read_as_written():
    for text, subsets in [("5", [5]), ("0-2", [0, 1, 2]), ("3,0", [0, 3]), ("19-20,2,1-3", [1, 2, 3, 19, 20])]:
        assert prepare.parse_args(["--dataset=openwebtext", f"--subsets={text}"]).subsets == subsets


class Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        hub, path = self.server, self.path.partition("?")[0]
        plan = hub.plan.get(path.rpartition("/")[2], [])
        fault = plan.pop(0) if plan else ""
        hub.log.append((path.rpartition("/")[2], self.headers.get("Range"), fault))
        if isinstance(fault, int):
            return self.reply(fault, {"Retry-After": "0"} if fault == 429 else {})
        data = hub.files.get(path)
        if data is None:
            return self.reply(404)
        first = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        if fault == "redirect":
            hub.files["/cdn" + path] = data
            return self.reply(302, {"Location": f"/cdn{path}?sig=1", "X-Linked-Size": len(data),
                                    "X-Linked-Etag": f'"{hashlib.sha256(data).hexdigest()}"'})
        if fault == "unasked range":
            return self.reply(206, {"Content-Range": "bytes 5-9/10"})
        if fault.startswith("flip"):
            place = len(data) - 1 if fault == "flip last" else 0
            data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1:]
        headers = {} if hub.etag is None else {"ETag": f'"{hub.etag(path)}"'}
        if first and not fault.startswith("no range"):
            if first >= len(data):
                return self.reply(416, {"Content-Range": f"bytes */{len(data)}"})
            first = 0 if fault == "wrong range" else first
            self.reply(206, {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}",
                             "Content-Length": len(data) - first, **headers}, end=False)
            data = data[first:]
        elif fault == "chunked":
            self.reply(200, {"Transfer-Encoding": "chunked"}, end=False)
            data = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
        else:
            length = len(data) + {"long": 7, "short": -7}.get(fault, 0)
            self.reply(200, {"Content-Length": length, **headers}, end=False)
            data = data[:length]
        self.wfile.write(data[:len(data) // 2] if fault in ("drop", "no range drop", "hang") else data)
        if fault == "hang":
            self.wfile.flush()
            hub.hanging.set()
            hub.closing.wait(60)
        self.close_connection = self.close_connection or fault in ("drop", "no range drop", "long", "hang")

    def reply(self, status, headers=(), end=True):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, str(value))
        if end:
            self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


@contextlib.contextmanager
def serve(files, monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.handle_error = lambda request, address: None  # clients that go away
        server.files, server.plan, server.log = files, {}, []
        server.etag, server.hanging, server.closing = None, threading.Event(), threading.Event()
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(prepare, "BACKOFF", 0)
        try:
            yield server
        finally:
            server.closing.set()
            server.shutdown()


FINEWEB = ("/datasets/karpathy/fineweb-edu-100B-gpt2-token-shards/resolve/a33f75d78c7f74236fb03754ec1eb3cc77507d64/"
           "edu_fineweb_{}.bin")


def fineweb(n):
    rng = np.random.default_rng(2)
    return {FINEWEB.format(f"{'train' if i else 'val'}_{i:06d}"): shard_of(rng.integers(0, 50257, 40_000 + i))
            for i in range(n + 1)}


def assert_fineweb(folder, files, n):
    names = {path.rpartition("/")[2]: data for path, data in list(files.items())[:n + 1] if "/cdn" not in path}
    have = bytes_in(folder)
    meta = json.loads(have.pop("meta.json"))
    assert have == names
    assert meta["shards"] == n and (meta["tokenizer"], meta["vocab_size"]) == ("gpt2", 50304)
    assert meta["tokens"] == {"train": sum(40_000 + i for i in range(1, n + 1)), "val": 40_000}
    assert FINEWEB.startswith(f"/datasets/{meta['source']}/resolve/{meta['revision']}/")


TRAIN1 = "edu_fineweb_train_000001.bin"


@pytest.mark.parametrize("plan", [
    [], ["drop"] * 8, [503, 429, 500, 502], ["redirect", "drop", "redirect"], ["long"], ["chunked"],
    ["drop", "no range"], ["drop", "wrong range", "unasked range"], ["drop", 503, "no range drop", "drop"]])
def test_fineweb_arrives_whole_from_a_server_that_misbehaves(plan, here, monkeypatch, capsys):
    files = fineweb(3)
    with serve(files, monkeypatch) as hub:
        hub.plan = {TRAIN1: list(plan)}
        assert prepare.main(["--dataset=fineweb_edu", "--shards=3"]) == 0, capsys.readouterr()
        assert not hub.plan[TRAIN1]
        assert_fineweb(Path("data/fineweb_edu"), files, 3)
        gets = [entry[1] for entry in hub.log if entry[0] == TRAIN1]
        if plan == ["drop"] * 8:  # each try goes on where the last one broke off
            size, have, ranges = len(files[FINEWEB.format("train_000001")]), 1, []
            for _ in range(9):
                ranges.append(f"bytes={have - 1}-")
                have += (size - have + 1) // 2 - 1
            assert gets == ranges


@pytest.mark.parametrize("plan, words", [
    ([404], "404"), ([403], "403"), (["short"] * 2, "cut"), (["no range drop"] * 7, "broke off 6 times"),
    ([503] * 9, "503"), (["flip"] * 2, "magic")])
def test_fineweb_fails_in_one_sentence(plan, words, here, monkeypatch, capsys):
    files, folder, args = fineweb(3), Path("data/fineweb_edu"), ["--dataset=fineweb_edu", "--shards=3"]
    with serve(files, monkeypatch) as hub:
        hub.plan = {TRAIN1: list(plan)}
        error = refused(args, capsys)
        assert words in error and TRAIN1 in error
        assert not (folder / "meta.json").exists() and not (folder / TRAIN1).exists()
        hub.plan = {}
        assert prepare.main(args) == 0
        assert_fineweb(folder, files, 3)


def test_what_a_sha256_tells(here, monkeypatch, capsys):
    files = fineweb(1)
    part, data = Path("data/fineweb_edu", TRAIN1 + ".part"), files[FINEWEB.format("train_000001")]

    def asked(hub, beginning, *plan):
        """Prepare with a beginning of the shard there already. -> the ranges that are asked for"""
        shutil.rmtree("data", ignore_errors=True)
        part.parent.mkdir(parents=True)
        part.write_bytes(beginning)
        hub.plan, hub.log = {TRAIN1: list(plan)}, []
        assert prepare.main(["--dataset=fineweb_edu", "--shards=1"]) == 0
        assert_fineweb(part.parent, files, 1)
        return [asked for name, asked, fault in hub.log if name == TRAIN1 and fault == plan[0]]

    with serve(files, monkeypatch) as hub:
        hub.etag = lambda path: "0" * 64
        assert "sha256" in refused(["--dataset=fineweb_edu", "--shards=1"], capsys)
        assert not list(Path().rglob("*train*.bin"))
        hub.etag = lambda path: "0" * 40  # not a sha256: says nothing
        assert asked(hub, data, "") == [f"bytes={len(data) - 1}-"]  # killed when all had come: not fetched again
        # A stale beginning is found out, and the file fetched anew; through the hub's redirect as well.
        stale = data[:5000] + b"stale" + data[5005:9000]
        hub.etag = lambda path: hashlib.sha256(files[path]).hexdigest()
        assert asked(hub, stale, "", "") == ["bytes=8999-", "bytes=0-"]
        hub.etag = None
        assert asked(hub, stale, "redirect", "", "redirect", "") == ["bytes=8999-", "bytes=0-"]
        shutil.rmtree("data")
        hub.plan = {TRAIN1: ["redirect", "flip last"] * 2}
        assert "sha256" in refused(["--dataset=fineweb_edu", "--shards=1"], capsys)


def test_fineweb_grows_and_does_not_shrink(here, monkeypatch, capsys):
    files, folder, args = fineweb(4), Path("data/fineweb_edu"), ["--dataset=fineweb_edu", "--shards"]
    with serve(files, monkeypatch) as hub:
        assert prepare.main([*args, "2"]) == 0
        assert "0.600 GB to download" in capsys.readouterr().out
        assert_fineweb(folder, files, 2)
        hub.log, hub.plan = [], {TRAIN1.replace("1.", "4."): [404]}
        for n in "12":
            assert prepare.main([*args, n]) == 0 and not hub.log
            assert "nothing to do" in capsys.readouterr().out
        assert "404" in refused([*args, "4"], capsys)
        assert not (folder / "meta.json").exists()  # train.py must not take it for finished
        for n, there in (("1", 3), ("4", 4)):  # what has come stays
            assert prepare.main([*args, n]) == 0
            assert_fineweb(folder, files, there)


def test_no_room_no_server_no_file_are_known_before_anything_is_made(tiny, here, monkeypatch, capsys):
    owt, fineweb_edu = ["--dataset=openwebtext", "--subsets=0"], ["--dataset=fineweb_edu", "--shards=2"]
    monkeypatch.setattr(prepare, "BACKOFF", 0)
    for endpoint, words in (("http://127.0.0.1:9", "cannot reach"), ("nonsense", "HF_ENDPOINT=nonsense")):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        assert words in refused(fineweb_edu, capsys)
    with serve({}, monkeypatch) as hub:
        for args in (owt, fineweb_edu):
            assert re.search(": the server answers 404 to ", refused(args, capsys))
        monkeypatch.setattr(prepare.shutil, "disk_usage", lambda path: prepare.SimpleNamespace(free=100_000_000))
        hub.log = []
        for args, need in ((owt, "1.512"), (owt[:1] + ["--keep_raw=True"], "31.752"), (fineweb_edu, "0.600")):
            assert f"needs {need} GB of disk, and only 0.100 GB are free" in refused(args, capsys) and not hub.log
    assert not [path for path in here.rglob("*") if path.is_file()]

OPENWEBTEXT = ("/datasets/Skylion007/openwebtext/resolve/8cfd553694d06979cfec29248b200468786f0294/"
               "subsets/urlsf_subset{:02d}.tar")


def hash_of(name):
    return int(hashlib.sha256(name.encode()).hexdigest()[:16], 16)


def tar_of(entries, mode="w"):
    """{name: bytes, or the type of an entry that is no file} -> a tar's bytes."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as tar:
        for name, content in entries.items():
            info = tarfile.TarInfo(name)
            if content in (tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE):
                info.type, info.linkname, content = content, "../../evil", b""
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def make_archive(subset, members=5, documents=60):
    """-> a subset's archive in the real layout, [(name, text)] of its documents, number of what is to be left out."""
    lzma = pytest.importorskip("lzma")
    rng, good, outer = random.Random(subset), [], {"openwebtext": tarfile.DIRTYPE}
    words = ["the", "naïve", "东京", "🙂", "<|endoftext|>", "It's", "1234", "\r\n", *("\n" * n for n in range(6)), "  "]
    for m in range(members):
        member, inner = f"openwebtext/urlsf_subset{subset:02d}-{m}_data.xz", {}
        for d in range(documents):
            name = f"{d:07d}-{rng.randrange(1 << 32):08x}.txt"
            if d == 7:  # a name that goes to validation
                name = next(n for i in range(100_000) if hash_of(f"{member}/{(n := f'{i}.txt')}") % 2000 == 0)
            text = " ".join(rng.choices(words, k=rng.randrange(1, 120))) + " end"
            inner[name] = text.encode()
            good.append((f"{member}/{name}", text))
        if m == 1:
            inner |= {"latin.txt": "naïve".encode("latin-1"), "cut.txt": "东".encode()[:2], "empty.txt": b"",
                      "blank.txt": b" \n\n\n\n ", "link.txt": tarfile.SYMTYPE,
                      "device": tarfile.CHRTYPE, "folder": tarfile.DIRTYPE}
            for name in ("../../evil.txt", "/tmp/evil-prepare.txt"):  # documents like others: names go nowhere
                inner[name] = b"evil text"
                good.append((f"{member}/{name}", "evil text"))
        outer[member] = tar_of(inner, "w:xz")
    broken = tar_of({"a.txt": random.Random(3).randbytes(3000).hex().encode()}, "w:xz")
    outer |= {"../../evil": b"no xz", "cut.xz": broken[:-40], "flipped.xz": broken[:800] + b"?" + broken[801:],
              "empty.xz": b"", "notar.xz": lzma.compress(b"text"), "l": tarfile.SYMTYPE,
              "cuttar.xz": lzma.compress(tar_of({"a.txt": bytes(2000), "b.txt": b"b"})[:2600])}
    return tar_of(outer), good, 6 + 7


def split_documents(tokens):
    documents = []
    for token in tokens:
        documents.append([]) if token == 50256 else documents[-1].append(token)
    return documents


def test_openwebtext_is_what_tiktoken_makes_of_each_document(tiny, here, monkeypatch, capsys):
    archives = {subset: make_archive(subset) for subset in (0, 3, 20)}
    files = {OPENWEBTEXT.format(subset): archive[0] for subset, archive in archives.items()}
    os.makedirs("a/b")
    monkeypatch.chdir("a/b")
    monkeypatch.setattr(prepare, "SHARD_TOKENS", 5000)
    owt, folder = "--dataset=openwebtext", Path("data/openwebtext")
    folder.mkdir(parents=True)
    for leftover in ("openwebtext_train_07_000.bin", "openwebtext_val_03_009.bin", "openwebtext_train_00_000.bin.part"):
        (folder / leftover).write_bytes(shard_of([1, 2, 3]))  # an interrupted run's, perhaps of other subsets
    with serve(files, monkeypatch) as hub:
        hub.plan = {"urlsf_subset03.tar": [503, "drop", "no range", "redirect"]}
        assert prepare.main([owt, "--subsets=3,0", "--workers=1"]) == 0
        out, three = capsys.readouterr().out, bytes_in(folder)
    expected = {"train": [], "val": []}
    for name, text in archives[0][1] + archives[3][1]:
        while "\n\n\n" in text:
            text = text.replace("\n\n\n", "\n\n")
        expected["train" if hash_of(name) % 2000 else "val"].append(tiny(text.strip()))
    assert {split: split_documents(tokens_in(folder, split)) for split in expected} == expected
    assert all(0 < len(prepare.read_shard(path)) <= 5000 for path in folder.glob("*.bin"))
    assert len(expected["val"]) >= 10 and len(list(folder.glob("openwebtext_train_03_*.bin"))) > 2
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["documents"] == len(expected["train"]) + len(expected["val"])
    assert meta["tokens"] == {split: len(tokens_in(folder, split)) for split in expected}
    assert OPENWEBTEXT.startswith(f"/datasets/{meta['source']}/resolve/{meta['revision']}/")
    assert (meta["tokenizer"], meta["vocab_size"], sorted(meta["subsets"])) == ("gpt2", 50304, ["00", "03"])
    for subset in (0, 3):
        assert f"urlsf_subset{subset:02d}.tar: left out {archives[subset][2]} that are" in out
    # Nothing but the dataset, and no archive, is left anywhere.
    assert {path.suffix for path in here.rglob("*") if path.is_file()} == {".bin", ".json"}
    assert not os.path.exists("/tmp/evil-prepare.txt")

    # More later extends it; the same bytes from 2 and 4 workers, in another order, all at once, with archives kept.
    with serve(files, monkeypatch) as hub:
        hub.plan = {"urlsf_subset20.tar": [404]}
        assert "404" in refused([owt, "--subsets=20"], capsys)
        assert not (folder / "meta.json").exists()  # train.py must not take it for finished
        assert prepare.main([owt, "--subsets=0"]) == 0 and bytes_in(folder) == three
        assert prepare.main([owt, "--subsets=0,20", "--workers=4"]) == 0
        assert [name for name, _, _ in hub.log] == ["urlsf_subset20.tar"] * 2
        assert prepare.main([owt, "--subsets=0,3"]) == 0 and len(hub.log) == 2
        assert "nothing to do" in capsys.readouterr().out
        whole = bytes_in(folder)
        assert whole.items() > {name: data for name, data in three.items() if name != "meta.json"}.items()
        monkeypatch.chdir(here)
        assert prepare.main([owt, "--subsets=0,3,20", "--workers=2", "--keep_raw=True"]) == 0
        raw = {f"raw/{path[-18:]}": data for path, data in files.items() if "/cdn" not in path}
        assert bytes_in(folder) == whole | raw


def test_broken_archives_are_one_sentence(tiny, here, monkeypatch, capsys):
    archive = tar_of({f"openwebtext/{i}.xz": b"x" * 3000 for i in range(3)})
    hole = bytearray(archive)
    hole[3584:3600] = b"?" * 16  # the second header
    with serve({}, monkeypatch) as hub:
        for data in (archive[:5000], archive[:3584], bytes(hole), b"", b"text" * 1000):
            hub.files = {OPENWEBTEXT.format(0): data}
            error = refused(["--dataset=openwebtext", "--subsets=0", "--workers=1"], capsys)
            assert "urlsf_subset00.tar is not a whole tar" in error
            assert not Path("data/openwebtext/meta.json").exists()
            Path("data/openwebtext/raw/urlsf_subset00.tar").unlink()


def test_a_member_beyond_memory_is_broken(tiny, monkeypatch):
    monkeypatch.setattr(prepare, "MEMBER_BYTES", 20_000)
    for size, broken in ((5000, 0), (50_000, 1)):
        tokens, counts = prepare.tokenize_member("m", tar_of({"a.txt": b"a " * (size // 2)}, "w:xz"))
        assert counts["left_out"] == broken and bool(len(tokens["train"])) != bool(broken)


def test_jobs_are_read_only_a_little_ahead_and_a_worker_that_dies_is_one_sentence():
    read, jobs = [], ((read.append(i), i) for i in range(100))
    for n, result in enumerate(prepare.in_order(pow, ((i, 2) for _, i in jobs), 1)):
        assert result == n * n and len(read) - n <= 32
    assert n == 99
    with pytest.raises(OSError, match="worker process died.*--workers"):
        list(prepare.in_order(os._exit, iter([(1,)]), 1))


def test_killed_anywhere_the_rerun_makes_the_same_bytes(tiny, here, monkeypatch):
    files = {OPENWEBTEXT.format(subset): make_archive(subset, 4, 50)[0] for subset in (0, 1)}
    args, folder = ["--dataset=openwebtext", "--subsets=0-1", "--workers=1"], Path("data/openwebtext")
    Path("run.py").write_text("import sys, prepare\nprepare.SHARD_TOKENS = 4000\n"
                              "if __name__ == '__main__': sys.exit(prepare.main(sys.argv[1:]))")

    def start():
        return subprocess.Popen([sys.executable, "run.py", *args], text=True, stderr=subprocess.PIPE,
                                stdout=subprocess.DEVNULL)

    with serve(files, monkeypatch) as hub:
        for point in ("raw/urlsf_subset00.tar.part", "raw/urlsf_subset00.tar", "openwebtext_train_00_000.bin",
                      "openwebtext_val_00_000.bin", "progress.json", "raw/urlsf_subset01.tar.part",
                      "raw/urlsf_subset01.tar", "openwebtext_train_01_001.bin", "meta.json"):
            hub.hanging.clear()
            hub.plan, hub.log = {point[4:-5]: ["hang"]} if point.endswith(".part") else {}, []
            process = start()
            while not (hub.hanging.is_set() if hub.plan else (folder / point).exists()):
                assert process.poll() is None or (folder / point).exists(), process.stderr.read()
                time.sleep(0.001)
            process.kill()
            process.communicate(timeout=30)  # ends when the workers, who hold the pipe too, are gone
            for shard in folder.glob("*.bin"):
                prepare.read_shard(shard)  # no partial shard has a shard's name
            assert len(hub.log) <= 2
        process = start()
        assert process.communicate() == (None, "") and process.returncode == 0
        killed = bytes_in(folder)
        shutil.rmtree("data")
        monkeypatch.setattr(prepare, "SHARD_TOKENS", 4000)
        assert prepare.main(args) == 0 and bytes_in(folder) == killed


@pytest.mark.skipif(os.name == "nt", reason="SIGINT is not sent so on Windows")
@pytest.mark.parametrize("moment", ["import", "fineweb_edu", "openwebtext", "spawning", "tokenizing"])
def test_ctrl_c_is_one_word_at_any_moment(moment, tiny, tmp_path, monkeypatch):
    args = ["--dataset=openwebtext", "--subsets=0"] if moment != "fineweb_edu" else ["--dataset=fineweb_edu"]
    if moment == "import":
        (tmp_path / "numpy.py").write_text("import time; open('reached', 'w'); time.sleep(60)")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    sign = {"spawning": "raw/urlsf_subset00.tar", "tokenizing": "*train*.part"}.get(moment, "none")
    with serve(fineweb(2) | {OPENWEBTEXT.format(0): make_archive(0, 60)[0]}, monkeypatch) as hub:
        hub.plan = {} if moment in ("spawning", "tokenizing") else {TRAIN1: ["hang"], "urlsf_subset00.tar": ["hang"]}
        process = subprocess.Popen([sys.executable, str(HERE / "prepare.py"), *args], cwd=tmp_path, text=True,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
                                   # a shell that starts the tests with & has it ignored
                                   preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
        while not (hub.hanging.is_set() or [*tmp_path.glob(f"data/openwebtext/{sign}"), *tmp_path.glob("reached")]):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        time.sleep(0.2 * (moment == "spawning"))  # about when the workers import
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.communicate(timeout=30)[1] == "interrupted\n" and process.returncode == 130
        assert not hub.closing.is_set()


# ---- downstream tasks ------------------------------------------------------------------------------------------

EVAL = ["--resume=True", "--eval_only=True"]
LONG = "This is longer than the thirty-two bytes that the model reads: a hundred and one, and no word is left out."
QUESTIONS = [("Which word", ["the", "a statement"], 0), ("", ["x", "y " * 30, "a rather long answer"], 1),
             (LONG, ["yes", "no", "per" * 11], 1), ("for x in", ["y:", "z"], 0), ("import", ["os", "sys", "re"], 0)]
TEXTS = [LONG, "x" * 32, "y" * 33, "short"]
PROMPTS = ["def f(x):\n", "a", LONG]


def logits_of(model, ids):
    """The logits (T, V) in float64 of one sequence, computed by itself and in whole."""
    with torch.no_grad():
        return model(torch.tensor([ids]), torch.tensor([ids]))[0][0].double()


def log_probability(model, context, text):
    """ln p(text | context), and whether each of its bytes is the likeliest; block_size bytes at a time."""
    ids, n, T = list((context + text).encode()), len(text), model.config.block_size
    total, greedy = 0.0, True
    for begin in range(0, n, T):
        end = min(begin + T, n)
        window = ids[:len(ids) - n + end][-T - 1:]
        logits, targets = logits_of(model, window[:-1])[begin - end:], torch.tensor(window[begin - end:])
        total += logits.softmax(-1).gather(1, targets[:, None]).log().sum().item()
        greedy = greedy and torch.equal(logits.argmax(-1), targets)
    return total, greedy


def continuation(model, prompt, n):
    """n bytes of greedy text without a cache; a full context goes on from its second half."""
    T, made = model.config.block_size, []
    context = list(prompt.encode())[-T:]
    for _ in range(n):
        made.append(logits_of(model, context)[-1].argmax().item())
        context.append(made[-1])
        context = context[-(T // 2):] if len(context) > T else context
    return bytes(made).decode("utf-8", "replace")


def own_task(folder, name, output_type, metrics, rows, **config):
    """A task in data/tasks/ whose rows (q, a, and c in a choice) lie beside it; the first is the example to show."""
    files = {"test": f"data/tasks/{name}.jsonl", "train": f"data/tasks/{name}-example.jsonl"}
    rows = [json.dumps(dict(zip("qac", row))) + "\n" for row in rows]
    (folder / files["test"]).write_text("".join(rows))
    (folder / files["train"]).write_text(rows[0])
    config = dict(task=name, dataset_path="json", dataset_kwargs=dict(data_files=files), test_split="test",
                  training_split="train", output_type=output_type, doc_to_text="{{q}}", doc_to_target="{{a}}",
                  metric_list=[dict(metric=m) for m in metrics.split()]) | config
    (folder / "data" / "tasks" / f"{name}.yaml").write_text(json.dumps(config))     # JSON is YAML, too


def choosing(folder, name, questions):
    rows = [(q, right, choices) for q, choices, right in questions]
    own_task(folder, name, "multiple_choice", "acc acc_norm", rows, doc_to_choice="{{c}}", doc_to_target="a")


@pytest.fixture(scope="session")
def tasks(trained, tmp_path_factory):
    """A folder with tasks and a checkpoint of weights far from small; the model; two evaluations' words and rows."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    folder = tmp_path_factory.mktemp("tasks")
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    state = torch.load(folder / "out" / "ckpt.pt", weights_only=True)
    state["model"] = make(**state["config"]).state_dict()
    torch.save(state, folder / "out" / "ckpt.pt")
    model = load_checkpoint(folder / "out" / "ckpt.pt")[0]
    (folder / "data" / "tasks").mkdir()
    choosing(folder, "choosing", QUESTIONS)
    own_task(folder, "rolling", "loglikelihood_rolling", "word_perplexity byte_perplexity", [("", t) for t in TEXTS],
             doc_to_text="")
    answers = [continuation(model, prompt, 24) for prompt in PROMPTS]
    stop = next(x for x in answers[0][2:] if x not in answers[1] and x != "\ufffd")
    rows = [(prompt, answer.split(stop)[0]) for prompt, answer in zip(PROMPTS, answers)] + [(PROMPTS[0], answers[0])]
    own_task(folder, "answering", "generate_until", "exact_match", rows,
             generation_kwargs=dict(until=[stop], max_gen_toks=24, do_sample=False))
    x, greedy = next((x, y) for x in "abcdefghijk" if (y := continuation(model, x, 2)).isascii())
    rows = [(x, greedy), (x, greedy[0] + "~"), (LONG, "per"), (LONG, "x" * 40), ("", "\ny")]
    own_task(folder, "following", "loglikelihood", "acc perplexity", rows, target_delimiter="")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path_factory.mktemp("hub"))).items():
            patch.setenv(name, value)
        from lm_eval.tasks import TaskManager       # to list lm_eval's own tasks takes ten seconds
        patch.setattr(TaskManager, "__init__", functools.partialmethod(TaskManager.__init__, include_defaults=False))
        said = [train_here(folder, *EVAL, "--tasks=choosing,rolling,answering,following", small=()),
                train_here(folder, *EVAL, "--tasks=following,choosing", "--num_fewshot=1", small=())]
        yield SimpleNamespace(folder=folder, model=model, said=said, rows=rows_of(folder))


@pytest.fixture
def eval_folder(tasks, tmp_path):
    shutil.copytree(tasks.folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("eval.csv"))
    return tmp_path


def rows_of(folder):
    return list(csv.DictReader((folder / "out" / "eval.csv").read_text().splitlines()))


def values(rows, task, shots="0"):
    return {row["metric"]: float(row["value"]) for row in rows if (row["task"], row["num_fewshot"]) == (task, shots)}


@pytest.mark.parametrize("shots", [0, 1])
def test_choices_are_scored_by_their_probability(shots, tasks):
    example, right = f"{QUESTIONS[0][0]} {QUESTIONS[0][1][QUESTIONS[0][2]]}\n\n" * shots, []
    for question, choices, answer in QUESTIONS:
        scores = [log_probability(tasks.model, example + question or "\n", " " + choice)[0] for choice in choices]
        normed = [score / len(choice) for score, choice in zip(scores, choices)]
        right.append([np.argmax(scores) == answer, np.argmax(normed) == answer])
    assert sorted(map(sum, zip(*right))) == [2, 3]
    assert values(tasks.rows, "choosing", str(shots)) == dict(zip(("acc", "acc_norm"), np.mean(right, axis=0)))


@pytest.mark.parametrize("shots", [0, 1])
def test_what_follows_is_scored_each_byte_once_and_greedy_if_all_of_it_is(shots, tasks):
    rows = [json.loads(line) for line in (tasks.folder / "data" / "tasks" / "following.jsonl").read_text().splitlines()]
    example, results = f"{rows[0]['q']}{rows[0]['a']}\n\n" * shots, []
    for row in rows:
        context = (example + row["q"]).rstrip()             # white space belongs to what follows
        text = (example + row["q"] + row["a"])[len(context):]
        results.append(log_probability(tasks.model, context or "\n", text if context else text.lstrip("\n")))
    scores, greedy = zip(*results)
    assert shots or greedy == (True, False, False, False, False)
    expected = dict(acc=np.mean(greedy), perplexity=math.exp(-np.mean(scores)))
    assert values(tasks.rows, "following", str(shots)) == pytest.approx(expected, rel=1e-4)


def test_a_whole_text_is_scored_each_byte_once(tasks):
    total = sum(log_probability(tasks.model, "\n", text)[0] for text in TEXTS)
    sizes = dict(word_perplexity=sum(len(text.split()) for text in TEXTS), byte_perplexity=sum(map(len, TEXTS)))
    expected = {name: math.exp(-total / size) for name, size in sizes.items()}
    assert values(tasks.rows, "rolling") == pytest.approx(expected, rel=1e-4)


def test_generated_answers_are_greedy_and_end_at_their_stop(tasks):
    assert values(tasks.rows, "answering") == dict(exact_match=0.75)            # the last row's has no stop


def test_each_evaluation_adds_its_rows_and_prints_their_table(tasks, eval_folder):
    assert [(row["task"], row["num_fewshot"]) for row in tasks.rows[-2:]] == [("choosing", "1")] * 2
    assert len(tasks.rows) == 11 and all((row["step"], row["n_loop"]) == ("12", "4") for row in tasks.rows)
    examples = {row["task"]: int(row["examples"]) for row in tasks.rows}
    assert examples == dict(choosing=5, rolling=4, answering=4, following=5)
    acc = tasks.rows[-2]
    assert float(acc["stderr"]) == pytest.approx((float(acc["value"]) * (1 - float(acc["value"])) / 4) ** 0.5)
    for text in tasks.said:
        assert f"validation loss {float(acc['val_loss']):.4f}" in text and "compare with nothing published" in text
        assert re.search(r"^\|choosing *\|.*\|acc +\|", text, re.M)
    train_here(eval_folder, *EVAL, "--tasks=rolling", "--n_loop=2", small=())
    rows = rows_of(eval_folder)
    assert [row["n_loop"] for row in rows] == ["2"] * 2 and values(rows, "rolling") != values(tasks.rows, "rolling")


@pytest.mark.parametrize("world", [2, 3])
def test_evaluation_is_shared_among_processes(world, tasks, eval_folder):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    ranks = [start("train.py", *EVAL, "--tasks=choosing,rolling,answering,following", cwd=eval_folder, MASTER_PORT=port,
                   RANK=str(rank), LOCAL_RANK=str(rank % 2), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
             for rank in range(world)]        # as on nodes of two
    outs = [process.communicate()[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * world and outs[1:] == [""] * (world - 1)
    assert outs[0][outs[0].index("tasks"):] == tasks.said[0][tasks.said[0].index("tasks"):]
    assert rows_of(eval_folder) == tasks.rows[:7]


def test_paper_is_its_eight_tasks_and_their_mean(eval_folder):
    for i, name in enumerate(train.PAPER_TASKS):
        choosing(eval_folder, name, QUESTIONS[:1 + i % 5])
    train_here(eval_folder, *EVAL, "--tasks=paper", small=())
    accuracy = {row["task"]: float(row["value"]) for row in rows_of(eval_folder) if row["metric"] == "acc"}
    mean = accuracy.pop("paper")
    assert list(accuracy) == train.PAPER_TASKS and mean == pytest.approx(np.mean(list(accuracy.values())))


@pytest.mark.parametrize("names, file, text, words", [
    ("nothing", "", "", "nothing"), ("choosing,", "", "", "tasks=choosing,"),
    ("following", "following.jsonl", None, "following.jsonl"),
    ("far", "far.yaml", "{task: far, dataset_path: nobody/nothing, test_split: test}", "nobody/nothing"),
    ("broken", "broken.yaml", "task: broken\n  x: [", "broken.yaml"), ("choosing", "choosing.jsonl", "{", "Dataset"),
    ("choosing", "choosing.jsonl", '{"q": "a"}\n', "choosing cannot"), ("choosing", None, None, "pip install lm_eval")])
def test_what_cannot_be_evaluated_is_one_sentence(names, file, text, words, eval_folder, monkeypatch, capsys):
    monkeypatch.chdir(eval_folder)
    if file:
        Path("data", "tasks", file).write_text(text) if text else Path("data", "tasks", file).unlink()
    elif file is None:
        monkeypatch.setitem(sys.modules, "lm_eval", None)       # as if it were not installed
    before = bytes_in(eval_folder)
    assert words in complaint(train.main, [*EVAL, f"--tasks={names}"], capsys) and bytes_in(eval_folder) == before


def test_a_fault_of_the_model_is_not_told_as_one_of_the_task(eval_folder, monkeypatch):
    monkeypatch.setattr(GPT, "hidden", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train_here(eval_folder, *EVAL, "--tasks=rolling", small=())


def test_a_text_of_gpt2_follows_end_of_text(tiny):
    scorer = train.Scorer(SimpleNamespace(model=make(), tokenizer="gpt2"))
    assert scorer.eot_token_id == 50256 and 50256 not in scorer.tok_encode("<|endoftext|>")
