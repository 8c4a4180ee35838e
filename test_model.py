"""The laws of the project, as tests: `pytest`. Each compares with a value or a computation made another way."""
import contextlib
import csv
import io
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import prepare
import sample
import train
from model import EXPONENT, GPT, GPTConfig, load_checkpoint, norm, sgd_step_change

HERE = Path(__file__).resolve().parent
SCALINGS = ("deeploop", "deepnorm", "preln")
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
    beta, N = {"deeploop": 128 ** -0.5, "deepnorm": 128 ** -0.25, "preln": 1.0}[scaling], 16
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
    alpha = {"deeploop": (2 * N) ** 0.5, "deepnorm": (2 * N) ** 0.25, "preln": 1.0}[c.scaling]
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
            x = x + branch(rms(x), name) if c.scaling == "preln" else rms(alpha * x + branch(x, name))
    return (rms(x) if c.scaling == "preln" else x) @ p["wte.weight"].T


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
        logits = model(idx[:1])[0][0, 0].double()
    torch.manual_seed(0)
    drawn = next(model.generate(idx, 1, temperature=0.7, top_k=5)).flatten().bincount(minlength=31) / 4000
    expected = torch.zeros(31, dtype=torch.float64)
    best = logits.topk(5).indices
    expected[best] = (logits[best] / 0.7).exp() / (logits[best] / 0.7).exp().sum()
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

def test_one_step_moves_deeploop_alike_at_every_depth():
    idx, targets = tokens(4, 64, vocab_size=256), tokens(4, 64, vocab_size=256, seed=1)
    change = {}
    for scaling, n_loop in itertools.product(EXPONENT, (1, 8, 32)):
        model = make(gain=1.0, vocab_size=256, block_size=64, n_loop=n_loop, n_embd=64, scaling=scaling)
        change[scaling, n_loop] = sgd_step_change(model, idx, targets)
    for n_loop in (8, 32):
        assert change["deeploop", n_loop] == pytest.approx(change["deeploop", 1], rel=0.1)
    assert change["deepnorm", 32] > 20 * change["deepnorm", 1]


def test_sgd_step_change_is_the_step():
    model, idx, targets = make(), tokens(2, 24), tokens(2, 24, seed=1)
    twin = make()
    twin(idx, targets)[1].backward()
    before = twin.hidden(idx).detach()
    torch.optim.SGD(twin.blocks.parameters(), lr=0.01).step()
    expected = (twin.hidden(idx) - before).norm() / before.norm()
    assert sgd_step_change(model, idx, targets, 0.01) == pytest.approx(expected.item(), rel=1e-4)


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

SMALL = ("--n_embd=32 --n_head=2 --block_size=32 --batch_size=4 --max_steps=12 --warmup_steps=4 --eval_interval=4 "
         "--eval_windows=10 --log_interval=1 --learning_rate=1e-2").split()


def start(program, *flags, cwd, **more):
    return subprocess.Popen([sys.executable, str(HERE / program), *flags], cwd=cwd, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, env=dict(os.environ, OMP_NUM_THREADS="1", **more))


def run(program, *flags, cwd, **more):
    process = start(program, *flags, cwd=cwd, **more)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out, err


def train_here(folder, *flags):
    """A run of train.py in this process, for tests that do not need one of its own."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.chdir(folder)
        train.main([*SMALL, *flags])
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
        prepare.write_shard(f"data/three/three_train_{i}.bin", np.arange(n) + 1000 * i)
    data = train.open_split("three", "train", 8)
    assert data[1].tolist() == [42, 0, 192]
    idx, targets = train.read_windows(data, np.arange(234), 8, torch.device("cpu"))
    assert torch.equal(targets, idx + 1)                                        # consecutive numbers: one shard each
    assert idx[:, 0].tolist() == [*range(42), *range(2000, 2192)]


def test_batches_do_not_depend_on_the_number_of_processes(trained, folder):
    flags = [flag for flag in SMALL if "batch_size" not in flag] + ["--batch_size=1", "--grad_accum=4"]
    for world in (2, 4):
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}",
                        str(HERE / "train.py"), *flags, f"--out_dir=out{world}"], cwd=folder, check=True,
                       env=dict(os.environ, OMP_NUM_THREADS="1"), capture_output=True)
        rows = log_of(folder / f"out{world}")
        for row, expected in zip(rows[1:], log_of(trained / "out")[1:], strict=True):
            assert [float(x) for x in row if x] == pytest.approx([float(x) for x in expected if x], rel=1e-5)


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
    ("--dataset=../..", "dataset"), ("--resume=True", "no checkpoint"), ("--out_dir=/dev/null/x", "/dev/null/x"),
    ("--block_size=1000000", "block_size=1000000"),
]


@pytest.mark.parametrize("flag, named", BAD_TRAIN_FLAGS)
def test_train_refuses(flag, named, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    assert named in complaint(train.main, [flag], capsys)


@pytest.mark.parametrize("flag", ["--n_loop=5", "--n_embd=64", "--scaling=preln", "--exponent=0.3", "--preset=small"])
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
    ("--prompt=FILE:broken.txt", "UTF-8"), ("--out_dir=elsewhere", "elsewhere"),
])
def test_sample_refuses(trained, flag, named, monkeypatch, capsys):
    monkeypatch.chdir(trained)
    Path("broken.txt").write_bytes(b"abc\xff")
    assert named in complaint(sample.main, [flag], capsys)


def test_foreign_checkpoints_are_refused(trained, tmp_path):
    state = torch.load(trained / "out" / "ckpt.pt", weights_only=True)
    path = tmp_path / "ckpt.pt"
    other = {**state, "config": {**state["config"], "n_embd": 64}}
    for content in (other, {"model": 1}, [1, 2], {**state, "config": {**state["config"], "depth": 3}}):
        torch.save(content, path)
        with pytest.raises(ValueError, match="ckpt.pt is not a whole checkpoint"):
            load_checkpoint(path)
    path.write_text("hello")
    with pytest.raises(ValueError, match="ckpt.pt is not a whole checkpoint"):
        load_checkpoint(path)


def test_programs_end_with_one_line_and_no_traceback(trained, tmp_path):
    for program, flag in (("train.py", "--n_loop=x"), ("train.py", "--dataset=nowhere"), ("sample.py", "--out_dir=none")):
        process = start(program, flag, cwd=tmp_path)
        out, err = process.communicate()
        assert process.returncode in (1, 2) and out == "" and len(err.splitlines()) == 1 and program in err


# ---- sampling ---------------------------------------------------------------------------------------------------

def test_sample_streams_the_model(trained):
    flags = ["--max_new_tokens=60", "--temperature=0"]
    out, err = run("sample.py", "--prompt=The é", *flags, cwd=trained)
    model, _ = load_checkpoint(trained / "out" / "ckpt.pt")
    prompt = list("The é".encode())
    with torch.no_grad():
        ids = greedy_without_cache(model, torch.tensor([prompt]), 60)[0].tolist()
    assert out == bytes(prompt + ids).decode(errors="replace") + "\n" and err == ""
    (trained / "prompt.txt").write_text("The é", encoding="utf-8")
    assert run("sample.py", "--prompt=FILE:prompt.txt", *flags, cwd=trained)[0] == out


def test_sample_cuts_a_long_prompt_with_a_note(trained):
    out, err = run("sample.py", "--prompt=" + "x" * 40 + "The " * 8, "--max_new_tokens=5", "--temperature=0", cwd=trained)
    cut, _ = run("sample.py", "--prompt=" + "The " * 8, "--max_new_tokens=5", "--temperature=0", cwd=trained)
    assert out.removeprefix("x" * 40) == cut and "72 tokens" in err and "32" in err
