"""DeepLoop: a GPT that applies its K blocks R times, with residuals scaled for the loop.

    x = norm(wte(idx))
    R rounds, each over the K blocks:   x = norm(alpha x + attn(x));  x = norm(alpha x + mlp(x))
    logits = x @ wte.T

Three counts to keep apart: n_layer = K physical blocks, which hold all parameters; n_loop = R rounds over
them; N = K·R visits, the depth that the residual stream sees. Depth costs compute and no parameters.

- Post-LN residuals with DeepLoop's or DeepNorm's constants; Pre-LN, the usual GPT block, as the baseline
- RMSNorm without gain: a learned gain would move the output by O(1) per visit and hide what alpha and beta bound
- RoPE, queries and keys normalized per head, SwiGLU, no biases, no dropout, embedding and output head tied
- generation with a key-value cache for each visit
- the theory made measurable: `GPT.visit_alignment`, `sgd_step_change`, and `python model.py` to see both

DeepLoop: arXiv 2607.13491. DeepNorm: arXiv 2203.00555.
"""
import copy
import math
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

# One shared update is written by R visits and read by R visits: up to R² terms per block where untied depth has R.
# If the visits' effects align, alpha = (2N)^p and beta = (8N)^-p bound the change of the output by one step only
# for p >= 1/2; if they do not, for p >= 1/4 (DeepLoop, the bound M·kappa_R·(beta/alpha)² on the change).
EXPONENT = {"deepnorm": 1 / 4, "deeploop": 1 / 2}


@dataclass
class GPTConfig:
    """The shape of a model. Raises ValueError, naming field and value, for one that cannot be built."""
    vocab_size: int = 256
    block_size: int = 256           # longest context, in tokens
    n_layer: int = 2                # K, physical blocks
    n_loop: int = 4                 # R, rounds over the blocks
    n_head: int = 4
    n_embd: int = 128               # d
    scaling: str = "deeploop"       # or "deepnorm", "preln"
    exponent: float | None = None   # p, in place of the scaling's own

    def __post_init__(self):
        for name in ("vocab_size", "block_size", "n_layer", "n_loop", "n_head", "n_embd"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value < 2 ** 31:
                raise ValueError(f"{name}={value!r} is not a whole number from 1 to 2^31")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}")
        if self.n_embd // self.n_head % 2:
            raise ValueError(f"n_embd={self.n_embd} gives n_head={self.n_head} heads of odd width "
                             f"{self.n_embd // self.n_head}; RoPE turns pairs, so the width must be even")
        if self.scaling not in (*EXPONENT, "preln"):
            raise ValueError(f"scaling={self.scaling!r} is none of deeploop, deepnorm, preln")
        if self.exponent is not None:
            if self.scaling == "preln":
                raise ValueError(f"exponent={self.exponent!r} has no meaning with scaling='preln'; leave it out")
            if type(self.exponent) not in (int, float) or not 0 <= self.exponent <= 1:
                raise ValueError(f"exponent={self.exponent!r} is not a number from 0 to 1")

    @property
    def n_unrolled(self):
        """N = K·R, the number of visits."""
        return self.n_layer * self.n_loop

    @property
    def p(self):
        """The exponent in force; 0 under Pre-LN, whose alpha and beta are 1."""
        return EXPONENT.get(self.scaling, 0) if self.exponent is None else self.exponent

    @property
    def alpha(self):
        """(2N)^p, on the skip path of every visit: DeepLoop's for p = 1/2, DeepNet's for a decoder for 1/4."""
        return (2 * self.n_unrolled) ** self.p

    @property
    def beta(self):
        """(8N)^-p, a gain at initialization only; the forward pass never sees it (same sources)."""
        return (8 * self.n_unrolled) ** -self.p


def rms(x):
    """Root mean square over the last dimension, kept as one of size 1, and no less than the one eps of this model.

    It keeps a state of zeros from dividing by zero and shows nowhere else; F.rms_norm's default is the dtype's own,
    0.0078 in bfloat16, which would ruin an embedding of RMS 0.02.
    """
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(x.size(-1) ** -0.5).clamp_min_(1e-12)


class RMSNorm(torch.autograd.Function):
    """x / rms(x) with its gradient written out, (g - y mean(g y)) / rms for y = x / rms: half of autograd's time."""

    @staticmethod
    def forward(ctx, x):
        r = rms(x)
        y = x / r
        ctx.save_for_backward(y, r)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        y, r = ctx.saved_tensors
        return torch.addcmul(g, y, (g * y).mean(-1, keepdim=True), value=-1).div_(r)


def norm(x):
    """RMSNorm without gain over the last dimension, computed and returned in float32 or wider.

    Source: arXiv 1910.07467, eq. 4.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return RMSNorm.apply(x) if torch.is_grad_enabled() else x / rms(x)


def rope_tables(block_size, head_size):
    """cos (block_size, 1, hs), both halves alike, and sin (block_size, 1, hs/2) of RoPE's angles.

    Position t turns the pair (i, i + hs/2) by t · 10000^(-2i/hs). Source: RoFormer, arXiv 2104.09864, section 3.2.2.
    """
    frequency = 10000.0 ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angle = torch.outer(torch.arange(block_size, dtype=torch.float64), frequency).unsqueeze(1)  # (block_size, 1, hs/2)
    return torch.cat((angle, angle), dim=-1).cos().float(), angle.sin().float()


class RoPE(torch.autograd.Function):
    """rotate with its gradient, which is the rotation back."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        cos, sin = ctx.saved_tensors
        return rotate(g, cos, -sin), None, None


def rotate(x, cos, sin):
    """RoPE on x (B, T, heads, hs): (a, b) -> (a cos - b sin, b cos + a sin)."""
    if x.requires_grad and torch.is_grad_enabled():
        return RoPE.apply(x, cos, sin)
    y = x * cos
    (a, b), (y_a, y_b) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
    y_a.addcmul_(b, sin, value=-1)
    y_b.addcmul_(a, sin)
    return y


class CrossEntropy(torch.autograd.Function):
    """cross_entropy and its gradient, a few rows at a time: over a big vocabulary the logits in float32, their
    log-probabilities and the gradients of both would be the model's largest arrays, and take three times as long."""

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
        scale = g * (targets >= 0) / (targets >= 0).sum()                       # (n,)
        grad = torch.empty_like(logits)
        for x, t, s, d in CrossEntropy.pieces(logits, targets, scale, grad):
            p = F.softmax(x.float(), dim=-1)
            p.scatter_add_(1, t.clamp_min(0).unsqueeze(1), -torch.ones_like(p[:, :1]))
            d.copy_(p.mul_(s.unsqueeze(1)))
        return grad, None


def cross_entropy(logits, targets):
    """The mean over targets (n,) >= 0 of -log softmax(logits (n, V))[target], in nats, computed in float32."""
    return CrossEntropy.apply(logits, targets)


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
        if x.device.type != "cpu":
            qk = qk.to(v.dtype)
        q, k = qk.transpose(1, 2).chunk(2, dim=1)                               # (B, nh, T, hs) each
        v, mask = v.transpose(1, 2).to(q.dtype), None
        if past is not None:
            kv, start = past
            kv.narrow(3, start, T).copy_(torch.stack((k, v)))
            k, v = kv.narrow(3, 0, start + T).unbind()                          # (B, nh, start + T, hs) each
            if T > 1:
                mask = torch.ones(T, start + T, dtype=torch.bool, device=x.device).tril(start)
        # a CPU's attention in bfloat16 is slow to go back through, up to four times, so that it stays in float32
        with torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext():
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
        self.alpha = config.alpha
        self.preln = config.scaling == "preln"
        self.init_weights(config)

    @torch.no_grad()
    def init_weights(self, config):
        """Xavier, with gain beta on all that adds to the residual stream; queries and keys only steer, gain 1."""
        for w in self.attn.qk.weight.chunk(2):      # q and k are two d×d matrices, not one of fan-out 2d
            nn.init.xavier_normal_(w)
        for linear in (self.attn.v, self.attn.out, self.mlp.gate, self.mlp.up, self.mlp.down):
            nn.init.xavier_normal_(linear.weight, gain=config.beta)
        if self.preln:                              # GPT-2's rule: 2N branches add up to unit variance
            for linear in (self.attn.out, self.mlp.down):
                linear.weight /= math.sqrt(2 * config.n_unrolled)

    def forward(self, x, rope, past=None):
        if self.preln:
            x = x + self.attn(norm(x), rope, past)
            return x + self.mlp(norm(x))
        x = norm(torch.add(self.attn(x, rope, past), x, alpha=self.alpha))      # attn(x) + alpha x
        return norm(torch.add(self.mlp(x), x, alpha=self.alpha))


@dataclass
class Cache:
    """Keys and values of every visit: each visit of a block sees other states, so each keeps its own."""
    kv: torch.Tensor    # (N, 2, B, n_head, block_size, hs)
    length: int = 0     # tokens seen so far


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
        cos, sin = rope_tables(config.block_size, config.n_embd // config.n_head)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def hidden(self, idx, cache=None):
        """The final hidden state (B, T, d), of unit RMS, for idx (B, T) int64. Raises ValueError past block_size."""
        start = cache.length if cache is not None else 0
        end = start + idx.size(1)
        if end > self.config.block_size:
            raise ValueError(f"{end} tokens do not fit block_size={self.config.block_size}")
        rope = self.cos[start:end], self.sin[start:end]
        x = norm(self.wte(idx))                                                 # (B, T, d)
        visit = 0
        for _ in range(self.n_loop):
            for block in self.blocks:
                past = None if cache is None else (cache.kv[visit], start)
                if self.recompute and torch.is_grad_enabled():
                    x = checkpoint(block, x, rope, use_reentrant=False)
                else:
                    x = block(x, rope, past)
                visit += 1
        if cache is not None:
            cache.length = end
        return norm(x) if self.config.scaling == "preln" else x                 # Post-LN ends in a norm already

    def forward(self, idx, targets=None, cache=None):
        """idx (B, T) int64 -> (logits, loss).

        With targets (B, T), -1 ignored: logits (B, T, V) and the mean cross-entropy in nats per token, float32.
        Without: the last position's logits (B, 1, V), and None.
        Raises ValueError if more than block_size tokens come, those in the cache included.
        """
        x = self.hidden(idx, cache)
        if targets is None:
            return F.linear(x[:, -1:], self.wte.weight), None
        logits = F.linear(x, self.wte.weight)                                   # (B, T, V)
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.inference_mode()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """Yields max_new_tokens times the next token ids (B, 1), sampled from softmax(logits / temperature).

        idx (B, T) int64 with T >= 1 is cut from the left to block_size tokens. temperature 0 takes the likeliest
        token; top_k samples among the k likeliest. When the context is full, the last block_size // 2 tokens are
        read anew from position 0: a restart now and then instead of recomputing the whole context at each token.
        Raises ValueError for an empty idx, a negative temperature or top_k < 1.
        """
        if idx.size(1) == 0:
            raise ValueError("generation needs at least one token to start from")
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature={temperature} is not a number of at least 0")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k={top_k} is not at least 1")
        block_size, cache = self.config.block_size, None
        context = idx[:, -block_size:]
        for _ in range(max_new_tokens):
            if cache is None or cache.length == block_size:
                cache = self.new_cache(len(idx))
                new = context = context[:, -block_size:]
            logits = self(new, cache=cache)[0][:, -1].float()                   # (B, V)
            if top_k is not None:
                kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)                           # (B, 1)
            else:
                logits -= logits.amax(-1, keepdim=True)                         # no overflow at any temperature
                new = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1)
            context = torch.cat((context, new), dim=1)
            if context.size(1) > block_size:
                context = context[:, -max(1, block_size // 2):]
            yield new

    def new_cache(self, batch_size):
        """An empty Cache for batch_size sequences."""
        c, w = self.config, self.wte.weight
        shape = (c.n_layer * self.n_loop, 2, batch_size, c.n_head, c.block_size, c.n_embd // c.n_head)
        return Cache(torch.empty(shape, dtype=w.dtype, device=w.device))

    def untie(self):
        """The same function as a GPT with n_layer = K·R and n_loop = 1: each visit gets its own copy of its block."""
        twin = copy.deepcopy(self)
        twin.config = replace(self.config, n_layer=self.config.n_layer * self.n_loop, n_loop=1)
        twin.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(self.n_loop) for block in self.blocks)
        twin.n_loop = 1
        return twin

    def visit_alignment(self, idx, targets, n_probe=8):
        """κ of each physical sublayer, (K, 2) float32 for attention and MLP; the largest is κ_R.

        For sublayer j, whose visits r write updates G_r (the loss gradient through visit r alone) and move the
        output by U_r (the Jacobian of the final hidden state by the parameters as visit r reads them),

            κ_j = ‖Σ_r U_r‖ ‖Σ_r G_r‖ / (R max_r ‖U_r‖ max_r ‖G_r‖)     (DeepLoop, visit-alignment coefficient)

        in Frobenius norms, with the largest visit for the bound on one visit: 1 at R = 1, R when all visits agree.
        ‖U‖² is the mean of ‖vᵀU‖² over n_probe random cotangents v; they come from a generator of their own, so
        that measuring leaves the run as it was.
        """
        twin, K, R = self.untie(), self.config.n_layer, self.n_loop
        sublayers = [list(part.parameters()) for block in twin.blocks for part in (block.attn, block.mlp)]
        weights = [w for part in sublayers for w in part]

        def squares(output, cotangent):
            """‖Σ_r‖² (K, 2) and ‖·‖² of each visit (R, K, 2), for the gradients of cotangent · output."""
            grads = iter(torch.autograd.grad(output, weights, cotangent, retain_graph=True))
            flat = [torch.cat([next(grads).flatten() for _ in part]) for part in sublayers]     # R·K·2 vectors
            total = torch.stack([sum(flat[j::2 * K]).square().sum() for j in range(2 * K)])
            each = torch.stack([g.square().sum() for g in flat])
            return total.view(K, 2), each.view(R, K, 2)

        with torch.enable_grad():
            x = twin.hidden(idx)                                                # (B, T, d)
            logits = F.linear(x, twin.wte.weight)
            loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
            G, G_each = squares(loss, None)
            generator = torch.Generator().manual_seed(0)
            U = U_each = 0
            for _ in range(n_probe):
                v = torch.randn(x.shape, generator=generator).to(x)
                total, each = squares(x, v)
                U, U_each = U + total, U_each + each
        return ((U / U_each.amax(0)).sqrt() * (G / G_each.amax(0)).sqrt() / R).float()

    def num_params(self):
        """The number of parameters; n_loop does not enter."""
        return sum(w.numel() for w in self.parameters())

    def flops_per_token(self):
        """FLOPs of forward and backward for one token of a full context, every visit counted.

        6 per weight of a matrix product (2 forward, 4 backward), and 12·d·T per visit for attention's scores and
        sums, as in PaLM (arXiv 2204.02311, appendix B), which does not discount the causal half.
        """
        c = self.config
        per_round = sum(w.numel() for w in self.blocks.parameters()) + 2 * c.n_layer * c.n_embd * c.block_size
        return 6 * (self.n_loop * per_round + c.vocab_size * c.n_embd)

    def configure_optimizer(self, learning_rate, weight_decay, betas=(0.9, 0.95)):
        """AdamW, fused where the device has it. Every parameter is a matrix, so weight decay takes them all."""
        options = dict(lr=learning_rate, betas=betas, weight_decay=weight_decay)
        try:
            return torch.optim.AdamW(self.parameters(), fused=True, **options)
        except RuntimeError:
            return torch.optim.AdamW(self.parameters(), **options)


def pick_device(name, index=0):
    """The torch.device of that name, the index-th of its kind; auto takes CUDA, else MPS, else the CPU.

    Raises ValueError for a device that this machine does not have.
    """
    has = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind = next(kind for kind in has if has[kind]) if name == "auto" else name
    if not has[kind]:
        raise ValueError(f"device={kind} is not available on this machine; leave --device out to take what is")
    if kind != "cuda":
        return torch.device(kind)
    if index >= torch.cuda.device_count():
        raise ValueError(f"process {index} of this machine has no GPU of its own: there are "
                         f"{torch.cuda.device_count()}; start as many processes with torchrun --nproc_per_node")
    torch.cuda.set_device(index)
    return torch.device(kind, index)


def load_checkpoint(path):
    """Reads a checkpoint that train.py wrote: (model in float32 on the CPU, the checkpoint's dict).

    Raises ValueError, naming the file, for one that is missing, cut, foreign or whose weights do not fit its config.
    """
    if not os.path.isfile(path):
        raise ValueError(f"{path} does not exist; train a model first: torchrun train.py")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        model = GPT(GPTConfig(**checkpoint["config"]))
        model.load_state_dict(checkpoint["model"])
        for name, kind in (("step", int), ("tokenizer", str), ("settings", dict), ("optimizer", dict), ("scaler", dict),
                           ("best_val_loss", float), ("seconds", float)):
            if type(checkpoint[name]) is not kind:
                raise TypeError
        moments = checkpoint["optimizer"]           # {number of a parameter: its two, and more}; none before a step
        if checkpoint["step"] and any(moments[i][name].shape != w.shape for name in ("exp_avg", "exp_avg_sq")
                                      for i, w in enumerate(model.parameters())):
            raise ValueError
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:      # torch.load answers a broken file with nearly any exception there is
        raise ValueError(f"{path} is not a whole checkpoint of this program ({type(error).__name__}); "
                         "train anew in another --out_dir, or restore the file") from None
    return model, checkpoint


def sgd_step_change(model, idx, targets, learning_rate=0.1):
    """Takes one plain SGD step on (idx, targets) and returns ‖ΔF‖ / ‖F‖, F the final hidden state of idx.

    The blocks step, as in the theory (DeepLoop, first-order change ΔF); the embedding, whose step does not know R, stays.
    """
    loss = model(idx, targets)[1]
    grads = torch.autograd.grad(loss, list(model.blocks.parameters()))
    with torch.no_grad():
        before = model.hidden(idx)
        for w, g in zip(model.blocks.parameters(), grads):
            w -= learning_rate * g
        return ((model.hidden(idx) - before).norm() / before.norm()).item()


def main():
    """Prints what the exponent does to one step from initialization, as the rounds grow."""
    idx, targets = torch.randint(256, (2, 4, 64), generator=torch.Generator().manual_seed(0))
    print("K = 2 blocks, d = 64, synthetic tokens; ‖ΔF‖/‖F‖: final hidden state, one SGD step of 0.1")
    print(f"{'p':5}{'R':>4}{'alpha':>9}{'beta':>9}{'kappa_R/R':>11}{'‖ΔF‖/‖F‖':>11}")
    for exponent in (1 / 4, 3 / 8, 1 / 2):      # DeepNorm's, one between, DeepLoop's
        for n_loop in (1, 2, 4, 8, 16, 32, 64):
            torch.manual_seed(0)
            model = GPT(GPTConfig(block_size=64, n_loop=n_loop, n_embd=64, exponent=exponent))
            kappa = model.visit_alignment(idx, targets).max().item()
            change = sgd_step_change(model, idx, targets)
            print(f"{exponent:<5}{n_loop:4}{model.config.alpha:9.3f}{model.config.beta:9.4f}"
                  f"{kappa / n_loop:11.3f}{change:11.2e}", flush=True)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")
    main()
