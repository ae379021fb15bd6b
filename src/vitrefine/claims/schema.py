"""What a ledger holds: the claims of a paper, each with what tests it, or with the reason why nothing does.

title: Context Broadcasting
paper: Hyeon-Woo et al., Scratching Visual Transformer's Back with Uniform Attention
usual: {data: cifar100, recipe: cifar, seeds: 3}          # of every test that says nothing else
claims:
  table-5-vit-ti-cb:
    where: "Table 5: ViT-Ti + CB"
    claim: Context Broadcasting makes ViT-Ti more accurate.
    printed: {top-1 %: {ViT-Ti: 72.2, +CB: 73.4}}
    test: {first: vit_tiny_patch16_224, second: vit_tiny_patch16_224+cb, expect: higher}
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from vitrefine.claims.metrics import METRICS
from vitrefine.errors import UserError, check_choice
from vitrefine.report.results import label
from vitrefine.surgery.registry import canonicalise
from vitrefine.surgery.spec import parse
from vitrefine.train.options import Conflict, Group, Positive


def canonical(spec: str) -> str:
    """A spec as results name it."""
    return str(canonicalise(parse(spec)))


def _spec(value: object) -> str:
    if not isinstance(value, str):
        raise UserError(f"a spec is text such as vit_tiny_patch16_224+cb, not {value!r}")
    return canonical(value)


def _metric(value: object) -> str:
    check_choice("metric", value, METRICS)
    return str(value)


SpecText = Annotated[str, BeforeValidator(_spec)]
Text = Annotated[str, Field(min_length=1)]


class Pair(Group):
    """Two specs; what counts is how much more the second has."""

    first: SpecText
    second: SpecText


class Test(Group):
    """Runs that can speak for or against a claim, and what it lets one expect of them."""

    __test__ = False  # it is nothing that pytest should collect

    second: SpecText
    first: SpecText | None = None
    """What the second is compared with; none where the metric itself is a difference, to be compared with zero."""
    less: Pair | None = None
    """Another pair, whose difference is taken off: for claims that one gain is larger than another."""
    metric: Annotated[str, BeforeValidator(_metric)] = "accuracy"
    expect: Literal["higher", "lower", "not_lower"]
    by: Positive | None = None
    """How large a difference is claimed; for not_lower, how large a loss still counts as none."""
    data: Text
    recipe: Text
    seeds: Annotated[int, Field(ge=2)]
    weights: str | None = None
    settings: dict[str, int | float | str | bool | None] = Field(default_factory=dict)
    """Of the recipe, where results with others are there too."""

    @model_validator(mode="after")
    def _fits(self) -> "Test":
        if self.expect == "not_lower" and self.by is None:
            raise Conflict("not_lower needs to know how large a loss counts as none; add by", "test.expect")
        if self.less is not None and self.first is None:
            raise Conflict("less takes one difference off another, so that a first is needed too", "test.less")
        return self

    @property
    def specs(self) -> list[str]:
        """All that must have been trained."""
        pairs = [self.less.first, self.less.second] if self.less else []
        return list(dict.fromkeys([*([self.first] if self.first else []), self.second, *pairs]))

    def name(self, spec: str) -> str:
        """What a spec is called beside the first one."""
        return f"`{label(spec, self.first or spec)}`"


class Claim(Group):
    """A row of a table or a figure: where it is, what it says, and one of test, not_run and same_as."""

    where: Text
    claim: Text
    printed: dict[str, dict[str, int | float | None]] = Field(default_factory=dict)
    """By unit, the figures as printed; null where the paper prints that there is none."""
    test: Test | None = None
    not_run: Text | None = None
    same_as: Text | None = None
    """The id of the claim that this row repeats; it has that one's verdict, and is not counted again."""

    @model_validator(mode="after")
    def _is_decided(self) -> "Claim":
        said = [name for name in ("test", "not_run", "same_as") if getattr(self, name) is not None]
        if len(said) != 1:
            wrong = f"{' and '.join(said)} are both said" if said else "nothing says how it is tested"
            raise Conflict(f"{wrong}; give one of test, not_run and same_as", *said, "where")
        if ":" not in self.where:
            raise Conflict('where names a table or figure and then what of it, as in "Table 5: ViT-Ti + CB"', "where")
        return self

    @property
    def place(self) -> tuple[str, str]:
        """`Table 5` and `ViT-Ti + CB`."""
        table, _, row = self.where.partition(":")
        return table.strip(), row.strip()


@dataclass(frozen=True)
class Ledger:
    """The claims of one paper, by id."""

    name: str  # of its file
    title: str
    paper: str
    claims: Mapping[str, Claim] = field(default_factory=dict)
    usual: Mapping[str, object] = field(default_factory=dict)  # of tests that say nothing else
