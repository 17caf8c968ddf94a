"""Writes the drawings of the pages: `python docs/pictures/draw.py`.

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


def pipeline():
    parts, w, h = [], 56, 26
    for y, title, start in ((46, "one stage", lambda k: 2 * k), (136, "three stages", lambda k: k)):
        parts.append(text(14, y - 14, title, anchor="start", bold=True))
        for k in range(4 if y < 100 else 7):
            load, product = start(k), start(k) + (1 if y < 100 else 2)
            parts += [
                box(90 + load * w, y, w - 3, h, BLUE, 0.25, 1),
                box(90 + product * w, y + h + 4, w - 3, h, ORANGE, 0.3, 1),
            ]
            parts.append(text(90 + load * w + 26, y + 18, f"load {k}", BLUE, 12))
            parts.append(text(90 + product * w + 26, y + h + 22, f"dot {k}", ORANGE, 12))
        parts += [
            text(84, y + 18, "memory", size=12, anchor="end"),
            text(84, y + h + 22, "products", size=12, anchor="end"),
        ]
    parts.append(arrow(90, 208, 590, 208))
    parts.append(text(596, 212, "time", size=12, anchor="start"))
    write(
        "pipeline", 640, 224, "With three stages, the tiles of later rounds are loaded while a round multiplies", parts
    )


def talk():
    parts, colours = [], (BLUE, ORANGE, GREEN, RED)
    for k, colour in enumerate(colours):
        x, before = 20 + k * 155, colours[k - 1]
        parts += [box(x, 30, 125, 196, GREY), text(x + 62, 22, f"device {k}", bold=True)]
        parts += [box(x + 38, 42, 78, 28, colour, 0.3), text(x + 77, 61, f"x of {k}", colour, 13, bold=True)]
        parts += [
            box(x + 38, 106, 78, 28, before, 0.3),
            text(x + 77, 125, f"x of {(k - 1) % 4}", before, 13, bold=True),
        ]
        parts += [
            text(x + 33, 125, "box", size=11, anchor="end", mono=True),
            text(x + 33, 61, "x", size=11, anchor="end", mono=True),
        ]
        parts += [text(x + 33, 159, "came", size=11, anchor="end", mono=True), text(x + 77, 159, "0, then 1", size=12)]
        parts += [box(x + 38, 186, 78, 28, before, 0.3), text(x + 33, 205, "o", size=11, anchor="end", mono=True)]
        parts += [
            text(x + 77, 205, f"x of {(k - 1) % 4}", before, 13, bold=True),
            arrow(x + 77, 166, x + 77, 184, before),
        ]
        if k < 3:
            parts.append(arrow(x + 104, 71, x + 192, 104, colour))
    parts.append(
        f'<path d="M 590 71 C 640 110 645 84 656 84 M -16 84 C 0 84 14 100 56 110" fill="none" stroke="{RED}" '
        f'stroke-width="2" marker-end="url(#{RED[1:]})"/>'
    )
    parts.append(
        text(
            320,
            250,
            "Each device stores x into the box of its neighbour, and then raises the neighbour's signal;",
            size=12.5,
        )
    )
    parts.append(text(320, 268, "when its own signal has come, it reads its box.", size=12.5))
    write(
        "talk",
        640,
        280,
        "Every device hands its part to the neighbour on the right, and a signal says that it is there",
        parts,
    )


def bands():
    parts, unit = [], 30
    kernels = ((BLUE, "norm"), (ORANGE, "product"), (GREEN, "silu"), (RED, "product"))
    apart = (((0, 2), (3, 5), (10, 1), (12, 4)), ((0, 1), (3, 6), (10, 1), (12, 3)))
    graph = (((0, 2), (2, 5), (7, 1), (8, 4)), ((0, 1), (1, 6), (7, 1), (8, 3)))
    for y, title, cores in (
        (46, "separate kernels: each waits for the whole kernel before it", apart),
        (156, "a graph: each band waits only for the bands that it needs", graph),
    ):
        parts.append(text(14, y - 16, title, anchor="start", bold=True))
        for core, spans in enumerate(cores):
            parts.append(text(64, y + core * 34 + 19, f"core {core}", size=12, anchor="end"))
            for (colour, name), (start, length) in zip(kernels, spans, strict=True):
                parts.append(box(72 + start * unit, y + core * 34, length * unit - 2, 28, colour, 0.3, 1))
                if length > 1:
                    parts.append(text(72 + (start + length / 2) * unit, y + core * 34 + 19, name, colour, 12))
    parts.append(arrow(72, 236, 640, 236))
    parts.append(text(646, 240, "time", size=12, anchor="start"))
    write("bands", 690, 252, "Bands of four kernels on two cores, as separate kernels and as one graph", parts)


def roles():
    parts = [
        box(20, 40, 120, 90, BLUE, 0.15),
        text(80, 66, "producer", BLUE, 15, bold=True),
        text(80, 86, "1 warp", size=12),
    ]
    parts += [text(80, 112, "jt.async_copy", BLUE, 11.5, mono=True)]
    parts += [
        box(500, 40, 120, 90, ORANGE, 0.15),
        text(560, 66, "consumer", ORANGE, 15, bold=True),
        text(560, 86, "8 warps", size=12),
    ]
    parts += [
        text(560, 112, "jt.dot_async", ORANGE, 11.5, mono=True),
        text(320, 24, "a ring of four buffers in shared memory", bold=True),
    ]
    states = (
        ("read", "product 4", ORANGE, 0.3),
        ("full", "round 5", GREEN, 0.3),
        ("full", "round 6", GREEN, 0.3),
        ("filled", "copy of 7", BLUE, 0.2),
    )
    for k, (state, what, colour, fill) in enumerate(states):
        x = 190 + k * 66
        parts += [
            box(x, 46, 60, 62, colour, fill),
            text(x + 30, 72, state, colour, 13, bold=True),
            text(x + 30, 91, what, size=9.5),
        ]
        parts.append(text(x + 30, 124, f"slot {k}", size=11))
    parts += [arrow(142, 70, 186, 70, BLUE), arrow(456, 70, 497, 70, ORANGE)]
    parts += [arrow(186, 156, 494, 156, GREEN), text(340, 149, "full: the bytes of a round have come", GREEN, 12)]
    parts += [
        arrow(494, 186, 186, 186, ORANGE),
        text(340, 179, "empty: a slot has been read and may be filled again", ORANGE, 12),
    ]
    parts += [text(80, 171, "barriers:", size=13)]
    write("roles", 640, 200, "A producer fills a ring of buffers that a consumer empties; barriers order them", parts)


def groups():
    steps = ("mean", "x - mean", "square, mean", "rsqrt, multiply", "* weight + bias")
    parts = [text(35, 71, "x", mono=True, bold=True), box(64, 28, 556, 76, BLUE, 0.06, 1.5, "5 4")]
    parts.append(
        text(342, 20, "a group: one kernel, which reads a row of x and writes a row of y", BLUE, 13, bold=True)
    )
    for k, name in enumerate(steps):
        x = 76 + k * 108
        parts += [box(x, 50, 98, 34, BLUE, 0.2), text(x + 49, 71, name, BLUE, 11.5)]
        if k:
            parts.append(arrow(x - 10, 67, x - 1, 67, BLUE, 1.5))
    parts += [arrow(44, 67, 74, 67), arrow(608, 67, 648, 67), text(632, 58, "y", size=12, mono=True)]
    parts += [
        box(652, 50, 90, 34, GREY, 0.15),
        text(697, 71, "jnp.sort(y)"[:8], size=12),
        text(697, 104, "stays with XLA", size=12),
    ]
    write("groups", 756, 116, "Equations that share axes are joined into a group, which becomes one kernel", parts)


def lanes():
    parts = [
        text(90, 24, "kernel(x)", mono=True, bold=True),
        text(420, 24, "jax.vmap(kernel)(xs)", mono=True, bold=True),
    ]
    for k in range(4):
        parts += [box(20 + k * 36, 68, 32, 32, BLUE, 0.25), text(36 + k * 36, 89, k, BLUE, 12)]
        for lane, colour in enumerate((BLUE, ORANGE, GREEN)):
            parts.append(box(348 + k * 36, 36 + lane * 36, 32, 32, colour, 0.25))
            parts.append(text(364 + k * 36, 57 + lane * 36, f"{lane}, {k}", colour, 11))
    parts += [
        text(90, 124, "4 programs", size=12),
        text(420, 164, "one launch of 3 x 4 programs", size=12),
        arrow(200, 84, 320, 84),
    ]
    parts += [
        text(260, 76, "vmap, 3 lanes", size=12),
        text(508, 57, "lane 0", BLUE, 12, "start"),
        text(508, 93, "lane 1", ORANGE, 12, "start"),
    ]
    parts.append(text(508, 129, "lane 2", GREEN, 12, "start"))
    write("lanes", 580, 176, "vmap adds an axis to the grid of a kernel", parts)


def steps():
    parts, w, h = [], 62, 30
    rows = (
        ("A", BLUE, ((0, "p 512"), (1, "t"), (2, "t"), (3, "t"), (4, "t"), (5, "t"), (6, "t"), (7, "t"))),
        ("B", ORANGE, ((1, "p 511"), (2, "p 511"), (3, "p 90"), (4, "t"), (5, "t"), (6, "t"), (7, "t"))),
        ("C", GREEN, ((3, "p 421"), (4, "p 79"), (5, "t"), (6, "t"))),
        ("D", RED, ((5, "p 40"), (6, "t"), (7, "t"))),
    )
    for r, (name, colour, cells) in enumerate(rows):
        parts.append(text(70, 64 + r * 38, f"request {name}", colour, 12, "end", bold=True))
        for step, what in cells:
            x = 84 + step * w
            parts.append(box(x, 44 + r * 38, w - 4, h, colour, 0.35 if what[0] == "p" else 0.12, 1))
            parts.append(
                text(x + (w - 4) / 2, 64 + r * 38, what.replace("p ", "") if what[0] == "p" else "1", colour, 12)
            )
    for step in range(8):
        parts.append(text(84 + step * w + 29, 34, f"step {step}", size=11))
    parts.append(
        text(
            12,
            214,
            "dark: a chunk of a prompt (tokens); light: one token of an answer. A step has at most 512 tokens.",
            size=12,
            anchor="start",
        )
    )
    parts.append(
        text(
            84,
            232,
            "The first 448 tokens of D's prompt are those of A's: their pages are in the cache already.",
            RED,
            12,
            "start",
        )
    )
    write(
        "steps",
        620,
        244,
        "Each step has one token of every answer, and chunks of prompts in the rest of its budget",
        parts,
    )


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


PICTURES = (
    vector_add, softmax, matmul, pipeline, attention, gradient, devices, talk,
    levels, lanes, groups, bands, roles, steps,
)  # fmt: skip

if __name__ == "__main__":
    for draw in PICTURES:
        draw()
