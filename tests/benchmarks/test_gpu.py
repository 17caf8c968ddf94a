"""The GPU suite, on the CPU: its logic with times that are given, and its cases at tiny sizes."""

import dataclasses
import functools
import importlib
import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jtile as jt
from benchmarks import __main__ as command
from benchmarks import data, harness, report
from benchmarks.data import normal
from benchmarks.gpu import WORKLOADS, attention, choices, launch, measure, mosaic, programs, suite, timing
from benchmarks.gpu.case import Case, Torch
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.merged import shared_work
from jtile.testing import Timing, relative_error
from jtile.testing.evaluate import evaluated
from jtile.tune.programs import trace

MACHINE = Machine("test", copy_rate=1e9, peaks={"bf16": 1e12, "fp8": 2e12}, threads=1)
QUICK = measure.Options(repeats=2, budget_s=0.05, cold_bytes=10_000)
MODULES = {name: importlib.import_module(f"benchmarks.gpu.{name}") for name in WORKLOADS}


@pytest.fixture
def few_calls(monkeypatch):
    """Programs of ten calls, not of 320, which XLA takes 0.2 s to compile; and few of them in a sample."""
    for name, value in {"_MOST_CALLS": 10, "_SAMPLE_US": 100.0, "_FRONT_US": 100.0}.items():
        monkeypatch.setattr(timing, name, value)


def case(ours, peers=None, **more):
    make = lambda seed: (normal(seed, 500),)
    peers = {"xla": lambda x: x + 1} if peers is None else peers
    return Case("add", "500", "float32", make, ours, peers, lambda x: x + 1, bytes=4000, **more)


def run(a_case, options=QUICK):
    said = []
    return measure.measure(a_case, MACHINE, options, said.append), said


def test_rounds_have_orders_of_their_own_and_the_peers_come_last():
    def run():
        order, clock = [], iter(range(1000))
        samplers = {n: lambda n=n: order.append(n) or float(len(order)) for n in ("ours", "a", "b")}
        return timing.alternate(samplers, repeats=9, budget_s=100, clock=lambda: next(clock)), order

    samples, order = run()
    rounds = [tuple(order[3 * k : 3 * k + 3]) for k in range(9)]
    assert all(sorted(r) == ["a", "b", "ours"] for r in rounds)
    assert len(set(rounds)) >= 4
    assert order[27:] == ["a", "b"]
    assert order == run()[1]
    assert samples["ours"] == [i + 1 for i, name in enumerate(order) if name == "ours"]
    assert timing.timings({"ours": [1.0, 6.0, 9.0, 10.0]})["ours"] == Timing(7.5, 1)


def test_the_budget_ends_the_rounds_but_three():
    clock = iter(range(0, 10_000, 100))
    samples = timing.alternate({"ours": lambda: 1.0}, repeats=50, budget_s=1, clock=lambda: next(clock))
    assert len(samples["ours"]) == 3


class Runner:
    """A runner whose programs take 4 ms: (turns, programs in front) of all that ran."""

    calls = 4

    def __init__(self):
        self.ran = []

    def run(self, turns, front=1):
        self.ran.append((turns, front))
        return 1000.0


def test_a_sample_stands_behind_programs_of_its_own():
    runner = Runner()
    sample = timing.sampler(runner)
    runner.ran.clear()
    assert sample() == 1000.0
    assert runner.ran == [(3, 7)]


def test_a_sample_waits_until_the_clock_has_settled():
    runner = Runner()
    sample = timing.sampler(runner, settling_us=250_000.0)
    runner.ran.clear()
    sample()
    assert runner.ran == [(1, 26), (1, 26), (1, 2), (19, 7)]
    assert 250_000 <= 4000 * (sum(turns + front for turns, front in runner.ran) - 19) < 258_001


def test_where_arithmetic_takes_the_time_clocks_settle_first(few_calls, monkeypatch):
    monkeypatch.setattr(timing, "SETTLING_US", 1000.0)
    got = {flops: run(case(lambda x: 1 + x, flops=flops))[0].record.timed for flops in (0, int(1e6), int(1e8))}
    assert ["behind 1 ms" in timed for timed in got.values()] == [False, False, True]


def test_calls_are_whole_rounds_over_the_sets():
    assert timing.call_count(1e6, 1) == 1
    assert timing.call_count(1e6, 3) == 3
    assert timing.call_count(1000, 3) == 6
    assert timing.call_count(1, 3) == 321
    assert timing.call_count(0, 1) == 320
    assert timing.call_count(100, 3, result_bytes=2 << 30) == 6


def test_equal_calls_in_a_program_are_not_merged():
    x = normal(0, 300)
    program = timing.repeated(lambda x: jnp.sort(x), 4)
    compiled = program.lower([(x,)]).compile().as_text()
    assert compiled.count(" sort(") == 4
    q, cache = normal(0, 4, 8, 16), normal(1, 4, 64, 16)
    attend = lambda q, c: jax.nn.softmax(jnp.einsum("bhd,bsd->bhs", q, c)) @ c
    text = timing.repeated(attend, 5).lower([(q, cache)]).compile().as_text()
    assert text.count(" exponential(") == 5
    one, two = timing.repeated(lambda x: x + 1, 3)([(x,), (2 * x,)])[:2]
    assert relative_error(one, x + 1) == relative_error(two, 2 * x + 1) == 0


ONE_FUSION = """
%both (p: f32[8], q: f32[8]) -> (f32[8], f32[8]) {
  %p = f32[8]{0} parameter(0)
  %q = f32[8]{0} parameter(1)
  %sum = f32[8]{0} add(%p, %q), metadata={op_name="add"}
  ROOT %pair = (f32[8]{0}, f32[8]{0}) tuple(%sum, %sum)
}

%buffer (r: f32[8], s: f32[8]) -> (f32[8], f32[8]) {
  %r = f32[8]{0} parameter(0)
  %s = f32[8]{0} parameter(1)
  %merged = (f32[8]{0}, f32[8]{0}) fusion(%r, %s), kind=kLoop, calls=%both
  %first = f32[8]{0} get-tuple-element(%merged), index=0
  %second = f32[8]{0} get-tuple-element(%merged), index=1
  ROOT %results = (f32[8]{0}, f32[8]{0}) tuple(%first, %second)
}

ENTRY %main (x: f32[8], y: f32[8]) -> (f32[8], f32[8]) {
  %x = f32[8]{0} parameter(0), metadata={op_name="sets[0][0]"}
  %y = f32[8]{0} parameter(1)
  %call = (f32[8]{0}, f32[8]{0}) call(%x, %y), to_apply=%buffer
  %one = f32[8]{0} get-tuple-element(%call), index=0
  %two = f32[8]{0} get-tuple-element(%call), index=1
  ROOT %out = (f32[8]{0}, /*index=1*/f32[8]{0}) tuple(%one, %two)
}
"""


def test_calls_that_became_one_kernel_are_found():
    assert shared_work(ONE_FUSION, 2) == ["merged"]
    apart = ONE_FUSION.replace("tuple(%first, %second)", "tuple(%x.own, %y.own)").replace(
        "  %merged", "  %x.own = f32[8]{0} negate(%r)\n  %y.own = f32[8]{0} negate(%s)\n  %merged"
    )
    assert not shared_work(apart, 2)
    x = normal(0, 40)
    equal = jax.jit(lambda x: [jnp.sin(x) + 1, jnp.sin(x) + 1]).lower(x).compile().as_text()
    assert shared_work(equal, 2)
    of_two = timing.repeated(lambda x: (jnp.cumsum(jnp.sin(x)), jax.lax.fori_loop(0, 3, lambda i, y: y * x, x)), 3)
    assert not shared_work(of_two.lower([(x,)]).compile().as_text(), 3)


@pytest.mark.usefixtures("few_calls")
def test_merged_calls_are_measured_apart(monkeypatch):
    monkeypatch.setattr(measure, "shared_work", lambda text, calls: ["fusion.1"])
    got, said = run(case(lambda x: 1 + x), dataclasses.replace(QUICK, cold_bytes=4000))
    assert "merged calls of ours (fusion.1): each set of arguments is used once" in said[0]
    assert (got.record.peers.keys(), got.record.timed) == ({"xla"}, "10 calls in a command buffer")


def test_sets_of_arguments_exceed_the_cache():
    plain = case(jnp.sin)
    assert measure.set_count(plain, QUICK) == 5
    assert measure.set_count(dataclasses.replace(plain, warm=True), QUICK) == 1
    assert measure.set_count(plain, measure.Options(cold_bytes=1 << 30)) == 16


@pytest.mark.usefixtures("few_calls")
def test_a_result_and_its_line():
    got, said = run(case(lambda x: 1 + x))
    assert got.record.error == 0
    assert got.record.peers.keys() == {"xla"}
    assert (got.record.device, got.record.bound_us) == ("test", 4)
    assert "add 500 float32:" in said[-1]
    assert "(err 0e+00)" in said[-1]


@pytest.mark.usefixtures("few_calls")
def test_a_peer_with_our_program_is_the_same_compiled_one():
    def small(x):  # too few elements for a kernel
        return jax.nn.gelu(x) + 1

    shared = programs.Programs()
    makes = [timing.repeated(f, 3) for f in (jt.fuse(small), small, lambda x: jax.nn.gelu(x) + 2)]
    ours, plain, other = (shared.compiled(f, [(jnp.ones(500),)]) for f in makes)
    assert ours is plain and other is not plain
    assert programs.same_as({"ours": ours, "other": other, "xla": plain}, ["ours", "other", "xla"]) == "xla"
    untuned = shared.compiled(makes[1], [(jnp.ones(500),)], tuned=False)  # a program of its own, without a search
    assert untuned is not plain and shared.compiled(makes[0], [(jnp.ones(500),)], tuned=False) is untuned
    assert programs.without_names("f @a(%0) @a, @b") == programs.without_names("f @x(%0) @x, @y") != "f @0(%0) @0, @0"
    calls = {
        programs.without_names(f'custom_call @{f}(%0) {{image = "{code}"}}') for f in "ab" for code in ("@a", "@b")
    }
    assert len(calls) == 4  # other functions, and other machine code
    got, said = run(case(lambda x: x + 1))
    assert got.record.timed == "10 calls in a command buffer; ours is the program of xla"
    assert got.record.ratio == got.min_ratio == 1
    assert said[-1].split(" [")[0].endswith("; ours is the program of xla")


@pytest.mark.usefixtures("few_calls")
def test_wrong_and_failing_peers_are_left_out():
    def broken(x):
        raise ValueError("no such\nkernel")

    peers = {"broken": broken, "wrong": lambda x: x + 2, "right": lambda x: x + 1, "torch x": lambda x: x + 1}
    got, said = run(case(lambda x: 1 + x, peers), dataclasses.replace(QUICK, without=("torch",)))
    assert got.record.peers.keys() == {"right"}
    assert any("broken is left out: ValueError: no such kernel" in line for line in said)
    assert any("wrong is left out: relative error" in line for line in said)


@pytest.mark.usefixtures("few_calls")
def test_programs_may_be_compiled_before_the_first_case_is_measured():
    def broken(x):
        raise ValueError("no kernel")

    cases = [case(lambda x: 1 + x, {"xla": lambda x: x + 1, "broken": broken}, budget_s=0.01)]
    module = types.SimpleNamespace(cases=lambda tiny: cases, AHEAD=True, __name__="ahead")
    one = suite.Suite(MACHINE, QUICK, True, deadline=float("inf"))
    (got,) = one.run(module)
    assert got.record.peers.keys() == {"xla"} and not one.failed
    slow = harness.Result(dataclasses.replace(got.record, config="slow", ratio=0.5), got.min_ratio)
    fast = harness.Result(dataclasses.replace(got.record, config="fast", ratio=2.0), got.min_ratio)
    assert [*suite.means([slow, fast])] == ["add: geometric mean of 2 ratios 1.000; below 0.97: slow 0.5"]
    assert not [*suite.means([fast])]


@pytest.mark.usefixtures("few_calls")
def test_arguments_of_one_function():
    ours = lambda y: y / 2
    got, _ = run(case(ours, prepare={"ours": lambda x: (2 * (x + 1),)}))
    assert got.record.error < 1e-6


def test_errors_on_the_device():
    x = jnp.array([3.0, 4.0])
    assert measure.relative_error((x, x), (x, x + jnp.array([0.0, 1.0]))) == pytest.approx((1 / 59) ** 0.5)
    assert measure.relative_error(x * jnp.nan, x) == float("inf")
    assert measure.relative_error(x * 0, x * 0) == 0
    with pytest.raises(ValueError, match="shapes"):
        measure.relative_error(x, x[:1])


@pytest.mark.usefixtures("few_calls")
def test_the_suite_goes_on_after_a_failure_and_stops_in_time(capsys):
    right, wrong = case(lambda x: x + 1), dataclasses.replace(case(lambda x: x + 3), config="wrong")
    late = dataclasses.replace(right, config="late")
    clock = iter([0, 1, 99])
    runner = suite.Suite(MACHINE, QUICK, False, 10, clock=lambda: next(clock))
    got = list(runner.run(types.SimpleNamespace(cases=lambda tiny: [wrong, right, late])))
    assert [r.record.config for r in got] == ["500"]
    assert runner.failed == [("add", "wrong", "float32")]
    assert runner.skipped == [("add", "late", "float32")]
    assert "FAILED, WrongResultError: add wrong float32: relative error" in capsys.readouterr().err


def test_the_deadline_does_not_part_lines_of_one_measurement():
    given = [harness.result("w", config, "f16", "test", {"ours": Timing(1, 1)}) for config in ("a 1", "a 2", "b 1")]
    module = types.SimpleNamespace(results=lambda *_: iter(given), half_told=lambda config: config.endswith("1"))
    module.__name__ = "w"
    clock = iter([0, 99, 99])
    runner = suite.Suite(MACHINE, QUICK, False, 10, clock=lambda: next(clock))
    assert [r.record.config for r in runner.run(module)] == ["a 1", "a 2"]
    assert runner.skipped == [("w", "what comes behind", "a 2")]


@pytest.mark.usefixtures("few_calls")
def test_lines_that_are_asked_for_by_size():
    """Cases that do not match are not even made; of what `results` gives, the others are left out."""
    right = case(lambda x: x + 1)
    unmade = lambda seed: pytest.fail("this case was not asked for")
    others = [dataclasses.replace(right, config=name, make=unmade) for name in ("5000", "640")]
    given = [harness.result("w", config, "f16", "test", {"ours": Timing(1, 1)}) for config in ("a 500", "b")]
    module = types.SimpleNamespace(cases=lambda tiny: [right, *others], results=lambda *_: iter(given))
    runner = suite.Suite(MACHINE, dataclasses.replace(QUICK, match=("500 f",)), False, 1e9)
    assert [r.record.config for r in runner.run(module)] == ["500", "a 500"]
    assert not runner.failed and not runner.skipped


def test_records_merge_by_line(tmp_path):
    file = tmp_path / "device" / "records.json"
    line = lambda config, us: harness.result("w", config, "f32", "test", {"ours": Timing(us, us)})
    report.merge([line("a", 1), line("b", 2), line("c", 3)], file)
    report.merge([line("b", 20), line("d", 4)], file, without=[("w", "c", "f32")])
    assert [(r["config"], r["ours_us"]) for r in json.loads(file.read_text())] == [("a", 1), ("b", 20), ("d", 4)]


def test_the_command_line():
    got = command._arguments(["gpu", "--only", "gemm", "rows", "--only", "llm", "--without", "torch", "--limit", "60"])
    assert (got.device, got.only, got.without, got.limit) == ("gpu", ["gemm", "rows", "llm"], ["torch"], 60)
    assert command._arguments(["gpu", "--budget", "1.5"]).budget == 1.5
    assert command._arguments(["gpu", "--match", "4096 N", "64"]).match == ["4096 N", "64"]
    assert command._arguments(["cpu"]).repeats == 30
    with pytest.raises(SystemExit):
        command._arguments(["gpu", "--only", "chain"])


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--repeats", "0", "no whole number from 1"), ("--repeats", "-3", "no whole number from 1"),
        ("--budget", "nan", "no number of seconds"), ("--limit", "-1", "no number of seconds"),
        ("--json", ".", "holds no records"), ("--json", __file__, "holds no records"), ("--plot", "x.foo", "no .png"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_before_the_benchmarks_run(option, value, said, capsys):
    with pytest.raises(SystemExit) as stop:
        command._arguments(["gpu", option, value])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.usefixtures("few_calls")
def test_a_run_with_a_failure_does_not_end_well(monkeypatch, tmp_path):
    cases = [case(lambda x: x + 1), dataclasses.replace(case(lambda x: x + 3), config="wrong")]
    monkeypatch.setattr(suite, "measure_machine", lambda tiny: MACHINE)
    module = types.SimpleNamespace(cases=lambda tiny: cases)
    # The suite's own name alone is changed: JAX imports parts of itself by the real module when they are first needed.
    monkeypatch.setattr(suite, "importlib", types.SimpleNamespace(import_module=lambda name: module))
    file = tmp_path / "records.json"
    run = lambda *more: suite.main(command._arguments(["gpu", "--tiny", "--only", "rows", "--json", str(file), *more]))
    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == 1
    assert [r["config"] for r in json.loads(file.read_text())] == ["500"]
    run("--match", "500 f")
    with pytest.raises(SystemExit, match="no line has one of 'zzz'"):
        run("--match", "zzz")


def test_the_cost_of_a_link():
    names, links = ("ours", "xla"), launch.LINKS - 1
    single = {f"one {n}": [10.0, 12.0, 14.0] for n in names}
    many = {f"{kind} {n}": [10.0 + 3 * links, 12.0 + 2 * links] for kind in ("chain", "loop") for n in names}
    got = launch._summary(dict.fromkeys(("wait", "enqueue", "moved"), single | many), names)
    assert got["one jitted kernel, host to host"]["ours"] == (12, 10)
    median, least = got[f"a kernel of {launch.LINKS} in a fori_loop"]["xla"]
    assert median == pytest.approx(2.5, rel=1e-2)
    assert least == pytest.approx(2, rel=2e-2)


def test_the_exact_attention_and_its_gradient():
    size = attention.Size(2, 4, 2, 9, 8, True)
    q, k, v, ct = size.make(0, "float32", ct=True)
    plain = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    exact = functools.partial(attention.exact, causal=True), functools.partial(attention.exact_gradient, causal=True)
    assert relative_error(evaluated(exact[0])(q, k, v), evaluated(plain)(q, k, v)) < 1e-6
    expected = evaluated(lambda q, k, v, ct: jax.vjp(plain, q, k, v)[1](ct))(q, k, v, ct)
    assert relative_error(evaluated(exact[1])(q, k, v, ct), expected) < 1e-5


# tests/fusion has what is fused
@pytest.mark.usefixtures("by_numpy")
@pytest.mark.parametrize("name", [n for n in WORKLOADS if hasattr(MODULES[n], "cases") and n != "fuse"])
def test_cases_at_full_size_are_well_formed(name, monkeypatch):
    monkeypatch.setattr(data, "_normal", lambda seed, shape, dtype, scale: jnp.zeros(shape, dtype))  # traced in no time
    keys = set()
    for one in MODULES[name].cases():
        args = jax.eval_shape(one.make, 0)
        assert one.key not in keys
        keys.add(one.key)
        with jax.numpy_rank_promotion("allow"):  # weights of one axis, as people write them
            wanted = jax.eval_shape(one.reference, *args)
        for who, f in {"ours": one.ours, **one.peers}.items():
            if who in ("cudnn", "mosaic 256x128", "mosaic 128x256", "mosaic") or isinstance(f, Torch):
                continue
            own = jax.eval_shape(one.prepare[who], *args) if who in one.prepare else args
            with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
                got = jax.eval_shape(f, *own)
            assert [x.shape for x in jax.tree.leaves(got)] == [x.shape for x in jax.tree.leaves(wanted)]
        assert MACHINE.bound_us(one.bytes, one.flops, one.unit) > 0


@pytest.mark.parametrize("name", ["gemm", "decode", "quantized", "backward", "fuse"])
@pytest.mark.usefixtures("few_calls")
def test_a_case_runs_at_a_tiny_size(name):
    one = next(iter(MODULES[name].cases(tiny=True)))
    options = dataclasses.replace(QUICK, without=("cudnn", "mosaic", "torch", "cublas"))
    got, _ = run(one, options)
    assert got.record.error <= one.tolerance


def test_scaled_operands_of_mosaic():
    """Mosaic's kernel gives `softmax(q k^T) v`: of scaled operands that is what the others give."""
    q, k, v = attention.TINY[1].make(0, "float32")

    def weighted(q, k, v):
        q, k, v = mosaic.scaled(q, k, v)
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest")
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v, precision="highest")

    exact = functools.partial(attention.exact, causal=False)
    assert relative_error(evaluated(weighted)(q, k, v), evaluated(exact)(q, k, v)) < 1e-6


def test_a_case_lowers_for_cuda():
    pytest.importorskip("triton")
    one = next(iter(MODULES["rows"].cases()))
    args = jax.eval_shape(one.make, 0)
    with jt.config(arch="sm_90"):
        text = jax.jit(one.ours).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.custom_call" in text


@pytest.mark.usefixtures("few_calls")
def test_choices_are_compared_with_a_search():
    said = []
    asked = dataclasses.replace(QUICK, match=("96x96",))
    (got,) = choices.results(MACHINE, asked, said.append, tiny=True)
    assert got.record.config == "96x96x64 NN"
    assert got.record.ratio == pytest.approx(got.record.peers["tuned"] / got.record.ours_us, rel=2e-3)  # rounded
    assert 0 < got.record.ratio <= 1
    assert "96x96x64 NN bfloat16" in said[-1]
    assert not [line for line in said if "left out" in line]


def test_choices_are_judged_on_shapes_that_nothing_is_fitted_to():
    folder = Path(suite.RECORDS) / "h200"
    fitted = {tuple(map(int, k.split("x"))) for k in json.loads((folder / "tiles.json").read_text())["times"]}
    sample = {(p.m, p.n, p.k) for p in choices.SHAPES}
    assert len(sample) == len(choices.SHAPES) == 20
    assert not sample & fitted
    shipped = json.loads((Path(jt.__file__).parent / "tune/records/nvidia-h200.json").read_text())["entries"]
    for p in choices.SHAPES:
        a, b = (f"{p.dtype}[{','.join(map(str, shape))}]" for shape in p.shapes())
        assert not [name for name in shipped if name.startswith("matmul#") and f" a={a} b={b} " in name]


@pytest.mark.parametrize("p", [*choices.SHAPES, choices.Product(512, 512, 32768, "TN")], ids=lambda p: p.config)
def test_the_search_for_the_best_form_has_others_than_the_choice(p):
    def form(f):
        program = next(iter(trace(f, *p.types())[0]))
        known = {**program.options.compiler, **dict(program.meta)}
        return {name: known.get(name) for name in ("parts", "bm", "bn", "bk", "stages", "num_warps")}

    with jt.config(arch="sm_90"):
        ours, named = form(p.ours), form(p.formed(choices.choice(p)))
        few = p.m <= 64  # else warps and stages are the plan's
        same = lambda x, y: all(x[k] == y[k] for k in x if few or k not in ("stages", "num_warps"))
        assert same(ours, named) == choices.in_tiles(p)
        others = [form(p.formed(f)) for f in choices.forms(p)]
        assert len(others) >= 3
        assert not any(same(ours, x) for x in others)
        assert any(same(named, x) for x in others) != choices.in_tiles(p)
        assert p.k < 32768 or any(x["parts"] for x in others)
