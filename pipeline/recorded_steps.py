"""Single decoding steps, as stage evaluate records them and the report draws them: rows of steps.jsonl, checked.

Nodes are columns, as in ``treegraft.tree.DraftTree``: node 0 is the root and a parent comes before its children.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from pipeline.measurements import Count, Finite, Name, Strict, first_problem
from treegraft.errors import UserError

Why = Literal["recovered", "shared", "longest", "rejected", "skips"]
"""What a step was chosen for: see ``pipeline.step_recorder.RANKS``."""

Chance = Annotated[float, Field(ge=0, le=1)]


class RecordedLayer(Strict):
    """One decision of the scheduler and the nodes it led to."""

    action: Count
    """The drafter that acted; 0 is a skip."""
    margins: list[Finite]
    """Of calling each dearer drafter instead of skipping, in tokens, [m - 1]; empty where the fallback acted."""
    added: Count
    """Nodes that came into the tree, drawn or not."""


class RecordedStep(Strict):
    """One step: its tree, what was verified of it and what was accepted.

    ``text``, ``parent``, ``layer``, ``drafter``, ``scorer`` and ``probability`` have an entry for each recorded node
    (see ``DraftTree`` for their meaning; drafter and scorer of the root are -1). ``verified``, ``accepted`` (in path
    order) and ``recovered`` are numbers of recorded nodes.
    """

    step: Count
    """Its number in the answer, from 1."""
    position: Count
    """Tokens of the answer before it."""
    why: Why
    before: Annotated[list[str], Field(min_length=1)]
    """The texts of the last tokens before the draft; the last one is the root's."""
    layers: list[RecordedLayer]
    text: list[str]
    parent: list[Count]
    layer: list[Count]
    drafter: list[int]
    scorer: list[int]
    probability: list[Chance]
    """The estimated chance that the node is accepted, its parents included."""
    verified: list[Count]
    accepted: list[Count]
    recovered: list[Count]
    """Nodes of a cheaper drafter that the frontier had left behind and a later call expanded."""
    bonus: str | None
    """The text of the target's own last token; None where the answer ended inside the draft."""
    drafted: Count
    """Nodes of the whole tree without the root."""
    checked: Count
    """Verified nodes of the whole tree."""

    @model_validator(mode="after")
    def _is_a_tree(self) -> Self:
        size = len(self.text)
        columns = (self.parent, self.layer, self.drafter, self.scorer, self.probability)
        if not size or any(len(column) != size for column in columns):
            raise ValueError("the columns of the nodes differ in length")
        if self.parent[0] != 0 or any(parent >= node for node, parent in enumerate(self.parent) if node):
            raise ValueError("a node comes before its parent")
        if not all(0 < node < size for node in (*self.verified, *self.accepted, *self.recovered)):
            raise ValueError("a verified, accepted or recovered node is not recorded")
        if any(self.parent[node] != above for above, node in zip([0, *self.accepted], self.accepted, strict=False)):
            raise ValueError("the accepted nodes are no path from the root")
        if not set(self.accepted) <= set(self.verified):
            raise ValueError("an accepted node was not verified")
        return self


class RecordedPrompt(Strict):
    """One line of steps.jsonl: some steps of TreeGraft's answer to the first turn of a prompt."""

    prompt_id: Name
    bench: Name
    drafters: Annotated[list[Name], Field(min_length=1)]
    """In order of cost: the names behind the numbers."""
    total: Count
    """Steps of the answer."""
    steps: list[RecordedStep]

    @model_validator(mode="after")
    def _names_its_drafters(self) -> Self:
        count = len(self.drafters)
        for step in self.steps:
            if any(layer.action >= count or len(layer.margins) not in (0, count - 1) for layer in step.layers):
                raise ValueError(f"the decisions of step {step.step} are not among {count} drafters")
            if max(*step.drafter, *step.scorer) >= count:
                raise ValueError(f"a node of step {step.step} is of none of {count} drafters")
        return self


def parse_prompt(line: str, where: str) -> RecordedPrompt:
    """One line of steps.jsonl as a `RecordedPrompt`; UserError that names `where` if it is not one."""
    try:
        return RecordedPrompt.model_validate_json(line)
    except ValidationError as error:
        raise UserError(f"{where} does not hold steps of the evaluate stage: {first_problem(error)}") from error
