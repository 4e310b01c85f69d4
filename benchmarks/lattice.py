"""Times the shared-trie evaluation of all schedules against enumerating them one by one; results must be equal.

    python benchmarks/lattice.py smollm2-135m --depth 5 --positions 12

Both use the decoder's own drafting code and keep the text's KV; the enumeration drafts every schedule for itself.
"""

import argparse
import json
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np


def main() -> None:
    """Decode one training answer, evaluate it both ways, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", help="slug of a pair in params.yaml whose models are there")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--positions", type=int, default=12, help="answer tokens that are evaluated")
    options = parser.parse_args()

    from pipeline.pair import load_pair_models
    from pipeline.params_file import load_pair
    from pipeline.prompts import load_prompts, split_prompts
    from treegraft.decoder import Decoder
    from treegraft.drafters.ngram import HITS_START, prior_table
    from treegraft.pair import encode_turns, make_drafters
    from treegraft.scheduling.features import RequestCosts
    from treegraft.scheduling.policy import never
    from treegraft.values.calibration import Calibration
    from treegraft.values.lattice import Lattice

    config = load_pair(options.pair, [])
    models = load_pair_models(config)
    settings = replace(config.decoding.settings(), depth=options.depth)
    prompt = split_prompts(load_prompts(config.prompts.sources))["train"][0]
    tokens = encode_turns(models.target, prompt.turns[:1], [])
    light = [i for i, model in enumerate(models.drafters) if model is None]
    decoder = Decoder(models.target, make_drafters(models, settings.ngram, None, light), never(), settings)
    answer = decoder.generate(tokens.tolist(), options.positions)
    text = np.concatenate([tokens, np.array(answer.tokens, np.int64)])
    m = len(models.drafters)
    costs = RequestCosts(len(tokens), 1.0, (1.0,) * (m - 1))
    calibration = Calibration(prior_table(settings.ngram), (1.0,) * m, (HITS_START,) * m)
    lattice = Lattice(settings, models.drafters, models.vocabulary, calibration)

    started = perf_counter()
    outcomes = lattice.evaluate(text, len(tokens), answer.alternatives, answer.confidence, options.positions, costs)
    trie_seconds = perf_counter() - started
    started = perf_counter()
    accepted = enumerate_all(models, settings, text, len(tokens), answer.alternatives, options.positions)
    naive_seconds = perf_counter() - started
    positions = len(answer.tokens)
    figures = {
        "pair": options.pair,
        "depth": options.depth,
        "width": settings.width,
        "schedules": m**options.depth,
        "positions": positions,
        "equal": bool((outcomes.accepted[..., -1] == accepted).all()),
        "differing_schedules": int((outcomes.accepted[..., -1] != accepted).sum()),
        "trie_positions_per_s": round(positions / trie_seconds, 2),
        "naive_positions_per_s": round(positions / naive_seconds, 2),
        "ratio": round(naive_seconds / trie_seconds, 2),
    }
    print(json.dumps(figures, indent=1))


def enumerate_all(
    models: Any, settings: Any, text: np.ndarray, prompt_tokens: int, alternatives: np.ndarray, limit: int
) -> np.ndarray:
    """Accepted length of every schedule at every position when all nodes are verified, int64 [positions, schedules]."""
    from treegraft.drafters import LanguageModelDrafter
    from treegraft.pair import make_drafters
    from treegraft.tree import DraftTree
    from treegraft.values.states import schedules

    nobody = np.zeros(0, np.int64)
    members = make_drafters(models, settings.ngram, None)
    for member in members:
        member.begin(text[:prompt_tokens], len(text) + 256)
    found = []
    for position in range(len(text) - prompt_tokens):
        root = prompt_tokens - 1 + position
        for member in members:
            if position:
                answer = text[root : root + 1]
                member.commit(DraftTree(0, len(members)), nobody, answer, alternatives[position - 1 : position])
            if isinstance(member, LanguageModelDrafter):
                member.runner.prefill(text[member.runner.committed : root])
        truth = text[root + 1 : root + 1 + max(limit - position - 1, 0)]
        row = []
        for plan in schedules(settings.depth, len(members)).tolist():
            tree = DraftTree(int(text[root]), len(members))
            for layer, action in enumerate(plan, 1):
                if limit - position - 1 >= 1:
                    members[action].draft(tree, settings, layer, limit - position - 1)
            row.append(accepted_length(tree, settings.verified_sizes[-1], truth))
            for member in members:  # forget the tree, keep the text
                member.commit(tree, nobody, nobody, alternatives[:0])
                if isinstance(member, LanguageModelDrafter):
                    member.runner.cache.truncate(root)
                    member.runner.committed = root
        found.append(row)
    return np.array(found)


def accepted_length(tree: Any, size: int, truth: np.ndarray) -> int:
    """Nodes of the true path among the ``size`` best."""
    from treegraft.grafting import verification_order

    order, _ = verification_order(tree, size)
    return int(np.isin(tree.walk(truth), order).sum())


if __name__ == "__main__":
    main()
