"""Random programs of NumPy: views of views, writes through them, copies, and what is computed of them."""

from __future__ import annotations

import random

_START = ["a = np.arange(24.0).reshape(4, 6)", "b = np.arange(24).reshape(4, 6) % 7", "c = np.ones(6)"]
# expression -> the shape of what it gives
_VIEWS = {
    1: {
        "{}[1:]": lambda n: (n - 1,), "{}[::-1]": lambda n: (n,), "{}[::2]": lambda n: ((n + 1) // 2,),
        "{}[None]": lambda n: (1, n), "{}.copy()": lambda n: (n,), "{}[:-1]": lambda n: (n - 1,),
        "{}[::-2]": lambda n: ((n + 1) // 2,), "np.broadcast_to({}, (2, {}.size))": lambda n: (2, n),
    },
    2: {
        "{}.T": lambda m, n: (n, m), "{}[1:]": lambda m, n: (m - 1, n), "{}[::-1]": lambda m, n: (m, n),
        "{}[:, ::2]": lambda m, n: (m, (n + 1) // 2), "{}[0]": lambda m, n: (n,), "{}[:, -1]": lambda m, n: (m,),
        "{}.reshape(-1)": lambda m, n: (m * n,), "{}[:, None, :]": lambda m, n: (m, 1, n),
        "{}.ravel()": lambda m, n: (m * n,), "{}.copy()": lambda m, n: (m, n), "{}[[0, 0]]": lambda m, n: (2, n),
        "np.flip({}, 1)": lambda m, n: (m, n), "{}.swapaxes(0, 1)[::-1]": lambda m, n: (n, m),
    },
    3: {
        "{}[:, 0]": lambda k, m, n: (k, n), "{}.transpose(2, 0, 1)": lambda k, m, n: (n, k, m),
        "{}.squeeze()": lambda *shape: tuple(n for n in shape if n != 1),
    },
}  # fmt: skip
_WRITES = (
    "{0} += 1", "{0}[...] = 2", "{0} *= 2", "{0} -= {0}", "{0}[0] = 7", "{0}[-1] += {0}[0]", "{0}[1:] = {0}[:-1]",
    "{0}[1:] += {0}[:-1]", "{0}[::-1] = {0}", "{0}[{0} > 3] = 0", "{0}[{0} % 2 == 0] += 5", "{0}[...] = {0}.mean()",
    "{0}[[0, -1]] = {0}[[-1, 0]]", "np.add({0}, 1, out={0})", "{0}.fill(3)", "{0}.sort()", "{0} //= 2",
    "np.clip({0}, 1, 4, out={0})", "{0}[[1, 0, 1]] = 9", "{0}[..., 0] = 1", "np.remainder({0}, 97, out={0})",
)  # fmt: skip
_VALUES = (
    "{0} + {1}", "{0} * {1} - 1", "np.where({0} > {1}, {0}, {1})", "np.maximum({0}, {1})", "{0} - {0}.mean()",
    "np.cumsum({0}).reshape({0}.shape)", "np.roll({0}, 1)", "abs({0})", "({0} > 2) * {1}", "np.sqrt(abs({0}))",
    "{0} % 5", "np.minimum({0}, {1}) // 2", "np.sort({0})", "np.stack([{0}, {1}]).sum(0)",
)  # fmt: skip


def program(seed: int) -> list[str]:
    """Statements, one of which may raise; the last one gathers all arrays that are left in `out`."""
    draw = random.Random(seed)
    lines = [*_START]
    shapes: dict[str, tuple[int, ...]] = {"a": (4, 6), "b": (4, 6), "c": (6,)}
    for step in range(draw.randint(4, 14)):
        kind, name = draw.random(), draw.choice([*shapes])
        shape = shapes[name]
        if kind < 0.3:
            expression, of = draw.choice([*_VIEWS[len(shape)].items()])
            if 0 not in of(*shape):
                lines.append(f"v{step} = " + expression.replace("{}", name))
                shapes[f"v{step}"] = of(*shape)
        elif kind < 0.6:
            lines.append(draw.choice(_WRITES).format(name))
        elif kind < 0.85:
            other = draw.choice([n for n, s in shapes.items() if s == shape])
            lines.append(f"v{step} = " + draw.choice(_VALUES).format(name, other))
            shapes[f"v{step}"] = shape
        elif kind < 0.93:
            lines.append(f"seen = float(({name} * 1.0).sum())")
        elif name not in ("a", "b", "c"):
            lines.append(f"del {name}")
            del shapes[name]
    return [*lines, f"out = [{', '.join(shapes)}]"]
