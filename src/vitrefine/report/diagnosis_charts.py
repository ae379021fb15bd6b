"""Charts of a diagnosis: a quantity by layer, models in their colours; and matrices of similarity."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from vitrefine.diagnose.diagnosis import Diagnosis
from vitrefine.diagnose.profile import Profile
from vitrefine.report import svg, words
from vitrefine.report.charts import THIRD, WIDE, Chart, ceiling, finished

# What each chart says, and the words at its side.
ABOUT = {
    "entropy": ("Entropy of attention", "% of uniform"),
    "class_entropy": ("Entropy of the class token", "% of uniform"),
    "distance": ("How far attention reaches", "share of the sides"),
    "gradient": ("Gradient of the softmax", "% of its most"),
    "head_similarity": ("Similarity of heads", "cosine"),
    "token_similarity": ("Similarity of tokens", "cosine"),
    "evolution": ("Feature evolution F", "F"),
    "broadcast_ratio": ("Evenness of CB_S scales", "|λ| 10th / 90th percentile"),
    "broadcast_mean": ("CB_S scales", "λ"),
    "offset": ("Offsets of token merging", "tokens"),
}
WIDE_ONES = ("entropy",)
# What layers are else.
ACROSS = {
    "token_similarity": "block, 0 its input",
    "evolution": "block",
    "broadcast_ratio": "CB_S, in order",
    "broadcast_mean": "CB_S, in order",
    "offset": "merging",
}


def charts(diagnoses: Sequence[Diagnosis], names: Sequence[str], keys: Sequence[str]) -> list[tuple[bool, Chart]]:
    """The charts of these quantities, where a model has them; and whether each wants the whole width."""
    found = []
    for key in keys:
        profiles = {place: each.profiles[key] for place, each in enumerate(diagnoses) if key in each.profiles}
        after = {
            place: each.profiles[f"refined_{key}"]
            for place, each in enumerate(diagnoses)
            if f"refined_{key}" in each.profiles
        }
        if any(math.isfinite(value) for profile in profiles.values() for value in profile.means):
            wide = key in WIDE_ONES
            found.append((wide, _chart(key, profiles, after, names, wide)))
    return found


def merging_charts(diagnoses: Sequence[Diagnosis], names: Sequence[str]) -> list[tuple[bool, Chart]]:
    """Of what CB_S and deformable merging have learned."""
    return charts(diagnoses, names, ("broadcast_ratio", "broadcast_mean", "offset"))


def _chart(
    key: str, profiles: Mapping[int, Profile], after: Mapping[int, Profile], names: Sequence[str], wide: bool
) -> Chart:
    name = f"chart-{key}"
    title, unit = ABOUT[key]
    shares = all(profile.shares for profile in profiles.values())
    first = 0 if key == "token_similarity" else 1  # the input of the first block is measured too
    with svg.drawing(name, WIDE if wide else THIRD, 320 if wide else 250) as figure:
        plot = svg.axes(figure, left=66, bottom=46, right=14, top=26 if shares else 12)
        for place, profile in profiles.items():
            # Where two models are alike both lines are to be seen.
            wider = 1.8 if len(profiles) > 1 and place == 0 else 0.0
            _draw(plot, place, profile, shares, first, bands=len(profiles) == 1, wider=wider)
        for place, profile in after.items():
            _draw_after(plot, place, profile)
        if not shares:
            _keep_flat(plot)
        else:
            _mark_bound(plot, "uniform attention" if wide else "uniform")
        ends = [number + first - 1 for profile in profiles.values() for number in profile.numbers]
        plot.set_xlim(first - 0.5, max(ends) + 0.5)
        plot.xaxis.set_major_locator(MaxNLocator(12 if wide else 6, integer=True, min_n_ticks=1))
        plot.grid(visible=False, axis="x")
        plot.set_xlabel(ACROSS.get(key, "layer"))
        plot.set_ylabel(unit)
        told = "; ".join(f"{names[place]}: {_told(profile, shares)}" for place, profile in profiles.items())
        return finished(figure, name, title, f"Means by layer. {told}.")


def _told(profile: Profile, shares: bool) -> str:
    values = profile.shares if shares else None
    return ", ".join(f"{100 * v:.0f}{words.PER_CENT}" if values else f"{v:.2f}" for v in values or profile.means)


def _draw(plot: Axes, place: int, profile: Profile, shares: bool, first: int, bands: bool, wider: float) -> None:
    colour = svg.series_colour(place + 1)
    factors = [100 / layer.bound if shares and layer.bound else 1.0 for layer in profile.layers]
    numbers = [number + first - 1 for number in profile.numbers]
    means = [layer.whole.mean * factor for layer, factor in zip(profile.layers, factors, strict=True)]
    if bands:
        low, high = (
            [getattr(layer.whole, end) * factor for layer, factor in zip(profile.layers, factors, strict=True)]
            for end in ("low", "high")
        )
        plot.fill_between(numbers, low, high, color=colour, alpha=0.14, linewidth=0)
    dots = [
        (number, head.mean * factor)
        for number, layer, factor in zip(numbers, profile.layers, factors, strict=True)
        for head in layer.heads
        if len(layer.heads) > 1
    ]
    if dots:
        across, up = zip(*dots, strict=True)
        plot.scatter(across, up, s=16, color=colour, alpha=0.5, linewidth=0)
    plot.plot(numbers, means, color=colour, linewidth=1.8 + wider, marker="o", markersize=4.5 + wider)


def _draw_after(plot: Axes, place: int, profile: Profile) -> None:
    """What refinement made of it, at the layers that it refines."""
    colour = svg.series_colour(place + 1)
    plot.plot(
        profile.numbers, profile.means, color=colour, linewidth=1.6, linestyle=(0, (4, 2)), marker="D", markersize=4
    )


def _keep_flat(plot: Axes) -> None:
    """Show a hundredth of the values at least: what is the same in all layers is not to look as if it rose."""
    low, high = plot.get_ylim()
    least = 0.01 * max(abs(low), abs(high))
    if high - low < least:
        plot.set_ylim((low + high - least) / 2, (low + high + least) / 2)


def _mark_bound(plot: Axes, text: str) -> None:
    low, _ = plot.get_ylim()
    bottom = max(0.0, min(low, 90))
    top = 100 + 0.02 * (100 - bottom)
    plot.set_ylim(bottom, top)
    plot.set_yticks([tick for tick in plot.get_yticks() if tick <= 100])
    plot.set_ylim(bottom, top)
    ceiling(plot, text)


def matrices(diagnoses: Sequence[Diagnosis], names: Sequence[str]) -> list[Chart]:
    """CKA of every pair of blocks, a matrix for each model."""
    found = []
    for place, diagnosis in enumerate(diagnoses):
        if diagnosis.similarity is None:
            continue
        values = diagnosis.similarity.values.clamp(0, 1).numpy()
        name, count = f"matrix-{place}", len(values)
        with svg.drawing(name, THIRD, 300) as figure:
            plot = svg.axes(figure, left=44, bottom=46, right=59, top=12)
            plot.grid(visible=False)
            scale = svg.axes(figure, left=THIRD - 48, bottom=46, right=36, top=12)
            scale.grid(visible=False)
            mesh = plot.pcolormesh(values, vmin=0, vmax=1, cmap="magma")
            bar = figure.colorbar(mesh, cax=scale, ticks=[0, 0.5, 1])
            bar.outline.set_visible(False)
            scale.tick_params(length=0, labelcolor=svg.colour("muted"))
            ticks = [0, (count - 1) // 2, count - 1]
            for axis in (plot.xaxis, plot.yaxis):
                axis.set_ticks([tick + 0.5 for tick in ticks], [str(tick) for tick in ticks])
            plot.set_xlabel("block, 0 its input")
            plot.set_ylabel("block")
            ends = f"the input and the output of the blocks have a CKA of {values[0, -1]:.2f}"
            found.append(finished(figure, name, f"{names[place]}: similarity of blocks (CKA)", f"In it, {ends}."))
    return found
