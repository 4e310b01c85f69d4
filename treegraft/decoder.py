"""The decoding loop: draft, prune, verify, commit, until a stop.

Lossless by construction: every emitted token is the target's own choice given the text before it; drafters only
decide how many such choices one target forward can confirm.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from treegraft.costs import CostModel
from treegraft.drafters.base import Drafter
from treegraft.drafters.lm import LanguageModelDrafter
from treegraft.drafters.ngram import NgramDrafter
from treegraft.errors import UserError
from treegraft.grafting import accepted_mass, choose_size, verification_order
from treegraft.metrics import DecodingMetrics
from treegraft.models import LanguageModel
from treegraft.runner import ModelRunner
from treegraft.sampling import SamplingSettings, TokenChooser
from treegraft.scheduling.admission import prompt_passes
from treegraft.scheduling.features import RequestCosts, SchedulingState
from treegraft.scheduling.outlook import Outlook, OutlookTracker
from treegraft.scheduling.policy import FixedSchedule, Scheduler, never
from treegraft.settings import DraftSettings
from treegraft.stopping import Finish, StopChecker
from treegraft.tree import DraftTree, FloatArray, IntArray
from treegraft.verification import verify, walk

GREEDY = SamplingSettings()
ROOM = 1024  # tokens of an answer for which caches have room from the beginning

StepObserver = Callable[[DraftTree, IntArray, IntArray, IntArray], None]
"""Called after a step with its tree (not to be changed), the verified nodes (ascending), the accepted ones (in path
order) and the emitted tokens: those of the accepted nodes and, unless the text ended before, the bonus token."""


@dataclass(frozen=True)
class Generation:
    """What a request produced."""

    tokens: list[int]
    """Emitted token ids, EOS included where it was emitted."""
    text: str
    finish: Finish
    metrics: DecodingMetrics
    alternatives: IntArray
    """int64 [len(tokens), r]: the target's likeliest tokens in place of each, best first; r is 0 unless an n-gram
    drafter recycles them."""
    confidence: FloatArray
    """float64 [len(tokens)]: probability of each token under the target's unprocessed logits."""
    logits: torch.Tensor | None = None
    """[len(tokens), vocabulary] of the target before each token, where they were asked for (``record``)."""
    scores: torch.Tensor | None = None
    """The same after the logits processors, as each token was chosen from them."""


@dataclass(frozen=True)
class _Step:
    """What one step did: verified int64 [N], accepted int64 [a], tokens int64 [n], alternatives int64 [n, r], logits
    [n, vocabulary] if recorded."""

    verified: IntArray
    accepted: IntArray
    tokens: IntArray
    finish: Finish | None
    alternatives: IntArray
    confidence: FloatArray
    logits: torch.Tensor | None


class Decoder:
    """Decodes with a target, drafters in order of cost, and a scheduler.

    Args:
        drafters: none for plain decoding; ``drafters[i].index`` must be i.
        costs, tokens_per_ms: together they choose the verified size from the hardware; without them every step
            verifies the largest size of ``settings.verified_sizes`` (as many nodes as there are).
        ignore_eos: go on after EOS (benchmarks of fixed length).
        fallback: acts where the scheduler cannot tell; None skips there.
    """

    def __init__(
        self,
        target: LanguageModel,
        drafters: Sequence[Drafter],
        scheduler: Scheduler,
        settings: DraftSettings,
        costs: CostModel | None = None,
        tokens_per_ms: float = 0.0,
        ignore_eos: bool = False,
        fallback: FixedSchedule | None = None,
    ) -> None:
        self.target = target
        self.drafters = list(drafters)
        self.scheduler = scheduler
        self.settings = settings
        self.costs = costs
        self.tokens_per_ms = tokens_per_ms
        self.ignore_eos = ignore_eos
        self.fallback = never() if fallback is None else fallback
        self.runner = ModelRunner(target)
        light = any(isinstance(drafter, NgramDrafter) for drafter in self.drafters)
        self._recycled = min(settings.ngram.recycled, target.vocab_size) if light else 0

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: SamplingSettings = GREEDY,
        stop: tuple[str, ...] = (),
        on_tokens: Callable[[list[int]], None] | None = None,
        record: bool = False,
        eos: tuple[int, ...] | None = None,
        on_step: StepObserver | None = None,
    ) -> Generation:
        """Continue ``prompt`` (token ids) until EOS, a stop string, ``max_new_tokens`` or the context's end.

        Args:
            on_tokens: called after every step with the tokens it emitted. An exception from it (or a KeyboardInterrupt
                anywhere) ends the request and leaves the decoder ready for the next one.
            record: keep the target's logits and processed scores of every emitted token.
            eos: token ids that end the text; None: those of the target, or none with ``ignore_eos``.
            on_step: called after every step, before ``on_tokens``, with what it drafted and what came of it.

        Raises:
            UserError: empty prompt, or one that fills the target's context.
        """
        try:
            return self._generate(prompt, max_new_tokens, sampling, stop, on_tokens, record, eos, on_step)
        except BaseException:
            # whatever was half done in a cache must not meet the next request
            self.runner.forget()
            for drafter in self.drafters:
                if isinstance(drafter, LanguageModelDrafter):
                    drafter.runner.forget()
            raise

    def _generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        sampling: SamplingSettings,
        stop: tuple[str, ...],
        on_tokens: Callable[[list[int]], None] | None,
        record: bool,
        eos: tuple[int, ...] | None,
        on_step: StepObserver | None,
    ) -> Generation:
        started = perf_counter()
        room = self.target.context_limit - len(prompt)
        if len(prompt) == 0:
            raise UserError("the prompt is empty; give at least one token.")
        if room < 1:
            raise UserError(
                f"the prompt has {len(prompt)} tokens, but {self.target.name} holds {self.target.context_limit}; "
                "shorten the prompt."
            )
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
        limit, reason = (max_new_tokens, "length") if max_new_tokens <= room else (room, "context")
        if eos is None:
            eos = () if self.ignore_eos else self.target.eos_token_ids
        stopper = StopChecker(eos, limit, reason, stop, self.target.tokenizer)  # type: ignore[arg-type]
        chooser = TokenChooser(sampling, record)
        metrics = DecodingMetrics(prompt_tokens=len(prompt), calls=[0] * len(self.drafters))

        text = list(prompt)
        self._begin(text, len(prompt) + limit)
        metrics.prefill_ms = (perf_counter() - started) * 1000
        prefill_forward_ms = self.runner.forward_ms
        costs = self._request_costs(len(prompt), limit)
        finish: Finish | None = None
        steps: list[_Step] = []
        light = next((drafter for drafter in self.drafters if isinstance(drafter, NgramDrafter)), None)
        tracker = OutlookTracker(None if light is None else light.state)
        while finish is None:
            max_depth = stopper.remaining - 1
            outlook = tracker.now(tuple(drafter.hits for drafter in self.drafters[1:]))
            tree = self._draft(text[-1], max_depth, costs, outlook, metrics)
            step = self._verify_and_commit(tree, text, chooser, stopper, metrics, record)
            steps.append(step)
            tracker.commit(step.confidence.tolist())
            finish = step.finish
            if on_step is not None:
                on_step(tree, step.verified, step.accepted, step.tokens)
            if on_tokens is not None:
                on_tokens(step.tokens.tolist())

        metrics.tokens = len(stopper.emitted)
        metrics.processed = {self.target.name: self.runner.tokens_processed} | {
            drafter.name: drafter.tokens_processed for drafter in self.drafters
        }
        models = [self.runner, *(d.runner for d in self.drafters if isinstance(d, LanguageModelDrafter))]
        metrics.forward_ms = sum(runner.forward_ms for runner in models) - prefill_forward_ms
        metrics.seconds = perf_counter() - started
        return Generation(
            tokens=stopper.emitted,
            text=stopper.text(),
            finish=finish,
            metrics=metrics,
            alternatives=np.concatenate([step.alternatives for step in steps]),
            confidence=np.concatenate([step.confidence for step in steps]),
            logits=torch.cat([step.logits for step in steps if step.logits is not None]) if record else None,
            scores=torch.stack(chooser.scores) if record else None,
        )

    def _begin(self, text: list[int], length: int) -> None:
        """Start a request: the target processes all but the last token, which is the first root."""
        # Whoever writes "until EOS" as a huge limit shall not pay for it in memory: caches grow.
        capacity = min(length, len(text) + ROOM) + self.settings.verified_sizes[-1] + 1
        tokens = np.array(text, np.int64)
        self.runner.reset(capacity)
        self.runner.prefill(tokens[:-1])
        for drafter in self.drafters:
            drafter.begin(tokens, capacity)

    def _request_costs(self, prompt_tokens: int, new_tokens: int) -> RequestCosts:
        if self.costs is None:
            strong = len(self.drafters) - 1
            return RequestCosts(prompt_tokens, 1.0, (1.0,) * strong, new_tokens, (0.0,) * strong)
        return request_costs(self.costs, prompt_tokens, new_tokens)

    def _draft(
        self, root: int, max_depth: int, costs: RequestCosts, outlook: Outlook, metrics: DecodingMetrics
    ) -> DraftTree:
        tree = DraftTree(root, len(self.drafters))
        if max_depth < 1 or not self.drafters:
            return tree
        prefix: tuple[int, ...] = ()
        for layer in range(1, self.settings.depth + 1):
            before = perf_counter()
            state = SchedulingState(tree, layer, prefix, self.settings, max_depth, costs, outlook)
            action = self.scheduler.choose(state)
            if action is None:
                metrics.fallbacks += 1
                action = self.fallback.choose(state)
            decided = perf_counter()
            drafter = self.drafters[action]
            drafter.draft(tree, self.settings, layer, max_depth)
            spent = (perf_counter() - decided) * 1000
            metrics.scheduler_ms += (decided - before) * 1000
            if isinstance(drafter, LanguageModelDrafter):
                metrics.draft_strong_ms += spent
            else:
                metrics.draft_light_ms += spent
            metrics.calls[action] += 1
            prefix += (action,)
        return tree

    def _nodes_to_verify(self, tree: DraftTree) -> IntArray:
        """The verified nodes, ascending."""
        sizes = self.settings.verified_sizes
        order, probabilities = verification_order(tree, sizes[-1])
        count = sizes[-1]
        if self.costs is not None and len(order):
            verify_ms = self.costs.verify_ms(sizes, self.runner.committed)
            count = sizes[choose_size(accepted_mass(probabilities, sizes), verify_ms, self.tokens_per_ms)]
        return np.sort(order[:count])

    def _verify_and_commit(
        self,
        tree: DraftTree,
        text: list[int],
        chooser: TokenChooser,
        stopper: StopChecker,
        metrics: DecodingMetrics,
        record: bool,
    ) -> "_Step":
        nodes = self._nodes_to_verify(tree)
        before = perf_counter()
        logits = verify(self.runner, tree, nodes)
        accepted: list[int] = []
        finish: Finish | None = None
        root_at = len(text)
        for token, node in walk(tree, nodes, logits, chooser, text):
            text.append(token)
            if node is not None:
                accepted.append(node)
            finish = stopper.add(token)
            if finish is not None:
                break
        metrics.verify_ms += (perf_counter() - before) * 1000
        path, emitted = np.array(accepted, np.int64), np.array(text[root_at:], np.int64)
        rows = np.concatenate([[0], np.searchsorted(nodes, path) + 1])  # root and accepted nodes
        chosen_from = logits[torch.from_numpy(rows[: len(emitted)]).to(logits.device)]
        alternatives = chosen_from.topk(self._recycled, dim=-1).indices.cpu().numpy()
        confidence = _probabilities(chosen_from, emitted)
        metrics.verified_nodes += len(nodes)
        metrics.count_step(len(accepted))
        self.runner.commit((rows + self.runner.committed).tolist())
        for drafter in self.drafters:
            drafter.commit(tree, path, emitted, alternatives)
        return _Step(nodes, path, emitted, finish, alternatives, confidence, chosen_from if record else None)


def _probabilities(logits: torch.Tensor, tokens: IntArray) -> FloatArray:
    """The probability of tokens[i] in row i: logits [n, vocabulary], tokens int64 [n] -> float64 [n]."""
    rows = logits.float()
    chosen = rows.gather(1, torch.from_numpy(tokens).to(rows.device)[:, None])[:, 0]
    found: FloatArray = (chosen - rows.logsumexp(-1)).exp().double().cpu().numpy()
    return found


def request_costs(costs: CostModel, prompt_tokens: int, new_tokens: int) -> RequestCosts:
    """What a scheduler is told about the hardware: the cost of one token in each model after the prompt, and of it."""
    strong = range(1, len(costs.drafters))
    drafter_ms = tuple(float(costs.layer_ms(j, 1, prompt_tokens)) for j in strong)
    passes = tuple(prompt_passes(costs, prompt_tokens).tolist())
    return RequestCosts(prompt_tokens, float(costs.verify_ms(0, prompt_tokens)), drafter_ms, new_tokens, passes)
