"""A whole pair in a folder: tiny random target and drafter, prompts of its words, params.yaml with everything small.

Guarantees: all stages run on it in seconds; the drafter is the target's first layer, so drafting pays now and then.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from tests.treegraft.tiny import save_tiny

SLUG = "tiny-1.0"  # with a dot, as real slugs have


def make_pair(root: Path, **sections: dict[str, Any]) -> Path:
    """Write models, prompts and params.yaml below ``root``; ``sections`` are laid over the parameters' sections."""
    save_tiny(root / "source/target", seed=1, layers=2)
    save_tiny(root / "source/drafter", seed=1, layers=1)
    for kind, first in (("alpha", 2), ("beta", 20)):
        lines = []
        for number in range(8):
            words = [f"w{first + (number * 5 + i * (1 + number % 3)) % 17}" for i in range(6 + number)]
            turns = [" ".join(words)] if kind == "alpha" or number % 4 else [" ".join(words), "w3 w4"]
            lines.append(json.dumps({"question_id": number, "category": kind, "turns": turns}))
        path = root / "data/prompts" / f"{kind}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    params: dict[str, Any] = {
        "run": [SLUG],
        "device": "cpu",
        "dtype": "float32",
        "drafter_dtype": "auto",
        "threads": 1,
        "seed": 0,
        "decoding": {
            "depth": 3,
            "width": 3,
            "look_back": 3,
            "verified_sizes": [0, 1, 2, 4, 8],
            "ngram": {"max_match": 3, "branches": 2, "recycled": 2, "path": 3},
        },
        "profile": {"new_tokens": [1, 2, 4, 8], "context_lengths": [16, 64], "repeats": 2},
        "prompts": {"sources": ["data/prompts"]},
        "label": {
            "train_per_kind": 3,
            "validation_per_kind": 1,
            "test_per_kind": 2,
            "max_new_tokens": 12,
            "temperature": 0.0,
            "tokens_per_forward": 32,
            "executor": "local",
            "workers": 1,
        },
        "traces": {"policy_iterations": 2},
        "distill": {
            "features": ["text", "tree"],
            "hidden": [8],
            "learning_rate": 0.01,
            "weight_decay": 0.0,
            "epochs": 4,
            "batch_size": 64,
            "patience": 2,
            "visit_exponent": 1.0,
            "policy_iterations": 1,
            "seeds": [0, 1],
        },
        "tune": {"trials": 3, "workers": 1},
        "evaluate": {
            "max_new_tokens": 12,
            "temperatures": [0.0],
            "repeats": 1,
            "bootstrap": 50,
            "hf_baselines": True,
        },
        "pairs": {
            SLUG: {
                "target": {"name": "tiny-target", "folder": "source/target"},
                "drafters": [
                    {"name": "ngram", "kind": "ngram"},
                    {"name": "tiny-drafter", "kind": "lm", "folder": "source/drafter"},
                ],
            }
        },
    }
    for section, values in sections.items():
        params[section] |= values
    (root / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False), encoding="utf-8")
    return root


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path from there."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
