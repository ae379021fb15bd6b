"""Applying modifications to a model, and reporting what that did."""

from dataclasses import dataclass

from torch import nn

from vitrefine.errors import UserError
from vitrefine.surgery.graft import Change, refuse_wrapper, surgery_of, undo_to
from vitrefine.surgery.registry import get, validate
from vitrefine.surgery.spec import Call, parse_modifications


@dataclass(frozen=True)
class Report:
    """What a modification did; prints itself."""

    modifications: tuple[Call, ...]
    changes: tuple[Change, ...]
    new_parameters: int

    @property
    def places(self) -> int:
        """How many modules were changed; a note on the whole model is none."""
        return sum(bool(change.where) for change in self.changes)

    def __str__(self) -> str:
        head = f"+{'+'.join(map(str, self.modifications))}: {self.places} change{'s' * (self.places != 1)}, "
        head += f"{self.new_parameters:+,} parameters"
        return "\n".join([head, *(f"  {change.where or '(the model)'}: {change.what}" for change in self.changes)])


def apply(model: nn.Module, modifications: str | Call, **options: object) -> Report:
    """Change a model in place.

    Args:
        model: Any model of timm, torchvision or Hugging Face.
        modifications: `"cb"`, or several as a spec writes them: `"refiner(expansion=3)+cb"`.
        options: Options of a single modification, instead of those in brackets: `apply(model, "cb", layers="all")`.

    Returns:
        What was changed. Where a modification cannot be applied, a `UserError` says why and the model is as it was.
    """
    calls = (modifications,) if isinstance(modifications, Call) else parse_modifications(modifications)
    if options:
        if len(calls) != 1 or calls[0].args:
            raise UserError("give options either in brackets or as keywords, and keywords to one modification only")
        calls = (Call(calls[0].name, options),)  # type: ignore[arg-type]
    checked = [(call, validate(call)) for call in calls]
    refuse_wrapper(model)
    record = surgery_of(model)
    before = (len(record.undo), len(record.changes), len(record.modifications))
    parameters = _count(model)
    try:
        for call, values in checked:
            changes = get(call.name).apply(model, **values)
            if not changes:
                raise UserError(f"+{call} matched nothing in {type(model).__name__}")
            record.changes.extend(changes)
            record.modifications.append(Call(call.name, values))
    except BaseException:
        undo_to(model, before[0])
        del record.changes[before[1] :], record.modifications[before[2] :]
        raise
    return Report(
        tuple(record.modifications[before[2] :]), tuple(record.changes[before[1] :]), _count(model) - parameters
    )


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
