"""``pipeline label <pair> --plan``: what labelling would do and about what it would cost; nothing is done or loaded.

The cost is an estimate from above: it takes every answer to be as long as allowed and every path that a schedule may
ask a drafter for to be a new one, while schedules share most of them.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.label import LabelJob, make_job
from pipeline.label_work import CALIBRATION_TURNS
from treegraft.errors import UserError

if TYPE_CHECKING:
    from pipeline.params import PairConfig
    from treegraft.costs import CostModel

CHARACTERS_OF_A_TOKEN = 4  # of English text; the tokenizer is not loaded for a plan


@dataclass(frozen=True)
class Left:
    """What is left to do of one turn."""

    prompt_tokens: int
    """Counted where the turn is answered, else estimated; earlier turns are part of it."""
    answer_tokens: int
    """Counted where the turn is answered, else the most that is allowed."""
    answered: bool
    evaluated: bool
    trains: bool


def run(config: "PairConfig") -> None:
    """Print the plan."""
    job = make_job(config)
    turns = left_of(job)
    depth, m = config.decoding.depth, len(config.drafters)
    answered, evaluated = sum(turn.answered for turn in turns), sum(turn.evaluated for turn in turns)
    workers = {"local": "this process", "torchrun": "as many as are started", "ray": f"{config.label.workers} actors"}
    temperature = config.label.temperature
    how = f", sampled at temperature {temperature:g}" if temperature > 0 else ""
    lines = {
        "prompts": f"{len(job.prompts)}, with {len(turns)} turns",
        "new tokens": f"at most {len(turns) * config.label.max_new_tokens} of {config.target.name}{how}",
        "schedules": f"{m**depth} at each position ({m} drafters, depth {depth})",
        "claims": f"{2 * len(job.prompts) + 1} (every prompt's answers, the calibration, every prompt's schedules)",
        "done before": f"{answered} turns answered, {evaluated} evaluated",
        "workers": f"{workers[config.label.executor]} ({config.label.executor})",
        "cost": cost_line(config, turns),
    }
    if job.is_published():
        lines |= {"done before": f"all; {config.paths.outcomes} holds the outcomes", "cost": "nothing"}
    for name, text in lines.items():
        print(f"{name + ':':<13}{text}")


def left_of(job: LabelJob) -> list[Left]:
    """Every turn of the job with what an earlier run has done of it."""
    most = job.config.label.max_new_tokens
    result = []
    for split, prompt in job.prompts:
        context = 0
        for number, text in enumerate(prompt.turns):
            context += math.ceil(len(text) / CHARACTERS_OF_A_TOKEN)
            answered = job.answer_file(prompt, number).exists()
            evaluated, tokens = False, most
            if answered:
                turn = job.turn_of(split, prompt, number)
                context, tokens = turn.prompt_tokens, len(turn.text) - turn.prompt_tokens
                evaluated = job.outcomes_file(turn).exists()
            result.append(Left(context, tokens, answered, evaluated, split == "train"))
            context += tokens
    return result


def cost_line(config: "PairConfig", turns: list[Left]) -> str:
    """What is left, in hours of one worker, or why that is not known."""
    from pipeline.profile import load_costs

    try:
        costs = load_costs(config)
    except UserError as error:
        return f"unknown: {error}"
    target, drafters = target_ms(config, costs, turns), drafters_ms(config, costs, turns)
    hours = (target + drafters) / 3_600_000
    return (
        f"about {hours:.3g} h of one worker at most, an estimate from the profile: {target / 1000:.0f} s of the "
        f"target, {drafters / 1000:.0f} s of drafters and trees"
    )


def target_ms(config: "PairConfig", costs: "CostModel", turns: list[Left]) -> float:
    """Plain decoding of the answers that are missing and, where they are sampled, all paths at missing positions."""
    packed, ngram = config.label.tokens_per_forward, config.decoding.ngram
    # A node that is expanded needs the target's distribution; so does each node of an n-gram chain but the last.
    expanded = sum(ngram.path if drafter.kind == "ngram" else 1 for drafter in config.drafters)
    total = 0.0
    for turn in turns:
        if not turn.answered:
            total += float(costs.prefill_ms(turn.prompt_tokens))
            total += turn.answer_tokens * (float(costs.verify_ms(0, _middle(turn))) + costs.step_ms)
        if not turn.evaluated and config.label.temperature > 0:
            nodes = turn.answer_tokens * _decisions(config) * config.decoding.width * expanded
            total += float(costs.prefill_ms(turn.prompt_tokens + turn.answer_tokens))
            total += math.ceil(nodes / packed) * float(costs.target.ms(packed, _middle(turn)))
    return total


def drafters_ms(config: "PairConfig", costs: "CostModel", turns: list[Left]) -> float:
    """All schedules at every position that is missing, and the calibration if nothing was evaluated yet."""
    width, packed = config.decoding.width, config.label.tokens_per_forward
    decisions = _decisions(config)
    fitted = any(turn.evaluated for turn in turns)
    training = [turn for turn in turns if turn.trains]
    sample = [] if fitted else training[:: max(1, len(training) // CALIBRATION_TURNS)]
    total = 0.0
    for drafter, curve in enumerate(costs.drafters):
        for turn in sample:
            total += float(costs.prompt_ms(drafter, turn.prompt_tokens + turn.answer_tokens))
        for turn in turns:
            if turn.evaluated:
                continue
            total += turn.answer_tokens * decisions * (costs.light_ms if curve is None else costs.graft_ms)
            if curve is not None:
                # The text itself, then in every decision a frontier; forwards are packed up to the budget.
                forwards = math.ceil(turn.answer_tokens * decisions * width / packed)
                total += float(costs.prompt_ms(drafter, turn.prompt_tokens + turn.answer_tokens))
                total += forwards * float(curve.ms(packed, _middle(turn)))
    return total


def _decisions(config: "PairConfig") -> int:
    """Scheduling states of a position; in each of them every drafter is asked."""
    m = len(config.drafters)
    return sum(m**layer for layer in range(config.decoding.depth))


def _middle(turn: Left) -> int:
    """The context in the middle of an answer, in tokens."""
    return turn.prompt_tokens + turn.answer_tokens // 2
