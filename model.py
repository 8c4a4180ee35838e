"""DeepLoop: a GPT that applies its K blocks R times, with residuals scaled for the loop (arXiv 2607.13491).

    x = norm(wte(idx))
    R rounds, each over the K blocks:   x = norm(alpha x + attn(x));  x = norm(alpha x + mlp(x))
    logits = x @ wte.T

Three counts to keep apart: n_layer = K physical blocks, which hold all parameters; n_loop = R rounds over
them; N = K·R visits, the depth that the residual stream sees. Depth costs compute and no parameters.

- residual scaling by a table of rules: DeepLoop, DeepNorm, the usual Pre-LN block, and Pre-LN scaled for the loop
- RMSNorm without gain: a learned gain would move the output by O(1) per visit and hide what alpha and beta bound
- RoPE, queries and keys normalized per head, SwiGLU, no biases, embedding and output head tied
- the theory made measurable: `GPT.visit_alignment`, `first_step_change`, and `python model.py` to see both
"""
import os
import signal

if __name__ == "__main__":      # Ctrl-C, also while torch is being imported
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"interrupted\n"), os._exit(130)))

import copy
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Scaling(NamedTuple):
    """The constants of a residual-scaling rule at one depth; f is a branch, attention or MLP."""
    post_ln: bool           # x = norm(alpha x + f(x)); otherwise x = x + epsilon f(norm(x)), and a norm at the end
    alpha: float = 1.0
    epsilon: float = 1.0
    gain_in: float = 1.0    # on Xavier's initialization of v, gate and up, which read the residual stream
    gain_out: float = 1.0   # on that of out and down, which write to it; q and k only steer: their gain is 1


def deepnorm(N, p):
    """alpha = (2N)^p and beta = (8N)^-p: DeepNet's constants for a decoder (arXiv 2203.00555) with the exponent free.

    One shared update is written by R visits and read by R visits: up to R² terms per block where untied depth has R.
    If the visits' effects align, these constants bound the change of the output by one step only for p >= 1/2; if
    they do not, for p >= 1/4 (DeepLoop, the bound M·kappa_R·(beta/alpha)² on the change).
    """
    beta = (8 * N) ** -p
    return Scaling(post_ln=True, alpha=(2 * N) ** p, gain_in=beta, gain_out=beta)


SCALINGS = {    # a rule is a function of K and R; one of your own is one more line
    "deeploop": lambda K, R: deepnorm(K * R, 1 / 2),
    "deepnorm": lambda K, R: deepnorm(K * R, 1 / 4),
    "preln": lambda K, R: Scaling(post_ln=False, gain_out=(2 * K * R) ** -0.5),     # GPT-2's: 2N branches, variance 1
    # arXiv 2606.18524, factored parameterization: epsilon = lambda / (R sqrt(K)), here with lambda = 1
    "loop_preln": lambda K, R: Scaling(post_ln=False, epsilon=1 / (R * K ** 0.5)),
}


@dataclass
class GPTConfig:
    """The shape of a model. Raises ValueError, naming field and value, for one that cannot be built."""
    vocab_size: int = 256
    block_size: int = 256           # longest context, in tokens
    n_layer: int = 2                # K, physical blocks
    n_loop: int = 4                 # R, rounds over the blocks
    n_head: int = 4
    n_embd: int = 128               # d
    scaling: str = "deeploop"       # one of SCALINGS
    exponent: float | None = None   # p, in place of deeploop's or deepnorm's own

    def __post_init__(self):
        for name, value in vars(self).items():
            if name not in ("scaling", "exponent") and (type(value) is not int or not 1 <= value < 2 ** 31):
                raise ValueError(f"{name}={value!r} is not a whole number from 1 to 2^31")
        if self.n_embd % (2 * self.n_head):
            raise ValueError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head} into heads of even width, "
                             "whose pairs RoPE turns")
        if self.scaling not in SCALINGS:
            raise ValueError(f"scaling={self.scaling!r} is none of {', '.join(SCALINGS)}")
        if self.exponent is not None:
            if type(self.exponent) not in (int, float) or not 0 <= self.exponent <= 1:
                raise ValueError(f"exponent={self.exponent!r} is not a number from 0 to 1")
            if not SCALINGS[self.scaling](1, 1).post_ln:
                raise ValueError(f"exponent={self.exponent} has no meaning under scaling={self.scaling}; leave it out")

    def constants(self, n_loop=None):
        """The Scaling in force, at n_loop rounds if given."""
        K, R = self.n_layer, n_loop or self.n_loop
        return SCALINGS[self.scaling](K, R) if self.exponent is None else deepnorm(K * R, self.exponent)

    n_unrolled = property(lambda self: self.n_layer * self.n_loop)      # N = K·R, the number of visits
    alpha = property(lambda self: self.constants().alpha)               # (2N)^p, on every skip path; 1 under Pre-LN
    beta = property(lambda self: self.constants().gain_in)              # (8N)^-p, at initialization; 1 under Pre-LN

    def gain(self, name, n_loop=None):
        """The gain that a parameter, by its name in the model, begins with; at n_loop rounds if given."""
        c, matrix = self.constants(n_loop), name.split(".")[-2]                 # blocks.0.attn.v.weight: v
        return dict(v=c.gain_in, gate=c.gain_in, up=c.gain_in, out=c.gain_out, down=c.gain_out).get(matrix, 1.0)


def norm(x):
    """RMSNorm without gain, in float32 or wider; zeros stay zeros. Source: arXiv 1910.07467, eq. 4."""
    # F.rms_norm's own eps is the dtype's, 0.0078 in bfloat16, which would ruin an embedding of RMS 0.02
    return F.rms_norm(x.to(torch.promote_types(x.dtype, torch.float32)), x.shape[-1:], eps=1e-20)


def rotate(x, cos, sin):
    """RoPE on x (B, T, heads, hs), halves a and b: (a, b) (cos, cos) + (b, a) (-sin, sin), as tables (T, 1, hs)."""
    return x * cos + x.roll(x.size(-1) // 2, dims=-1) * sin


class CrossEntropy(torch.autograd.Function):
    """The mean over targets (n,) >= 0 of -log softmax(logits (n, V))[target], in nats, computed in float32.

    The one backward written by hand, a few rows at a time: over a big vocabulary the logits in float32, their
    log-probabilities and the gradients of both would be the model's largest arrays, and take three times as long.
    """

    @staticmethod
    def pieces(logits, *others):
        """These tensors, a few rows at a time: on a CPU as many as a cache holds."""
        rows = max(1, 2 ** (21 if logits.device.type == "cpu" else 26) // logits.size(-1))
        return zip(*(x.split(rows) for x in (logits, *others)))

    @staticmethod
    def forward(ctx, logits, targets):
        ctx.save_for_backward(logits, targets)
        total = sum(F.cross_entropy(x.float(), t, ignore_index=-1, reduction="sum")
                    for x, t in CrossEntropy.pieces(logits, targets))
        return total / (targets >= 0).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        logits, targets = ctx.saved_tensors
        scale = (g * (targets >= 0) / (targets >= 0).sum()).unsqueeze(1)        # (n, 1)
        index, grad = targets.clamp_min(0).unsqueeze(1), torch.empty_like(logits)
        for x, i, s, d in CrossEntropy.pieces(logits, index, scale, grad):
            d.copy_(F.softmax(x.float(), dim=-1).mul_(s).scatter_add_(1, i, -s))        # scale · (p - one-hot)
        return grad, None


cross_entropy = CrossEntropy.apply


class Attention(nn.Module):
    """Causal multi-head attention, (B, T, d) -> (B, T, d)."""

    def __init__(self, config):
        super().__init__()
        d = config.n_embd
        self.n_head = config.n_head
        self.qk = nn.Linear(d, 2 * d, bias=False)   # apart from v: beta scales v and leaves q and k alone
        self.v = nn.Linear(d, d, bias=False)
        self.out = nn.Linear(d, d, bias=False)

    def forward(self, x, rope, past=None):
        """past: this visit's keys and values (2, B, nh, block_size, hs), and how many tokens stand in them."""
        B, T, d = x.shape
        v = self.v(x).view(B, T, self.n_head, -1)                               # (B, T, nh, hs)
        qk = self.qk(x).view(B, T, 2 * self.n_head, -1)                         # (B, T, 2 nh, hs)
        qk = norm(rotate(qk, *rope))        # a rotation keeps the length, so this is the norm before RoPE
        q, k = qk.transpose(1, 2).chunk(2, dim=1)                               # (B, nh, T, hs) each
        v, mask = v.transpose(1, 2).to(q.dtype), None
        if past is not None:
            kv, start = past
            kv.narrow(3, start, T).copy_(torch.stack((k, v)))
            k, v = kv.narrow(3, 0, start + T).unbind()                          # (B, nh, start + T, hs) each
            if T > 1:
                mask = torch.ones(T, start + T, dtype=torch.bool, device=x.device).tril(start)
        # a CPU's attention in bfloat16 is slow to go back through, up to four times, so that it stays in float32
        with torch.autocast("cpu", enabled=False):
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=past is None)
        return self.out(y.transpose(1, 2).reshape(B, T, d))


class MLP(nn.Module):
    """SwiGLU, (B, T, d) -> (B, T, d). Source: arXiv 2002.05202."""

    def __init__(self, config):
        super().__init__()
        d = config.n_embd
        h = 64 * math.ceil(8 * d / 3 / 64)      # three d×h matrices weigh what two d×4d ones would
        self.gate = nn.Linear(d, h, bias=False)
        self.up = nn.Linear(d, h, bias=False)
        self.down = nn.Linear(h, d, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Two residual sublayers, attention and MLP, (B, T, d) -> (B, T, d); one call is one visit."""

    def __init__(self, config):
        super().__init__()
        self.attn = Attention(config)
        self.mlp = MLP(config)
        self.post_ln, self.alpha, self.epsilon, _, _ = config.constants()
        for name, w in self.named_parameters():
            for matrix in w.chunk(2 if "qk" in name else 1):            # q and k: two d×d matrices, not one 2d×d
                nn.init.xavier_normal_(matrix, gain=config.gain(name))

    def forward(self, x, rope, past=None):
        if self.post_ln:
            x = norm(self.alpha * x + self.attn(x, rope, past))
            return norm(self.alpha * x + self.mlp(x))
        x = x + self.epsilon * self.attn(norm(x), rope, past)
        return x + self.epsilon * self.mlp(norm(x))


class GPT(nn.Module):
    """The looped GPT. `n_loop` may be set to another number of rounds after construction; alpha stays as trained."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.n_loop = config.n_loop
        self.recompute = False      # True: keep only the states between visits and recompute each visit's inside
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        # RoPE (arXiv 2104.09864, section 3.2.2): position t turns the pair (i, i + hs/2) by t · 10000^(-2i/hs)
        hs = config.n_embd // config.n_head
        frequency = 10000.0 ** (-torch.arange(0, hs, 2, dtype=torch.float64) / hs)
        angle = torch.outer(torch.arange(config.block_size, dtype=torch.float64), frequency).unsqueeze(1)
        self.register_buffer("cos", torch.cat((angle, angle), dim=-1).cos().float(), persistent=False)
        self.register_buffer("sin", torch.cat((-angle, angle), dim=-1).sin().float(), persistent=False)

    def hidden(self, idx, cache=None):
        """The final hidden state (B, T, d), of unit RMS, for idx (B, T), as in forward."""
        start = cache.length if cache is not None else 0
        end = start + idx.size(1)
        if end > self.config.block_size:
            raise ValueError(f"{end} tokens do not fit block_size={self.config.block_size}")
        rope = self.cos[start:end], self.sin[start:end]
        recompute = self.recompute and torch.is_grad_enabled()
        x = norm(self.wte(idx))                                                 # (B, T, d)
        for visit, block in enumerate([*self.blocks] * self.n_loop):            # R rounds over the K blocks
            past = None if cache is None else (cache.kv[visit], start)
            x = checkpoint(block, x, rope, past, use_reentrant=False) if recompute else block(x, rope, past)
        if cache is not None:
            cache.length = end
        return x if block.post_ln else norm(x)                                  # Post-LN ends in a norm already

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) int64 -> (logits, loss). Raises ValueError past block_size, the cache's tokens included.

        With targets (B, T), -1 ignored: logits (B, T, V) and the mean cross-entropy in nats per token, float32.
        Without: the last position's logits (B, 1, V), and None.
        """
        x = self.hidden(idx, cache)
        if targets is None:
            return F.linear(x[:, -1:], self.wte.weight), None
        logits = F.linear(x, self.wte.weight)                                   # (B, T, V)
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.inference_mode()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """Yields max_new_tokens times the next token ids (B, 1) after idx (B, T). Raises ValueError for nonsense.

        Sampled from softmax(logits / temperature), with top_k among the k likeliest; temperature 0 takes the likeliest.
        The last block_size tokens of idx count; a full context restarts from its last half: moving it recomputes all.
        """
        if idx.size(1) == 0 or not 0 <= temperature < math.inf or top_k is not None and top_k < 1:
            raise ValueError(f"{idx.size(1)} tokens to start from, temperature={temperature}, top_k={top_k}: there "
                             "must be at least one token, a temperature of at least 0 and a top_k of at least 1")
        block_size, cache = self.config.block_size, self.new_cache(len(idx))
        new = context = idx[:, -block_size:]
        for _ in range(max_new_tokens):
            if cache.length == block_size:
                cache.length, new = 0, context[:, -max(1, block_size // 2):]
            logits = self(new, cache=cache)[0][:, -1].float()                   # (B, V)
            if top_k is not None:
                logits[logits < logits.topk(min(top_k, logits.size(-1))).values[:, -1:]] = -math.inf
            logits -= logits.amax(-1, keepdim=True)                             # no overflow at any temperature
            new = (logits.argmax(-1, keepdim=True) if temperature == 0 else
                   torch.multinomial(F.softmax(logits / temperature, dim=-1), 1))           # (B, 1)
            context = torch.cat((context, new), dim=1)[:, -block_size:]
            yield new

    def new_cache(self, batch_size):
        """An empty cache: `kv` (N, 2, B, n_head, block_size, hs), the keys and values of every visit, since each visit
        of a block sees other states; and `length`, how many tokens it has seen."""
        c, w = self.config, self.wte.weight
        shape = (c.n_layer * self.n_loop, 2, batch_size, c.n_head, c.block_size, c.n_embd // c.n_head)
        return SimpleNamespace(kv=torch.empty(shape, dtype=w.dtype, device=w.device), length=0)

    def untie(self):
        """The same function as a GPT with n_layer = K·R and n_loop = 1: each visit gets its own copy of its block."""
        twin = copy.deepcopy(self)
        twin.config = replace(self.config, n_layer=self.config.n_layer * self.n_loop, n_loop=1)
        twin.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(self.n_loop) for block in self.blocks)
        twin.n_loop = 1
        return twin

    @torch.enable_grad()
    def visit_alignment(self, idx, targets, n_probe=8):
        """κ of each physical sublayer, (K, 2) float32 for attention and MLP; the largest is κ_R (DeepLoop).

            κ_j = ‖Σ_r U_r‖ ‖Σ_r G_r‖ / (R max_r ‖U_r‖ max_r ‖G_r‖)

        in Frobenius norms, over the visits r of sublayer j: G_r is the loss gradient through visit r alone, U_r the
        Jacobian of the final hidden state by the parameters as visit r reads them. 1 at R = 1, R when all agree.
        ‖U‖² is the mean of ‖vᵀU‖² over n_probe random v, whose generator leaves the run's own alone.
        """
        twin, K, R = self.untie(), self.config.n_layer, self.n_loop
        weights = list(twin.blocks.parameters())        # of each visit of each block three of attention, three of MLP

        def squares(output, cotangent=None):
            """‖Σ_r‖² (2K,) and ‖·‖² of each visit (R, 2K), for the gradients of cotangent · output."""
            grads = torch.autograd.grad(output, weights, cotangent, retain_graph=True)
            total = torch.stack([sum(grads[i::6 * K]).square().sum() for i in range(6 * K)])
            each = torch.stack([g.square().sum() for g in grads])
            return total.view(2 * K, 3).sum(-1), each.view(R, 2 * K, 3).sum(-1)

        x = twin.hidden(idx)                                                    # (B, T, d)
        G, G_each = squares(cross_entropy(F.linear(x, twin.wte.weight).flatten(0, 1), targets.flatten()))
        generator = torch.Generator().manual_seed(0)
        probes = [squares(x, torch.randn(x.shape, generator=generator).to(x)) for _ in range(n_probe)]
        U, U_each = (sum(probe) for probe in zip(*probes))
        return ((U / U_each.amax(0)).sqrt() * (G / G_each.amax(0)).sqrt() / R).view(K, 2).float()

    def num_params(self):
        """The number of parameters; n_loop does not enter."""
        return sum(w.numel() for w in self.parameters())

    def flops_per_token(self):
        """FLOPs of forward and backward for one token of a full context, every visit counted."""
        c = self.config         # as in PaLM, arXiv 2204.02311, appendix B
        weights = sum(w.numel() for w in self.blocks.parameters())
        attention = 2 * c.n_layer * c.n_embd * c.block_size         # scores and sums, the causal half not discounted
        return 6 * (self.n_loop * (weights + attention) + c.vocab_size * c.n_embd)

    def rate_scales(self):
        """[(name, parameter, its gain at N over its gain at N = K)], as in named_parameters: what scale_lr applies."""
        gain = self.config.gain
        return [(name, w, gain(name) / gain(name, n_loop=1)) for name, w in self.named_parameters()]

    def configure_optimizer(self, learning_rate, weight_decay, betas=(0.9, 0.95), scale_lr=False):
        """AdamW on all parameters, every one a matrix; fused where the device has it.

        With scale_lr a matrix that begins smaller at R rounds than at one moves slower by that factor, its group's
        `scale`, so that the rate best at R = 1 serves more rounds. AdamW decays by rate · weight_decay: slower, too.
        """
        scales = [(w, scale if scale_lr else 1.0) for _, w, scale in self.rate_scales()]
        groups = [dict(params=[w], lr=learning_rate * scale, scale=scale) for w, scale in scales]
        return torch.optim.AdamW(groups, betas=betas, weight_decay=weight_decay,
                                 fused=self.wte.weight.device.type in ("cpu", "cuda"))


def pick_device(name, index=0):
    """The index-th device of that kind, or ValueError if there is none; auto takes CUDA, else MPS, else the CPU."""
    has = {"cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()), "cpu": math.inf}
    kind = next(kind for kind in has if has[kind]) if name == "auto" else name
    if index >= has[kind]:
        raise ValueError(f"device={kind}: this machine has {has[kind]}, none for process {index}; leave --device out, "
                         "or start no more processes than there are (torchrun --nproc_per_node)")
    if kind == "cuda":
        torch.cuda.set_device(index)
    return torch.device(kind, index if kind == "cuda" else None)


def load_checkpoint(path):
    """(model on the CPU, checkpoint's dict) of a file that train.py wrote, or ValueError, naming it and its fault."""
    if not os.path.isfile(path):        # a pipe would be waited for
        raise ValueError(f"{path} is not a regular file; move it away" if os.path.exists(path) else
                         f"{path} does not exist; train a model first: torchrun train.py")
    kind = dict(step=int, tokenizer=str, settings=dict, optimizer=dict, scaler=dict, best_val_loss=float, seconds=float)
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        model = GPT(GPTConfig(**checkpoint["config"]))
        model.load_state_dict(checkpoint["model"])
        if any(type(checkpoint[name]) is not kind[name] for name in kind) or checkpoint["step"] and any(
                checkpoint["optimizer"][i][moment].shape != w.shape for i, w in enumerate(model.parameters())
                for moment in ("exp_avg", "exp_avg_sq")):
            raise TypeError
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:      # torch.load answers a broken file with nearly any exception there is
        raise ValueError(f"{path} is not a whole checkpoint of this program ({type(error).__name__}); "
                         "train anew in another --out_dir, or restore the file") from None
    return model, checkpoint


def first_step_change(model, idx, targets, step="sgd"):
    """Takes one step of the blocks on (idx, targets), and returns ‖ΔF‖ / ‖F‖, F the final hidden state of idx.

    step: sgd, 0.1 · gradient; adam, 1e-5 · its sign, which Adam's first step is (arXiv 1412.6980, alg. 1, eps = 0);
    scaled, adam's times the matrix's gain. From the initialization, K fixed, the change grows like R to the power

        sgd  2 - 4p (tied), 1 - 4p (untied)        adam  1 - 2p (both)        scaled  1 - 3p (both)

    A visit reads a matrix's change, and writes a gradient into it, at a factor beta/alpha ∝ R^-2p: the gain of the
    branch's other matrix over the weight of the skip path. SGD: R visits read what R visits wrote, R²(beta/alpha)²;
    untied, R matrices have one reader and one writer each, R(beta/alpha)². Adam normalizes away how much was written:
    R reads remain, R·beta/alpha. Rate times gain: one more beta ∝ R^-p. So under AdamW p = 1/2 should be flat, tied or
    not; with scale_lr p = 1/3 is, p = 1/4 slowly loses stability as R grows, and p = 1/2 allows a base rate ∝ √R.
    """
    weights = dict(model.blocks.named_parameters())     # not the embedding, whose step does not know R
    grads = torch.autograd.grad(model(idx, targets)[1], list(weights.values()))
    with torch.no_grad():
        before = model.hidden(idx)
        for (name, w), g in zip(weights.items(), grads):
            gain = model.config.gain(name) if step == "scaled" else 1.0
            w -= 0.1 * g if step == "sgd" else 1e-5 * gain * g.sign()
        return ((model.hidden(idx) - before).norm() / before.norm()).item()


def main():
    """Prints how the change by one step from the initialization grows with the rounds, for three exponents."""
    torch.set_num_threads(1)        # for arrays this small more are no faster, and on a busy machine far slower
    idx, targets = torch.randint(256, (2, 4, 64), generator=torch.Generator().manual_seed(0))
    steps, rounds = ("sgd", "adam", "scaled"), torch.tensor([2, 4, 8, 16, 32])
    print("K = 2 blocks, d = 64, synthetic tokens; change of the final hidden state by one step, tied and untied\n"
          f"{'p':5}{'R':>4}{'kappa_R/R':>11}" + "".join(f"{step:>20}" for step in steps))
    for p in (1 / 4, 1 / 3, 1 / 2):
        changes = torch.empty(len(rounds), 2 * len(steps))
        for R, row in zip(rounds.tolist(), changes):
            torch.manual_seed(0)
            model = GPT(GPTConfig(block_size=64, n_loop=R, n_embd=64, exponent=p)).double()
            kappa = model.visit_alignment(idx, targets).max().item()
            row.copy_(torch.tensor([first_step_change(twin, idx, targets, step) for step in steps
                                    for twin in (copy.deepcopy(model), model.untie())]))
            print(f"{p:<5.3f}{R:4}{kappa / R:11.3f}" + "".join(f"{change:10.2e}" for change in row), flush=True)
        x = rounds.log() - rounds.log().mean()
        slopes = x @ changes.log() / x.square().sum()                           # of least squares
        expected = 2 - 4 * p, 1 - 4 * p, 1 - 2 * p, 1 - 2 * p, 1 - 3 * p, 1 - 3 * p
        for name, powers in ("slope", slopes), ("expected", expected):
            print(f"{name:20}" + "".join(f"{power:10.2f}" for power in powers), flush=True)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:         # a reader such as head has enough
        os._exit(0)
