"""Early exit: text in, expected text out."""

import pytest
from golden import check

from jtile.passes import early_exit

LOOP = """kernel @k(%x: ref<60xf32>, %n: ref<2xi32>, %o: ref<f32, out>) grid(1) {{
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %hi = {hi} : i32
  %by = {by} : i32
  %false = full false : bool
  %zero = full 0.0 : f32
  %r, %stopped = for %k in %c0..%hi step %by carry (%a = %zero, %stop = %false) {{{before}
    %going = not %stop : bool
    %a2, %stop2 = if %going {{
      %v = load %x[%k] : f32
      %b = add %a, %v : f32
      %end = gt %b, %zero : bool
      yield %b, %end
    }} else {{
      yield {idle}
    }}
    yield {after}
  }}
  store %o[], %r
}}"""
PLAIN = {"hi": "full 60", "by": "full 1", "before": "", "idle": "%a, %stop", "after": "%a2, %stop2"}


@pytest.mark.parametrize("bounds", [{}, {"hi": "load %n[%c0]"}, {"by": "full 7"}], ids=str)
def test_a_loop_whose_rounds_are_idle_ends(bounds):
    form = PLAIN | bounds
    check(
        early_exit,
        LOOP.format(**form),
        f"""\
kernel @k(%x: ref<60xf32>, %n: ref<2xi32>, %o: ref<f32, out>) grid(1) {{
  %c0 = full 0 : i32
  %c1 = full 1 : i32
  %hi = {form["hi"]} : i32
  %by = {form["by"]} : i32
  %false = full false : bool
  %zero = full 0.0 : f32
  %0, %r, %stopped = while (%k = %c0, %a = %zero, %stop = %false) {{
    %1 = lt %k, %hi : bool
    %2 = not %stop : bool
    %3 = and %1, %2 : bool
    yield %3
  }} do (%k_1, %a_1, %stop_1) {{
    %v = load %x[%k_1] : f32
    %b = add %a_1, %v : f32
    %end = gt %b, %zero : bool
    %4 = add %k_1, %by : i32
    yield %4, %b, %end
  }}
  store %o[], %r
}}""",
    )


@pytest.mark.parametrize(
    "form",
    [
        {"idle": "%zero, %stop"},  # an idle round that does something
        {"idle": "%a, %false"},  # a flag that is taken back
        {"after": "%a2, %going"},
        {"before": "\n    store %o[], %a"},
        {"hi": "full 2"},  # nothing to win
        {"hi": "load %n[%c0]", "by": "full 7"},  # the counter may leave its dtype behind the last round
        {"by": "full -1"},
        {"by": "load %n[%c0]"},
    ],
    ids=str,
)
def test_other_loops_stay(form):
    text = LOOP.format(**(PLAIN | form))
    check(early_exit, text, text)
