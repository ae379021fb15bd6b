"""A spec's figures as text, the same for the page and for the terminal."""

from vitrefine.report import words
from vitrefine.report.findings import Row

NOTHING = ("–", "")


def cells(row: Row, compared: bool) -> list[tuple[str, str]]:
    """Accuracy, difference, parameters, MACs, images/s and memory: each figure, and what stands below it.

    Args:
        row: The spec's.
        compared: Whether there is a column for the difference.
    """
    accuracy, difference = row.accuracy, row.difference
    shown = [NOTHING]
    if accuracy:
        shown = [(words.number(accuracy.value, row.decimals), words.half_width(accuracy, row.decimals))]
    if compared and difference:
        digits = words.enough(difference, row.decimals)
        shown.append((words.number(difference.value, digits, True), words.interval(difference, digits, True)))
    elif compared:
        shown.append(NOTHING)
    counted = ((row.params, words.count), (row.macs, words.count))
    for figure, form in (*counted, (row.images_per_s, words.rate), (row.memory, words.mebibytes)):
        ratio = words.percent(figure.ratio) if figure and figure.ratio is not None else ""
        shown.append((form(figure.value), ratio) if figure else NOTHING)
    return shown
