"""Progress: a bar for each part on a terminal, a line for each in a log."""

import io

from rich.console import Console

from vitrefine.cli.evaluation_view import EvaluationView


def test_in_a_log():
    out = io.StringIO()
    with EvaluationView(Console(file=out)) as view:
        for done in (0, 50, 100):
            view("images as they are", done, 100)
        view("FGSM", 40, 1000)
    assert out.getvalue() == "images as they are: 100\nFGSM: 1,000 (from image 40 on)\n"


def test_on_a_terminal():
    out = io.StringIO()
    with EvaluationView(Console(file=out, force_terminal=True, width=100)) as view:
        view("[bold]", 0, 10)
        view("[bold]", 10, 10)
    assert "[bold]" in out.getvalue()
    assert "10/10" in out.getvalue()
