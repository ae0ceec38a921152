"""One page that shows where two runs part: both loss curves, and a map of every tensor's difference at every step."""

import html
import json
import math
from pathlib import Path

import numpy as np

import blame
from video import write_png

PAGE = """<!doctype html><meta charset="utf-8"><title>picowan: two runs</title>
<style>body{font:14px sans-serif;margin:24px;color:#222}pre{background:#f4f4f4;padding:12px;white-space:pre-wrap}
.map{display:flex}#names{width:190px;position:relative}#names div{position:absolute;right:8px}#tip{height:1.3em}</style>
<h1>Two runs</h1><pre>%(verdict)s</pre>
<h2>Loss</h2>%(curves)s
<h2>Differences</h2><p>Rows are tensors in causal order, columns steps. Grey: within the noise. From yellow (1e-8) to
dark red (1 and more): the relative difference, where it is more than noise.</p>
<div id="tip">&nbsp;</div><div class="map"><div id="names"></div><canvas id="c"></canvas></div>
<script>
const d = %(data)s;
const w = Math.max(4, Math.min(60, 900 / d.steps.length)), h = Math.max(2, Math.min(9, 1600 / d.names.length));
const c = document.getElementById("c"), g = c.getContext("2d"), names = document.getElementById("names");
c.width = w * d.steps.length; c.height = h * d.names.length; names.style.height = c.height + "px";
for (const [i, s, v] of d.cells) {
  g.fillStyle = v === null ? "#dde3ea" : `hsl(${55 - 55 * v}, 95%%, ${60 - 25 * v}%%)`;
  g.fillRect(s * w, i * h, w - (w > 8), h - (h > 4));
}
let last = "";
d.names.forEach((n, i) => { const p = n.split(": ")[0]; if (p === last) return; last = p;
  const e = document.createElement("div"); e.textContent = p; e.style.top = i * h - 6 + "px"; names.append(e); });
c.onmousemove = e => { const i = Math.floor(e.offsetY / h), s = Math.floor(e.offsetX / w);
  const error = d.errors[i + "," + s] ?? "not in both";
  document.getElementById("tip").textContent = `step ${d.steps[s]}, ${d.names[i]}: ${error}`; };
</script>
"""


def write_page(path: Path, verdict, folder_a, folder_b):
    """Write the page of a verdict made with everything=True; as a picture without words where the path ends in .png."""
    losses = {side: losses_of(blame.load(folder)) for side, folder in (("A", folder_a), ("B", folder_b))}
    steps = sorted({row.step for row in verdict.rows})
    names = list(dict.fromkeys(f"{row.phase}: {row.name}" for row in sorted(verdict.rows, key=order)))
    index = {name: i for i, name in enumerate(names)}
    if path.suffix == ".png":
        places = [(index[f"{row.phase}: {row.name}"], steps.index(row.step), row) for row in verdict.rows]
        write_png(path, picture(losses, places, len(names), len(steps)))
        return
    cells, errors = [], {}
    for row in verdict.rows:
        i, s = index[f"{row.phase}: {row.name}"], steps.index(row.step)
        cells.append([i, s, None if heat(row) is None else round(heat(row), 3)])
        errors[f"{i},{s}"] = f"{row.error:.2e}, noise {row.allowed:.1e}"
    data = {"steps": steps, "names": names, "cells": cells, "errors": errors}
    text = PAGE % {
        "verdict": html.escape(str(verdict)),
        "curves": curves(losses),
        "data": json.dumps(data).replace("</", "<\\/"),
    }
    path.write_text(text)


def heat(row) -> float | None:
    """0 at a difference of 1e-8, 1 at 1 and more; None within the noise."""
    return 1 + math.log10(min(1.0, max(row.error, 1e-8))) / 8 if row.differs else None


def picture(losses, places, rows: int, columns: int, width: int = 800) -> np.ndarray:
    """(H, width, 3) bytes: the curves (A blue, B red) over the map."""
    curve, cell, line = 160, width // columns, max(1, min(4, 1200 // rows))
    pixels = np.full((curve + 20 + rows * line, width, 3), 255, np.uint8)
    values = [v for one in losses.values() for v in one.values() if math.isfinite(v)] or [0.0]
    low, high = min(values), max(values)
    for (_, one), colour in zip(losses.items(), ((23, 105, 170), (198, 40, 40)), strict=True):
        points = sorted((s, v) for s, v in one.items() if math.isfinite(v))
        x = np.arange(width)
        at = np.linspace(cell / 2, width - cell / 2, max(2, len(points)))[: len(points)]
        y = np.interp(x, at, [curve - 5 - (curve - 10) * (v - low) / max(high - low, 1e-30) for _, v in points])
        for thick in (-1, 0, 1):
            pixels[np.clip(y.astype(int) + thick, 0, curve), x] = colour
    for i, s, row in places:
        v = heat(row)
        colour = (221, 227, 234) if v is None else (250 - 80 * v, 225 * (1 - v) ** 1.5, 40 * (1 - v))
        pixels[curve + 20 + i * line : curve + 20 + (i + 1) * line, s * cell : (s + 1) * cell - 1] = colour
    return pixels


def order(row) -> int:
    return blame.PHASES.index(row.phase)


def losses_of(trace) -> dict[int, float]:
    """step -> loss: a loss is not negative, so its size is its value."""
    losses = {}
    for number in trace.numbers:
        entries = trace.step(number)["entries"]
        for name in ("loss", "reported loss"):
            if ("loss", name) in entries:
                losses[number] = entries["loss", name]["sketch"].norm().item()
    return losses


def curves(losses: dict[str, dict[int, float]], width: int = 900, height: int = 220) -> str:
    """Both curves as an SVG; B is dashed, so that equal curves show as one."""
    steps = [s for one in losses.values() for s in one] or [0]
    values = [v for one in losses.values() for v in one.values() if math.isfinite(v)] or [0.0]
    low, high, first, last = min(values), max(values), min(steps), max(steps)
    lines = []
    for side, style in (("A", 'stroke="#1769aa"'), ("B", 'stroke="#c62828" stroke-dasharray="6 4"')):
        points = [
            f"{50 + (width - 70) * (s - first) / max(1, last - first):.1f},"
            f"{height - 20 - (height - 40) * (v - low) / max(1e-30, high - low):.1f}"
            for s, v in losses[side].items()
            if math.isfinite(v)
        ]
        lines.append(f'<polyline fill="none" stroke-width="2" {style} points="{" ".join(points)}"/>')
    texts = [
        f'<text x="4" y="24">{high:.4g}</text><text x="4" y="{height - 18}">{low:.4g}</text>',
        f'<text x="50" y="{height - 2}">step {first}</text><text x="{width - 80}" y="{height - 2}">step {last}</text>',
        f'<text x="{width - 120}" y="16" fill="#1769aa">A</text><text x="{width - 90}" y="16" fill="#c62828">B</text>',
    ]
    return f'<svg width="{width}" height="{height}" font-size="12">{"".join(lines + texts)}</svg>'
