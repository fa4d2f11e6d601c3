"""Charts as SVG, by hand: text, lines and bars. The same figures give the same file, byte for byte.

A bar starts at zero, so its scale is linear. Where values differ by more than a bar can show, the scale is logarithmic
and the median is a dot, since a bar's length would mean nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

LABEL_WIDTH, PLOT_WIDTH, VALUE_WIDTH = 290, 430, 150
ROW_HEIGHT, GROUP_HEIGHT, TOP, BOTTOM = 24, 30, 46, 44
WIDTH = LABEL_WIDTH + PLOT_WIDTH + VALUE_WIDTH
INK, GREY, GRID, OTHER, OURS, GOAL = "#1f2328", "#57606a", "#d8dee4", "#8c959f", "#0969da", "#cf222e"
#: Largest over smallest median from which a chart is logarithmic.
LOGARITHMIC_FROM = 12.0


@dataclass(frozen=True)
class Bar:
    """One row: all runs, of which median, lowest and highest are drawn; or a text where there are none."""

    label: str
    runs: Sequence[float] = ()
    #: In the accent colour.
    ours: bool = False
    #: What stands there instead: why it was not run.
    text: str = ""


@dataclass(frozen=True)
class Group:
    """Rows under a heading of their own; an empty heading takes no room."""

    heading: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Chart:
    """A title, an axis and groups of rows."""

    title: str
    axis: str
    groups: Sequence[Group]
    #: A line across all rows, with what it says; None: no line.
    mark: tuple[float, str] | None = None


@dataclass(frozen=True)
class Scale:
    """From values to pixels."""

    low: float
    high: float
    logarithmic: bool

    def x(self, value: float) -> float:
        """Pixels from the left edge of the picture; values beyond the scale end at its edges."""
        if self.logarithmic:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = value / self.high
        return LABEL_WIDTH + PLOT_WIDTH * min(1.0, max(0.0, share))

    def ticks(self) -> list[float]:
        """Where lines are drawn."""
        if self.logarithmic:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
            return [tick for tick in found if self.low <= tick <= self.high]
        step = _round_step(self.high / 5)
        return [step * i for i in range(int(self.high / step + 1e-9) + 1)]


def scale_of(values: Sequence[float], medians: Sequence[float]) -> Scale:
    """Room for all values; logarithmic where the medians ask for it. Zeros are drawn at the edge."""
    positive = [value for value in values if value > 0]
    if not positive:
        return Scale(0.0, 1.0, logarithmic=False)
    high = max(positive)
    above_zero = [median for median in medians if median > 0]
    if len(above_zero) == len(medians) and max(medians) / min(medians) >= LOGARITHMIC_FROM:
        return Scale(_down(min(positive)), _up(high), logarithmic=True)
    return Scale(0.0, high * 1.02, logarithmic=False)


def draw(chart: Chart) -> str:
    """The picture."""
    values = [run for group in chart.groups for bar in group.bars for run in bar.runs]
    medians = [statistics.median(bar.runs) for group in chart.groups for bar in group.bars if bar.runs]
    mark_values = [chart.mark[0]] if chart.mark else []
    scale = scale_of([*values, *mark_values], medians)
    bottom = TOP + sum(
        len(group.bars) * ROW_HEIGHT + (GROUP_HEIGHT if group.heading else 0) for group in chart.groups
    )
    height = bottom + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="12" role="img" aria-label="{_quoted(chart.title)}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(12, 24, chart.title, size=15, weight="600"),
        *_axis(scale, chart.axis, bottom),
    ]
    if chart.mark:
        parts += _mark(scale.x(chart.mark[0]), chart.mark[1], bottom)
    y = TOP
    for group in chart.groups:
        if group.heading:
            parts.append(_text(12, y + 20, group.heading, weight="600"))
            y += GROUP_HEIGHT
        for bar in group.bars:
            parts += _row(bar, scale, y)
            y += ROW_HEIGHT
    return "\n".join([*parts, "</svg>", ""])


def _axis(scale: Scale, name: str, bottom: float) -> Iterator[str]:
    for tick in scale.ticks():
        x = scale.x(tick)
        yield f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}" stroke="{GRID}"/>'
        yield _text(x, bottom + 15, f"{tick:g}", fill=GREY, anchor="middle")
    kind = "; logarithmic" if scale.logarithmic else ""
    yield _text(LABEL_WIDTH, bottom + 33, f"{name}: median, lowest to highest{kind}", fill=GREY)


def _mark(x: float, name: str, bottom: float) -> Iterator[str]:
    yield f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom}" stroke="{GOAL}" stroke-dasharray="4 3"/>'
    yield _text(x + 4, TOP - 8, name, fill=GOAL, size=11)


def _row(bar: Bar, scale: Scale, y: float) -> Iterator[str]:
    middle = y + ROW_HEIGHT / 2
    yield _text(LABEL_WIDTH - 8, middle + 4, bar.label, anchor="end")
    if not bar.runs:
        yield _text(LABEL_WIDTH + 6, middle + 4, bar.text, fill=GREY, style="italic")
        return
    colour = OURS if bar.ours else OTHER
    median = statistics.median(bar.runs)
    left, x, right = (scale.x(value) for value in (min(bar.runs), median, max(bar.runs)))
    if not scale.logarithmic:
        width = x - LABEL_WIDTH
        yield f'<rect x="{LABEL_WIDTH}" y="{y + 5}" width="{width:.1f}" height="14" fill="{colour}"/>'
    yield f'<line x1="{left:.1f}" y1="{middle}" x2="{right:.1f}" y2="{middle}" stroke="{INK}" stroke-width="1.5"/>'
    for end in (left, right):
        yield f'<line x1="{end:.1f}" y1="{middle - 4}" x2="{end:.1f}" y2="{middle + 4}" stroke="{INK}"/>'
    if scale.logarithmic:
        yield f'<circle cx="{x:.1f}" cy="{middle}" r="5" fill="{colour}"/>'
    said = f"{_number(median)} ({_number(min(bar.runs))} to {_number(max(bar.runs))})"
    yield _text(LABEL_WIDTH + PLOT_WIDTH + 8, middle + 4, said, fill=GREY)


def _text(
    x: float, y: float, text: str, *, size: int = 12, fill: str = INK, anchor: str = "start",
    weight: str = "400", style: str = "normal",
) -> str:  # fmt: skip
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" font-style="{style}" fill="{fill}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _quoted(text: str) -> str:
    return escape(text, {'"': "&quot;"})


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * 0.999)


def _down(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return max(digit * power for digit in (1, 2, 5) if digit * power <= value * 1.001)


def _up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return min(digit * power for digit in (1, 2, 5, 10) if digit * power >= value * 0.999)
