"""Measures what attention in float64 costs plain decoding of a bfloat16 pair on CPU.

    python benchmarks/exact_attention.py smollm2-135m --prompts 2

Each prompt is decoded with it and without it, in shuffled order, in one process. The ratios are seconds per token with
exact attention over those without, of whole answers and of their steps alone, by kind of prompt and over all.
"""

import argparse
import random
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treegraft.metrics import DecodingMetrics

TOKENS = 64
ROUNDS = 2


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", help="slug of a pair in params.yaml")
    parser.add_argument("--prompts", type=int, default=2, help="test prompts of each kind")
    options = parser.parse_args()

    from pipeline.pair import load_pair_models
    from pipeline.params_file import load_pair
    from pipeline.prompts import select_prompts, take
    from treegraft import lean
    from treegraft.decoder import Decoder
    from treegraft.metrics import DecodingMetrics
    from treegraft.pair import encode_turns
    from treegraft.sampling import SamplingSettings
    from treegraft.scheduling.policy import never

    config = load_pair(options.pair)
    target = load_pair_models(config).target
    prompts = take(select_prompts(config.prompts.sources, config.label)["test"], options.prompts)
    decoder = Decoder(target, [], never(), config.decoding.settings())
    greedy = SamplingSettings(temperature=0.0, seed=0)
    decoder.generate(encode_turns(target, prompts[0].turns[:1], []).tolist(), TOKENS, greedy)  # warm-up
    spent: dict[tuple[str, bool], DecodingMetrics] = defaultdict(DecodingMetrics)
    rows = lean.MOST_EXACT_ROWS
    for _ in range(ROUNDS):
        for prompt in prompts:
            tokens = encode_turns(target, prompt.turns[:1], []).tolist()
            for exact in random.sample((True, False), 2):
                lean.MOST_EXACT_ROWS = rows if exact else 0
                metrics = decoder.generate(tokens, TOKENS, greedy, eos=()).metrics
                for kind in (prompt.kind, "all"):
                    spent[kind, exact].add(metrics)
    for kind in dict.fromkeys(kind for kind, _ in spent):
        whole, steps = zip(*(per_token(spent[kind, exact]) for exact in (True, False)), strict=True)
        print(f"{kind}: {whole[0] / whole[1]:.3f} of whole answers, {steps[0] / steps[1]:.3f} of their steps")


def per_token(spent: "DecodingMetrics") -> tuple[float, float]:
    """Milliseconds per token, of everything and without the prompt's pass."""
    whole = spent.seconds * 1000
    return whole / spent.tokens, (whole - spent.prefill_ms) / spent.tokens


if __name__ == "__main__":
    main()
