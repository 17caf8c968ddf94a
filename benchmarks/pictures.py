"""The picture of all speeds of a device: a line for each workload, a dot for each of its records, as an SVG text.

The axis is logarithmic around 1, where jtile and its best peer are equally fast. Colours are of a middle brightness, so
that the picture can be read on a white and on a black page.
"""

from __future__ import annotations

import math

GREY, GOOD, BAD = "#7d8590", "#2e9f6b", "#d1495b"
LEFT, WIDTH, RIGHT, ROW, TOP = 240, 430, 170, 20, 46  # pixels; on the right stand the names of the peers
TICKS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


def speeds(records: list[dict], device: str) -> str:
    """SVG text.

    Args:
      records: as JSON has them, of one device; those without a peer are left out.
      device: the name of the device, for the title.
    """
    families: dict[str, list[float]] = {}
    peers: dict[str, set[str]] = {}  # the best one of each record
    for r in records:
        if r["ratio"] is not None and not r["workload"].endswith("_memory"):
            families.setdefault(r["workload"], []).append(r["ratio"])
            peers.setdefault(r["workload"], set()).add(min(r["peers"], key=r["peers"].__getitem__))
    height = TOP + ROW * len(families) + 44
    title = f"How many times as fast as its best peer jtile is, on {device}"
    parts = [_text(10, 20, title, size=14, bold=True), _text(LEFT + WIDTH + 14, 36, "best peers", size=11, bold=True)]
    bottom = TOP + ROW * len(families)
    for tick in TICKS:
        x = _x(tick)
        parts.append(
            f'<line x1="{x}" y1="{TOP - 8}" x2="{x}" y2="{bottom}" stroke="{GREY}" '
            f'stroke-width="{1.6 if tick == 1 else 0.5}" stroke-opacity="{1 if tick == 1 else 0.5}"/>'
        )
        parts.append(_text(x, bottom + 16, f"{tick:g}", anchor="middle"))
    parts.append(_text(_x(1) - 8, bottom + 34, "← the peer is faster", BAD, anchor="end"))
    parts.append(_text(_x(1) + 8, bottom + 34, "jtile is faster →", GOOD))
    for k, (family, ratios) in enumerate(families.items()):
        y = TOP + ROW * k + 6
        parts.append(_text(LEFT - 12, y + 4, family.replace("_", " "), anchor="end"))
        against = sorted({name.split(",")[0].split(" ")[0] for name in peers[family]})
        parts.append(_text(LEFT + WIDTH + 14, y + 4, ", ".join(against), size=11))
        for ratio in ratios:
            colour = GOOD if ratio >= 0.97 else BAD
            parts.append(f'<circle cx="{_x(ratio)}" cy="{y}" r="4.5" fill="{colour}" fill-opacity="0.6"/>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} {height}" '
        f'width="{LEFT + WIDTH + RIGHT}" height="{height}" role="img" aria-label="{title}">\n<title>{title}</title>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def _x(ratio: float) -> float:
    """The place of a ratio on the axis; a ratio beyond an end stands at that end."""
    low, high = math.log(TICKS[0]), math.log(TICKS[-1])
    share = (min(max(math.log(ratio), low), high) - low) / (high - low)
    return round(LEFT + share * WIDTH, 1)


def _text(x: float, y: float, words: str, colour: str = GREY, size: int = 12, anchor: str = "start", bold=False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" text-anchor="{anchor}"{weight} '
        f'font-family="system-ui, Helvetica, Arial, sans-serif">{words}</text>'
    )
