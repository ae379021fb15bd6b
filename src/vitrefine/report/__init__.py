"""One self-contained HTML page out of runs."""
