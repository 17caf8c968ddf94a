"""Writes the pictures of the pages under *Learn*: `python docs/pictures/draw.py`.

Their colours are of a middle brightness, so that they can be read on a white and on a black page.
"""

from pathlib import Path

HERE = Path(__file__).resolve().parent
GREY, BLUE, ORANGE, GREEN, RED = "#7d8590", "#3b82d6", "#d9822b", "#2e9f6b", "#d1495b"


def box(x, y, w, h, colour=GREY, fill=0.0, width=1.5, dash=""):
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="2" fill="{colour}" fill-opacity="{fill}" '
        f'stroke="{colour}" stroke-width="{width}"{dashes}/>'
    )


def text(x, y, words, colour=GREY, size=14, anchor="middle", mono=False, bold=False):
    family = "ui-monospace, Menlo, Consolas, monospace" if mono else "system-ui, Helvetica, Arial, sans-serif"
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" font-family="{family}" '
        f'text-anchor="{anchor}"{weight}>{words}</text>'
    )


def arrow(x1, y1, x2, y2, colour=GREY, width=2):
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="{width}" '
        f'marker-end="url(#{colour[1:]})"/>'
    )


def grid(x, y, columns, rows, side, colour=GREY):
    return [box(x + c * side, y + r * side, side, side, colour, 0.0, 1) for r in range(rows) for c in range(columns)]


def write(name, width, height, title, parts):
    heads = "".join(
        f'<marker id="{c[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{c}"/></marker>'
        for c in (GREY, BLUE, ORANGE, GREEN, RED)
    )
    body = "\n".join(parts)
    (HERE / f"{name}.svg").write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{title}">\n<title>{title}</title>\n<defs>{heads}</defs>\n{body}\n</svg>\n'
    )


def vector_add():
    parts, colours = [], (BLUE, ORANGE, GREEN)
    for row, name in enumerate("xyo"):
        y = 20 + row * 62
        parts.append(text(14, y + 25, name, mono=True, bold=True))
        for k, colour in enumerate(colours):
            parts.append(box(40 + k * 160, y, 160, 36, colour, 0.25))
            parts.append(text(120 + k * 160, y + 23, f"{name.upper()}[{k}]", colour, mono=True, bold=True))
        parts.append(box(440, y, 80, 36, GREY, 0.15, 1.5, "4 3"))
    for k, colour in enumerate(colours):
        parts.append(text(120 + k * 160, 214, f"program {k}", colour, bold=True))
    parts.append(
        text(520, 236, "dashed: past the end of the array; reads as 0, is never written", size=12, anchor="end")
    )
    write("vector_add", 560, 245, "Three programs, each of which adds one tile of x and y and stores it to o", parts)


def softmax():
    parts = [text(170, 20, "x", mono=True, bold=True), text(470, 20, "o", mono=True, bold=True)]
    for k, colour in enumerate((BLUE, ORANGE, GREEN, RED)):
        y = 32 + k * 40
        parts += [box(60, y, 220, 36, colour, 0.25), box(360, y, 220, 36, colour, 0.25)]
        parts += [
            text(170, y + 23, f"X[{k}, 0]", colour, mono=True, bold=True),
            arrow(286, y + 18, 354, y + 18, colour),
        ]
        parts.append(text(320, y + 12, "max, exp, sum", size=9))
        parts.append(text(28, y + 23, f"p {k}", colour, bold=True))
    parts.append(text(320, 214, "Each program reads its rows once and writes them once."))
    write("softmax", 640, 226, "Every program normalises a few whole rows", parts)


def matmul():
    parts, s = [], 34
    parts += grid(30, 180, 4, 4, s) + grid(220, 20, 5, 4, s) + grid(220, 180, 5, 4, s)
    for k in range(4):
        parts.append(box(30 + k * s, 180 + s, s, s, BLUE, 0.2 + 0.15 * k))
        parts.append(box(220 + 2 * s, 20 + k * s, s, s, ORANGE, 0.2 + 0.15 * k))
    parts.append(box(220 + 2 * s, 180 + s, s, s, GREEN, 0.5, 2.5))
    parts += [
        text(98, 340, "A [m, k]", mono=True),
        text(305, 340, "O [m, n]", mono=True),
        text(400, 90, "B [k, n]", anchor="start", mono=True),
    ]
    parts.append(text(98, 168, "A[i, 0] A[i, 1] ...", BLUE, 13, mono=True, bold=True))
    parts.append(text(415, 234, "O[i, j]", GREEN, 13, "start", mono=True, bold=True))
    parts.append(text(400, 60, "B[k, j]", ORANGE, 13, "start", mono=True, bold=True))
    parts.append(arrow(172, 232, 282, 232, BLUE))
    parts.append(arrow(305, 158, 305, 208, ORANGE))
    write("matmul", 500, 352, "One program multiplies a row of tiles of A by a column of tiles of B", parts)


def attention():
    parts, s = [], 40
    parts.append(text(58, 24, "Q", mono=True, bold=True))
    for r in range(5):
        parts.append(box(30, 34 + r * s, 56, s, BLUE if r == 2 else GREY, 0.35 if r == 2 else 0.0))
        for c in range(5):
            state = (GREEN, 0.3) if r == 2 and c < 2 else (ORANGE, 0.35) if r == 2 and c == 2 else (GREY, 0.0)
            if c <= r:
                parts.append(box(130 + c * s, 34 + r * s, s, s, *state, 1))
            else:
                parts.append(box(130 + c * s, 34 + r * s, s, s, GREY, 0.25, 0.5, "2 3"))
    parts.append(text(230, 24, "blocks of scores Q Kᵀ"))
    parts += [arrow(90, 134, 126, 134, BLUE), arrow(334, 134, 372, 134, GREEN)]
    parts.append(text(380, 128, "o, m, l", GREEN, 14, "start", mono=True, bold=True))
    parts.append(text(380, 147, "carried from block to block", size=12, anchor="start"))
    parts.append(text(380, 196, "orange: the diagonal, masked", ORANGE, 12, "start"))
    parts.append(text(380, 60, "grey: after the query,", size=12, anchor="start"))
    parts.append(text(380, 76, "never computed", size=12, anchor="start"))
    parts.append(text(230, 256, "j = 0, 1, ...: one round of the loop for each block of keys", size=12))
    write("attention", 580, 268, "One program takes a block of queries through the blocks of keys before them", parts)


def gradient():
    parts = []
    for x, title, rows in (
        (20, "forward, program i", ("load X[i]", "y = f(x)", "store Y[i]")),
        (330, "reverse, program i", ("add into dX[i]", "dx = f'(x) dy", "load dY[i]")),
    ):
        parts.append(text(x + 105, 22, title, bold=True))
        for k, row in enumerate(rows):
            colour = (BLUE, ORANGE, GREEN)[k]
            parts += [
                box(x, 36 + k * 56, 210, 38, colour, 0.2),
                text(x + 105, 60 + k * 56, row, colour, mono=True, bold=True),
            ]
            if k:
                down = x < 100
                y1, y2 = (36 + k * 56 - 16, 36 + k * 56 - 2) if down else (36 + k * 56 - 2, 36 + k * 56 - 16)
                parts.append(arrow(x + 105, y1, x + 105, y2))
    for k in range(3):
        parts.append(arrow(236, 55 + k * 56, 324, 55 + k * 56))
    parts.append(
        text(
            280,
            212,
            "a load becomes a sum into the cotangent, a store a load of it, from the last line to the first",
            size=12,
        )
    )
    write("gradient", 560, 224, "The reverse of a kernel goes backwards through the kernel", parts)


def devices():
    parts = []
    for k, colour in enumerate((BLUE, ORANGE, GREEN, RED)):
        x = 20 + k * 150
        parts += [box(x, 30, 130, 150, GREY), text(x + 65, 22, f"device {k}", bold=True)]
        parts += [box(x + 15, 45, 100, 30, colour, 0.3), text(x + 65, 65, f"rows {k}", colour, 13, bold=True)]
        parts += [box(x + 15, 90, 100, 30, GREY, 0.12), text(x + 65, 110, "weights", size=13)]
        parts += [box(x + 15, 135, 100, 30, colour, 0.3), text(x + 65, 155, f"result {k}", colour, 13, bold=True)]
        parts += [arrow(x + 65, 76, x + 65, 89, colour), arrow(x + 65, 121, x + 65, 134, colour)]
    parts.append(text(315, 205, "Every device runs the same kernel on its share of the rows.", size=13))
    write("devices", 630, 216, "Four devices, each with a share of the rows and all weights", parts)


def levels():
    parts = []
    steps = (
        ("your function", "tiles of arrays", BLUE),
        ("jaxpr", "jit, vmap, grad, shard_map", BLUE),
        ("Tile IR", "passes; an interpreter", ORANGE),
        ("native code", "CPU, NVIDIA, AMD", GREEN),
        ("XLA program", "a custom call holds the code", GREEN),
    )
    for k, (name, what, colour) in enumerate(steps):
        x = 10 + k * 178
        parts += [box(x - 6, 20, 164, 52, colour, 0.2), text(x + 76, 42, name, colour, 15, bold=True)]
        parts.append(text(x + 76, 61, what, size=11.5))
        if k:
            parts.append(arrow(x - 17, 46, x - 7, 46))
    write("levels", 884, 92, "From a Python function to a custom call in an XLA program", parts)


if __name__ == "__main__":
    for draw in (vector_add, softmax, matmul, attention, gradient, devices, levels):
        draw()
