"""The lineage as a drawn graph: boxes in layers from documents to verdict, arrows downwards, inline SVG.

    svg = draw(nodes, edges)        # nodes {name: Node}, edges [(from, to)]

Plain text and CSS variables, so the drawing follows light, dark and paper like the plots. The surprising thing: an
arrow that follows from others is left out, and a long arrow runs through empty places of the layers between.
"""

import itertools
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, BOX, GAP, HEIGHT, STEP, LANE = 560, 168, 16, 46, 82, 26
TONES = {"good": "var(--good)", "bad": "var(--bad)", "open": "var(--open)", "": "var(--line)"}


class Node(NamedTuple):
    """One box: what it is, a line below it, the colour class of its border ('' for none); absent ones are dashed."""

    title: str
    note: str
    tone: str = ""
    absent: bool = False


Edges = Sequence[tuple[str, str]]


def reduced(edges: Edges) -> list[tuple[str, str]]:
    """`edges` of an acyclic graph without those that follow from longer paths."""
    after: dict[str, set[str]] = {}
    for a, b in edges:
        after.setdefault(a, set()).add(b)

    def reach(a: str) -> set[str]:
        found: set[str] = set()
        for b in after.get(a, ()):
            found |= {b} | reach(b)
        return found

    return [(a, b) for a, b in dict.fromkeys(edges) if not any(b in reach(c) for c in after[a] - {b})]


def layers(names: Sequence[str], edges: Edges) -> dict[str, int]:
    """Layer of each node: one below its lowest source; a node without a source stands right above its first user."""
    depth = dict.fromkeys(names, 0)
    for _ in names:
        for a, b in edges:
            depth[b] = max(depth[b], depth[a] + 1)
    sources = {b for _, b in edges}
    for name in names:
        users = [depth[b] for a, b in edges if a == name]
        if name not in sources and users and depth[name] == 0 and min(users) > 1:
            depth[name] = min(users) - 1
    return depth


def draw(nodes: dict[str, Node], edges: Edges, label: str) -> str:
    """The graph as one `<svg>`."""
    edges = reduced([(a, b) for a, b in edges if a in nodes and b in nodes])
    depth = layers(list(nodes), edges)
    rows: list[list[str]] = [[] for _ in range(max(depth.values(), default=0) + 1)]
    for name in nodes:
        rows[depth[name]].append(name)
    hops: list[tuple[str, str]] = []
    paths: list[list[str]] = []
    for a, b in edges:
        lanes = [f"{a}>{b}@{k}" for k in range(depth[a] + 1, depth[b])]
        for lane in lanes:
            rows[int(lane.rpartition("@")[2])].append(lane)
        paths.append([a, *lanes, b])
        hops += itertools.pairwise(paths[-1])
    place = arrange(rows, hops, set(nodes))
    arrows = "".join(arrow(path, place, depth) for path in paths)
    boxes = "".join(box(node, place[name], depth[name] * STEP) for name, node in nodes.items())
    height = (len(rows) - 1) * STEP + HEIGHT + 4
    sizes = {name: BOX if name in nodes else LANE for name in place}
    left = min((place[n] - sizes[n] / 2 for n in place), default=0.0) - 4
    right = max((place[n] + sizes[n] / 2 for n in place), default=WIDTH) + 4
    right = max(right, left + 400)
    marker = (
        '<defs><marker id="lineage-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0.5L8 4L0 7.5z" style="fill:var(--bound)"/></marker></defs>'
    )
    return (
        f'<svg class="graph" viewBox="{left:.0f} 0 {right - left:.0f} {height}" role="img" aria-label="{escape(label, quote=True)}" '
        f'xmlns="http://www.w3.org/2000/svg" style="font-family: inherit;max-width:{1.35 * (right - left):.0f}px">{marker}{arrows}{boxes}</svg>'
    )


def arrange(rows: list[list[str]], hops: Edges, boxes: set[str]) -> dict[str, float]:
    """Centre of every box and lane. Each row is sorted by the mean place of its neighbours, a few times over."""
    place: dict[str, float] = {}

    def spread(row: list[str]) -> None:
        sizes = [BOX if name in boxes else LANE for name in row]
        at = (WIDTH - sum(sizes) - GAP * (len(row) - 1)) / 2
        for name, size in zip(row, sizes):
            place[name] = at + size / 2
            at += size + GAP

    for row in rows:
        spread(row)
    near: dict[str, list[str]] = {}
    for a, b in hops:
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
    for sweep in range(8):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted = {
                n: sum(place[m] for m in near[n]) / len(near[n]) if n in near else place[n] for n in row
            }
            row.sort(key=lambda n: wanted[n])
            spread(row)
    return place


def arrow(path: list[str], place: dict[str, float], depth: dict[str, int]) -> str:
    """A smooth line from the foot of the first box through its lanes to the head of the last."""
    first = depth[path[0]]
    points = [(place[path[0]], first * STEP + HEIGHT + 2.0)]
    for k, lane in enumerate(path[1:-1], 1):
        points += [(place[lane], (first + k) * STEP + 2.0), (place[lane], (first + k) * STEP + HEIGHT + 2.0)]
    points.append((place[path[-1]], depth[path[-1]] * STEP + 1.0))
    d = f"M{points[0][0]:.0f} {points[0][1]:.0f}"
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        middle = (y0 + y1) / 2
        d += f"C{x0:.0f} {middle:.0f} {x1:.0f} {middle:.0f} {x1:.0f} {y1:.0f}"
    return f'<path d="{d}" style="fill:none;stroke:var(--bound);stroke-width:1.4" marker-end="url(#lineage-tip)"/>'


def box(node: Node, x: float, y: float) -> str:
    """A rounded box with its two lines."""
    dash = ";stroke-dasharray:4 3" if node.absent else ""
    weight = 2 if node.tone else 1.2
    return (
        f'<rect x="{x - BOX / 2:.0f}" y="{y + 2:.0f}" width="{BOX}" height="{HEIGHT}" rx="6" '
        f'style="fill:var(--card);stroke:{TONES[node.tone]};stroke-width:{weight}{dash}"/>'
        f'<text x="{x:.0f}" y="{y + 21:.0f}" text-anchor="middle" style="font-size: 14px;font-weight:600;fill:currentColor">'
        f"{escape(node.title)}</text>"
        f'<text x="{x:.0f}" y="{y + 38:.0f}" text-anchor="middle" style="font-size: 12px;fill:var(--soft)">{escape(node.note)}</text>'
    )
