"""The picture of bytes per version in docs/images: `python -m benchmarks.version_pictures`.

It trains as the case `rollouts` does, and draws the bytes of each version by learning rate, on a logarithmic scale.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from benchmarks.cases.publishing import RATES, publish_training

__all__ = ["main"]

_PICTURE = Path(__file__).parents[1] / "docs/images/bytes-per-version.svg"
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 720, 300, 60, 20, 40
_LEAST = 0.005
_COLORS = ("#1b6ca8", "#2a9d5c", "#c0562b")


def main() -> None:
    """Train, and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        found = {rate: [share for share, _ in publish_training(f"{folder}/{rate}", rate)] for rate in RATES}
    _PICTURE.write_text(_drawn(found))
    print(_PICTURE)


def _drawn(found: dict[float, list[float]]) -> str:
    """Return the picture as SVG."""
    count = max(map(len, found.values()))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for share in (1.0, 0.3, 0.1, 0.03, 0.01):
        y = _y(share)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 110}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{share:.0%}</text>')
    for version in range(1, count + 1, 2):
        parts.append(f'<text x="{_x(version, count)}" y="{_HEIGHT - 22}" text-anchor="middle">{version}</text>')
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 5}">version; bytes written, as a share of the weights</text>')
    for color, (rate, shares) in zip(_COLORS, found.items(), strict=True):
        places = [(_x(number, count), _y(share)) for number, share in enumerate(shares, 1)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places]
        x, y = places[-1]
        parts.append(f'<text x="{x + 8:.1f}" y="{y + 4:.1f}" fill="{color}">rate {rate:.0e}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _x(version: int, count: int) -> float:
    return _LEFT + 10 + (version - 1) * (_WIDTH - 130 - _LEFT) / max(count - 1, 1)


def _y(share: float) -> float:
    place = math.log(max(share, _LEAST) / _LEAST) / math.log(1.2 / _LEAST)
    return round(_HEIGHT - _BOTTOM - place * (_HEIGHT - _TOP - _BOTTOM), 1)


if __name__ == "__main__":
    main()
