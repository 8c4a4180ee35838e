"""The first step where norms have learned gains: python .results/gains.py [largest R, 64] > .results/gains.csv"""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import model


class Gained(model.Block):
    """A Post-LN block whose two outer norms have a gain per dimension, as RMSNorm is usually built."""

    def __init__(self, config):
        super().__init__(config)
        self.gains = torch.nn.Parameter(torch.ones(2, config.n_embd))

    def forward(self, x, rope, past=None):
        x = model.norm(self.alpha * x + self.attn(x, rope, past)) * self.gains[0]
        return model.norm(self.alpha * x + self.mlp(x)) * self.gains[1]


def main():
    largest = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    model.Block = Gained
    idx, targets = torch.randint(256, (2, 4, 64), generator=torch.Generator().manual_seed(0))
    print("scaling,n_loop,change")
    for scaling in ("deepnorm", "deeploop"):
        for n_loop in (n for n in (1, 2, 4, 8, 16, 32, 64) if n <= largest):
            torch.manual_seed(0)
            gpt = model.GPT(model.GPTConfig(block_size=64, n_loop=n_loop, n_embd=64, scaling=scaling))
            print(f"{scaling},{n_loop},{model.first_step_change(gpt, idx, targets):.2e}", flush=True)


if __name__ == "__main__":
    main()
