"""Stage draft: distilled drafters, put together from the target and the layers kept in data/drafters/.

Pairs whose drafters are models of their own have nothing to build; their manifest says so.
"""

import json
from typing import Any

from pipeline.files import file_digest, write_json
from pipeline.params import DrafterEntry, PairConfig
from pipeline.progress import Steps, log
from pipeline.prompts import Prompt, load_prompts, split_prompts, take
from treegraft.errors import UserError

SCHEMA = 1

TAUGHT = "prompts"  # folder beside a drafter's layers: prompts that it is trained on and nothing else is
# Prompts of each kind, never trained on, by which a rebuilt drafter's agreement with the target is measured.
HELD_OUT_PER_KIND = 5


def run(config: PairConfig) -> None:
    """Assemble every distilled drafter of the pair and write models/manifests/<pair>/draft.json, last."""
    models = {drafter.name: _assemble(config, drafter) for drafter in config.drafters if drafter.distilled is not None}
    write_json(config.paths.manifest("draft"), {"schema": SCHEMA, "pair": config.slug, "models": models})


def rebuild(config: PairConfig) -> None:
    """Train the layers of the pair's distilled drafter anew and overwrite their file; takes hours on two cores.

    A killed run goes on where it stood, from .treegraft/<pair>/draft/.
    """
    from pipeline.distill_drafter import DrafterRecipe, train_drafter
    from treegraft.model_folder import locate

    drafters = [drafter for drafter in config.drafters if drafter.distilled is not None]
    if len(drafters) != 1 or drafters[0].distilled is None:
        raise UserError(f"The pair {config.slug} has {len(drafters)} distilled drafters; --rebuild needs exactly one.")
    _require_target(config)
    others = load_prompts(config.prompts.sources)
    taught = load_prompts([drafters[0].distilled.parent / TAUGHT])
    _refuse_shared(taught, others)
    agreement = train_drafter(
        target_folder=locate(config.paths.target),
        prompts=[prompt.turns[0] for prompt in taught],
        recipe=DrafterRecipe(),
        work=config.paths.scratch("draft"),
        out=drafters[0].distilled,
        progress=Steps(),
        held_out=[(prompt.kind, prompt.turns[0]) for prompt in take(split_prompts(others)["test"], HELD_OUT_PER_KIND)],
    )
    log("agreement with the target: " + ", ".join(f"{kind} {share:.3f}" for kind, share in agreement.items()))


def _refuse_shared(taught: list[Prompt], others: list[Prompt]) -> None:
    """A drafter knows the answers it was taught; a scheduler that learns from these calls it far too often."""
    known = {prompt.turns[0]: prompt for prompt in taught}
    for prompt in others:
        if prompt.turns[0] in known:
            raise UserError(
                f"the prompt {known[prompt.turns[0]].id} that the drafter is taught is also {prompt.id} of "
                "prompts.sources; take it out of one of them."
            )


def _assemble(config: PairConfig, drafter: DrafterEntry) -> dict[str, Any]:
    """The manifest's entry for one distilled drafter, whose folder is written unless it is up to date."""
    from treegraft.model_folder import MANIFEST, digest_of, locate

    _require_target(config)
    if drafter.distilled is None or not drafter.distilled.is_file():
        raise UserError(
            f"The layers {drafter.distilled} of drafter {drafter.name} are missing: restore the file from git, "
            f"or train it with `pipeline draft --rebuild {config.slug}`."
        )
    inputs = {"target": digest_of(config.paths.target), "layers": file_digest(drafter.distilled)}
    folder = config.paths.drafter(drafter.name)
    known = _known(config).get(drafter.name, {})
    if known.get("inputs") == inputs and folder.is_dir() and known.get("digest") == digest_of(folder):
        return known
    from pipeline.pruned_student import assemble_drafter

    log(f"putting {drafter.name} together")
    folder.parent.mkdir(parents=True, exist_ok=True)
    assemble_drafter(locate(config.paths.target), drafter.distilled, folder)
    # The target's own manifest may have come along with its tokenizer files; it lists other files than these.
    (folder / MANIFEST).unlink(missing_ok=True)
    return {"source": {"distilled": str(drafter.distilled)}, "inputs": inputs, "digest": digest_of(folder)}


def _require_target(config: PairConfig) -> None:
    if not config.paths.target.is_dir():
        raise UserError(f"{config.paths.target} is missing: run `pipeline fetch {config.slug}` first.")


def _known(config: PairConfig) -> dict[str, dict[str, Any]]:
    """The entries of the last run's manifest; none if it is missing or of another form."""
    try:
        manifest = json.loads(config.paths.manifest("draft").read_text(encoding="utf-8"))
        models: dict[str, dict[str, Any]] = manifest["models"] if manifest["schema"] == SCHEMA else {}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {}
    return models
