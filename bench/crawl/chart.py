"""The bar chart of one site as SVG: no fonts, no scripts, colours that follow the reader's theme."""

from __future__ import annotations

from html import escape

from crawl.table import Row

WIDTH, LEFT, RIGHT, TOP, STEP, BAR = 860, 300, 200, 58, 34, 20

STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2937 }
.title { font-size: 15px; font-weight: 600 }
.soft { fill: #57606a; font-size: 12px }
.peer { fill: #8b98a9 }
.bare { fill: none; stroke: #8b98a9; stroke-width: 1.5; stroke-dasharray: 4 3 }
.shoal { fill: #0b7a8f }
.axis, .spread { stroke: #57606a; stroke-width: 1 }
.polite { stroke: #b45309; stroke-width: 1.5; stroke-dasharray: 5 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .soft { fill: #9da7b3 }
  .peer { fill: #6e7b8b }
  .bare { stroke: #9da7b3 }
  .shoal { fill: #2fb8cf }
  .axis, .spread { stroke: #9da7b3 }
}"""


def svg(rows: list[Row], title: str, subtitle: str, polite: float | None = None) -> str:
    """A bar for the pages per second of each row. The thin line is the spread of the rounds.

    `polite` is the rate that a delay allows, drawn as a line through all bars.
    """
    height = TOP + STEP * len(rows) + 14
    scale = (WIDTH - LEFT - RIGHT) / max([row.highest for row in rows] + [polite or 1])
    spoken = "; ".join(f"{row.label}: {row.rate:,.0f}" for row in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-labelledby="title desc">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="desc">{escape(spoken)}</desc>',
        f"<style>\n{STYLE}\n</style>",
        f'<text class="title" x="12" y="22">{escape(title)}</text>',
        f'<text class="soft" x="12" y="41">{escape(subtitle)}</text>',
    ]
    for index, row in enumerate(rows):
        parts += bar(row, TOP + STEP * index, scale)
    parts.append(f'<line class="axis" x1="{LEFT}" y1="{TOP - 4}" x2="{LEFT}" y2="{height - 12}"/>')
    if polite:
        at = LEFT + polite * scale
        parts.append(f'<line class="polite" x1="{at:.1f}" y1="{TOP - 4}" x2="{at:.1f}" y2="{height - 12}"/>')
    parts.append("</svg>\n")
    return "\n".join(parts)


def bar(row: Row, top: int, scale: float) -> list[str]:
    middle = top + BAR // 2
    width = max(row.rate * scale, 1)
    kind = row.key.partition("-")[0] if row.key.startswith(("bare", "shoal")) else "peer"
    parts = [
        f'<text x="{LEFT - 10}" y="{middle + 5}" text-anchor="end">{escape(row.label)}</text>',
        f'<rect class="{kind}" x="{LEFT}" y="{top}" width="{width:.1f}" height="{BAR}" rx="2"/>',
    ]
    end = width
    if row.highest > row.lowest:
        low, high = LEFT + row.lowest * scale, LEFT + row.highest * scale
        parts.append(f'<line class="spread" x1="{low:.1f}" y1="{middle}" x2="{high:.1f}" y2="{middle}"/>')
        end = max(end, row.highest * scale)
    cost = "" if row.cpu_ms is None else f"  {row.cpu_ms:.2f} ms CPU,"
    aside = f"{cost} {row.peak_mb:,.0f} MB" + (f", first {row.limit:,} pages" if row.limit else "")
    doubt = " !" if row.problems else ""  # the table has the problems
    label = f'{row.rate:,.0f}{doubt}<tspan class="soft">{aside}</tspan>'
    parts.append(f'<text x="{LEFT + end + 8:.1f}" y="{middle + 5}" xml:space="preserve">{label}</text>')
    return parts
