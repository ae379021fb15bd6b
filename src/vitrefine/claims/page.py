"""docs/claims.md: every claim with its verdict, every figure with its raw file and the command that makes it again."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from vitrefine.claims.ledger import read_ledgers
from vitrefine.claims.metrics import METRICS
from vitrefine.claims.raw import FOLDER, Raw, read_raws
from vitrefine.claims.schema import Claim, Ledger, Test
from vitrefine.claims.verdict import VERDICTS, Assessment, Verdict, assess_all
from vitrefine.errors import UserError
from vitrefine.files import replace_file
from vitrefine.report import words
from vitrefine.statistics import Estimate, over_seeds

PAGE = "claims.md"

HEAD = """\
# The claims ledger

What three papers print, row by row, and what of it held when it was tried here. This page is made by `vitrefine claims`
out of `docs/claims/*.yaml` (the claims) and `docs/results/*.json` (raw results); no verdict and no figure of ours is
typed by hand.

What is tried here is small: CIFAR-100 in the place of ImageNet, and small models. A verdict is therefore on what a row
says of two models, that one is better than the other, and not on the figures it prints.

- **reproduced**: the 95 % interval of the difference, paired by seed, lies on the claimed side of zero.
- **not reproduced**: it lies on the other side, or the claim is of a size that the interval rules out.
- **inconclusive**: zero is within the interval, or there are too few seeds for one.
- **not run**: nobody has tried, and the reason is said.

A claim that a model is *not lower* than another by more than an amount is reproduced if the whole interval is above
minus that amount, and not reproduced if it is below. Of many intervals of 95 %, one in twenty misses the truth: one
verdict alone is weak evidence. Failed runs and losses stay in. Rows that repeat another are counted once. Figures of
ours link to the raw results that they are from, and to the commands that make them again.
"""


def render(ledgers: Iterable[Ledger], raws: Mapping[Path, Raw]) -> str:
    """The page."""
    ledgers = list(ledgers)
    assessed = {ledger.name: assess_all(ledger, raws) for ledger in ledgers}
    parts = [HEAD, _counts(ledgers, assessed), _tried(ledgers, assessed)]
    parts += [_section(ledger, assessed[ledger.name]) for ledger in ledgers]
    parts.append(_results(raws))
    return "\n".join(parts)


def counts(ledger: Ledger, assessed: Mapping[str, Assessment]) -> dict[Verdict, int]:
    """How many claims have each verdict, repetitions left out."""
    found = Counter(assessed[name].verdict for name, claim in ledger.claims.items() if claim.same_as is None)
    return {verdict: found[verdict] for verdict in VERDICTS}


def render_docs(docs: Path) -> str:
    """The page that belongs to a folder of documentation."""
    return render(read_ledgers(docs), read_raws(docs))


def write_page(docs: Path) -> Path:
    """Make docs/claims.md anew."""
    path = docs / PAGE
    replace_file(path, render_docs(docs).encode())
    return path


def is_current(docs: Path) -> bool:
    """Whether docs/claims.md is what would be made now."""
    try:
        return (docs / PAGE).read_text(encoding="utf-8") == render_docs(docs)
    except FileNotFoundError:
        return False
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{docs / PAGE} cannot be read ({error})") from error


def _counts(ledgers: list[Ledger], assessed: Mapping[str, Mapping[str, Assessment]]) -> str:
    lines = [_row(["", "rows", *VERDICTS, "repeat others"]), "|---|" + "---:|" * (len(VERDICTS) + 2)]
    total: Counter[str] = Counter()
    for ledger in ledgers:
        found = {str(verdict): count for verdict, count in counts(ledger, assessed[ledger.name]).items()}
        found |= {"rows": len(ledger.claims), "repeats": len(ledger.claims) - sum(found.values())}
        total.update(found)
        lines.append(_count_row(f"[{ledger.title}](#{_anchor(ledger.title)})", found))
    return "\n".join([*lines, _count_row("all", total), ""])


def _tried(ledgers: Iterable[Ledger], assessed: Mapping[str, Mapping[str, Assessment]]) -> str:
    """The claims that something can be said of, before the many of which nothing can."""
    rows = [
        _row([ledger.title, _link(ledger, name), claim.claim, _gained(claim, assessed[ledger.name][name])])
        for ledger in ledgers
        for name, claim in ledger.claims.items()
        if claim.same_as is None and assessed[ledger.name][name].verdict != "not run"
    ]
    if not rows:
        return "Nothing has been tried yet.\n"
    return "\n".join(
        ["## What was tried", "", _row(["paper", "row", "claim", "found"]), "|---|---|---|---|", *rows, ""]
    )


def _gained(claim: Claim, found: Assessment) -> str:
    difference = _difference(found.difference, claim.test) if found.difference and claim.test else "–"
    return f"{difference}: {_verdict(found.verdict)}"


def _count_row(name: str, found: Mapping[str, int]) -> str:
    return _row([name, *(str(found[key]) for key in ("rows", *VERDICTS, "repeats"))])


def _section(ledger: Ledger, assessed: Mapping[str, Assessment]) -> str:
    lines = [f"## {ledger.title}", "", ledger.paper, "", *_usual(ledger)]
    table = ""
    for name, claim in ledger.claims.items():
        if claim.place[0] != table:
            table = claim.place[0]
            lines += [f"### {ledger.title}: {table}", "", _row(["row", "claim", "printed", "here", "verdict"])]
            lines.append("|---|---|---|---|---|")
        elif not lines[-1]:
            lines.pop()
        lines += [_claim_row(ledger, name, assessed[name]), ""]
    return "\n".join(lines)


def _usual(ledger: Ledger) -> list[str]:
    """What rows need not say each."""
    told = {"data": "on {}", "recipe": "with recipe {}", "seeds": "{} seeds"}
    parts = [form.format(ledger.usual[key]) for key, form in told.items() if key in ledger.usual]
    return [f"Tried {', '.join(parts)}, unless a row says otherwise.", ""] if parts else []


def _claim_row(ledger: Ledger, name: str, found: Assessment) -> str:
    claim = ledger.claims[name]
    verdict = f"{_verdict(found.verdict)}: {found.reason}"
    if claim.same_as:
        verdict = f"{_verdict(found.verdict)}, as {_link(ledger, claim.same_as)}"
    here = _here(claim.test, found, ledger.usual) if claim.test else ""
    place = f'<a id="{_id(ledger, name)}"></a>{claim.place[1]}'
    return _row([place, claim.claim, _printed(claim), here, verdict])


def _verdict(verdict: Verdict) -> str:
    return verdict if verdict == "not run" else f"**{verdict}**"


def _id(ledger: Ledger, name: str) -> str:
    return f"{ledger.name}-{name}"


def _link(ledger: Ledger, name: str) -> str:
    return f"[{ledger.claims[name].where}](#{_id(ledger, name)})"


def _printed(claim: Claim) -> str:
    return "; ".join(
        f"{unit}: " + ", ".join(f"{who} {'–' if value is None else value}" for who, value in figures.items())
        for unit, figures in claim.printed.items()
    )


def _here(test: Test, found: Assessment, usual: Mapping[str, object]) -> str:
    """What was measured, or what is going to be, a line each."""
    told = [f"on {test.data}"] if test.data != usual.get("data") else []
    told += [f"recipe {test.recipe}"] if test.recipe != usual.get("recipe") else []
    told += [f"{key}={value}" for key, value in test.settings.items()]
    told += [f"from {test.weights}"] if test.weights else []
    where = METRICS[test.metric].words + (f" ({', '.join(told)})" if told else "")
    if found.files is None:
        against = f" against {test.name(test.first)}" if test.first else ""
        less = f", less that of {test.name(test.less.second)} against {test.name(test.less.first)}" if test.less else ""
        seeds = f", {test.seeds} seeds" if test.seeds != usual.get("seeds") else ""
        return f"to be tried: {where} of {test.name(test.second)}{against}{less}; {_expected(test)}{seeds}"
    figures = [_figure(spec, path, (found.figures or {}).get(spec), test) for spec, path in found.files.items()]
    parts = [where, *figures]
    if found.difference is not None:
        parts.append(f"{'difference' if test.first else 'against zero'} {_difference(found.difference, test)}")
    return "<br>".join(parts)


def _expected(test: Test) -> str:
    size = f"{test.by:g} {METRICS[test.metric].difference}".strip() if test.by is not None else ""
    if test.expect == "not_lower":
        return f"expected to be lower by at most {size}"
    return f"expected to be {test.expect}" + (f" by {size}" if size else "")


def _figure(spec: str, path: Path, value: Estimate | None, test: Test) -> str:
    metric = METRICS[test.metric]
    shown = f"{words.number(value.value, metric.decimals)} {metric.unit}".rstrip() if value else "no result"
    return f"{test.name(spec)} [{shown}](#{_anchor(path.name)})"


def _difference(value: Estimate, test: Test) -> str:
    metric = METRICS[test.metric]
    digits = words.enough(value, metric.decimals)
    text = f"{words.number(value.value, digits, signed=True)} {metric.difference}".strip()
    between = words.interval(value, digits, signed=True)
    between = f", 95{words.PER_CENT} interval {between}" if between else ""
    return f"{text} ({words.plural(value.count, 'seed')}{between})"


def _results(raws: Mapping[Path, Raw]) -> str:
    lines = ["## Raw results", ""]
    if not raws:
        return "\n".join([*lines, "There are none yet: `vitrefine claims --add RUN…` puts runs here.", ""])
    lines += ["In the commands, PATH stands for the place of your copy of the data.", ""]
    for path, raw in raws.items():
        lines += [f'<a id="{_anchor(path.name)}"></a>[{path.name}]({FOLDER}/{path.name}): {"; ".join(_facts(raw))}', ""]
        lines += ["```sh", raw.rerun, "```", ""]
    return "\n".join(lines)


def _facts(raw: Raw) -> Iterator[str]:
    yield f"`{raw.base_spec}` on {raw.data}, recipe {raw.recipe}" + (f", from {raw.weights}" if raw.weights else "")
    accuracies = raw.values("accuracy")
    if accuracies:
        mean = over_seeds(list(accuracies.values()))
        half = f" {words.half_width(mean, 2)}" if mean.low is not None else ""
        each = ", ".join(f"{seed}: {words.number(value, 2)}" for seed, value in accuracies.items())
        yield f"{words.number(mean.value, 2)}{half} % top-1 (by seed {each})"
    for run in raw.unfinished:
        yield f"seed {run.seed} {run.status}" + (f": {run.error}" if run.error else "")
    seconds = [run.seconds for run in raw.runs if run.seconds is not None]
    if seconds:
        most = max(run.at_once for run in raw.runs)
        shared = f", up to {most} at once," if most > 1 else ""
        where = _several(run.hardware for run in raw.runs)
        yield f"{words.duration(sum(seconds) / len(seconds))} a run{shared} on {where}"
    versions = _several(f"{name} {version}" for run in raw.runs for name, version in run.versions.items())
    if versions:
        yield versions


def _several(texts: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(text for text in texts if text))


def _anchor(text: str) -> str:
    """As Markdown makes it of a heading."""
    return re.sub(r"[^a-z0-9_-]+", "-", text.lower()).strip("-")


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
