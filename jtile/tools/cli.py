"""The command `jtile`: info, generate, chat, serve, quantize, inspect, tune, bench, explain, profile, view, debug,
shrink, tile, cache, demo. Each imports what it needs when it runs."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from typing import Annotated, Any

try:
    import typer
except ImportError:  # the language itself works without the package
    sys.exit("jtile: the command line needs typer and rich: pip install 'jtile[cli]'")

app = typer.Typer(
    name="jtile",
    help="Tile kernels for JAX: look at them, measure them, and generate text with a model that is made of them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cache_app = typer.Typer(help="The disk cache of compiled kernels.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")


def _version(asked: bool) -> None:
    if asked:
        print(f"jtile {importlib.metadata.version('jtile')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that stand before the command."""


Devices = Annotated[
    str | None,
    typer.Option(help="How many devices share the model, such as 2; `generate` also takes tensor=2,expert=2."),
]
LaunchSteps = Annotated[
    int | None,
    typer.Option(min=1, max=8, help="How many tokens of each answer one launch computes where no prompt waits."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Model = Annotated[
    str | None,
    typer.Argument(help="A GGUF file, or a folder with config.json and safetensors; SmolLM2 if it is left out."),
]
Temperature = Annotated[float, typer.Option(min=0.0, help="How freely tokens are drawn; 0 takes the most likely one.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Draw each token from this many of the most likely ones.")]
TopP = Annotated[
    float | None, typer.Option(help="Draw each token from the most likely ones that together have this probability.")
]
MinP = Annotated[
    float | None, typer.Option(help="Leave out tokens whose probability is below this share of the most likely one's.")
]
System = Annotated[str | None, typer.Option(help="A system prompt, instead of the one that the model brings.")]
Adapter = Annotated[str | None, typer.Option(help="A folder with a LoRA adapter of the model.")]
Dtype = Annotated[str | None, typer.Option(help="The dtype of activations: float32, bfloat16 or float16.")]
CacheDtype = Annotated[
    str | None, typer.Option(help="The dtype of the key-value cache: bfloat16, int8, float8_e4m3fn, ...")
]


@app.command()
def info(as_json: Json = False) -> None:
    """Versions, targets, what each target can run, and the cache."""
    from jtile.tools import info as page

    page.show(as_json=as_json)


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="What to say to the model; '-' reads standard input.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A GGUF file, or a folder with config.json and safetensors; SmolLM2 if it is left out."),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=0, help="End the answer after this many tokens.")
    ] = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Makes tokens so far less likely if > 1.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Makes tokens of the answer less likely.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Makes frequent tokens less likely.")] = None,
    logit_bias: Annotated[str | None, typer.Option(help="Numbers to add to logits of tokens: 12=-5,7=2.5.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides what is drawn: equal seeds give equal text.")] = 0,
    draft: Annotated[str | None, typer.Option(help="A smaller model's file, which drafts tokens, or 'ngram'.")] = None,
    draft_tokens: Annotated[int, typer.Option(help="How many tokens are drafted at a time.")] = 4,
    system: System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt itself, without the chat template.")] = False,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids instead of a text, as in 1,2,3.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end tokens.")] = False,
    batch: Annotated[
        str | None,
        typer.Option(help='A file with one request a line, {"id": ..., "prompt": ...}; "-" is standard input.'),
    ] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="The file for the answers to --batch.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print speeds on standard error.")] = False,
    cache_dtype: CacheDtype = None,
    dtype: Dtype = None,
    adapter: Adapter = None,
    devices: Devices = None,
    as_json: Json = False,
) -> None:
    """Generate text with a language model whose every operation is a jtile kernel."""
    options = dict(model=model, prompt_ids=prompt_ids, chat=not raw, system=system, json=as_json, stats=stats)
    options |= dict(max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, seed=seed)
    options |= dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, logit_bias=logit_bias)
    options |= dict(repetition_penalty=repetition_penalty, presence_penalty=presence_penalty)
    options |= dict(frequency_penalty=frequency_penalty, draft=draft, draft_tokens=draft_tokens, adapter=adapter)
    options |= dict(devices=devices, cache_dtype=cache_dtype, dtype=dtype)
    if batch is not None or out is not None:
        raise typer.Exit(_run_batch(batch, out, prompt, options))
    raise typer.Exit(run_model(sys.stdin.read() if prompt == "-" else prompt, **options))


def _run_batch(path: str | None, out: str | None, prompt: str | None, options: dict[str, Any]) -> int:
    """`jtile.models.run_batch` with those of the options of `generate` that requests have."""
    from jtile._config import current

    if path is None:
        raise typer.BadParameter("--out is the file of the answers to --batch")
    usual = dict(prompt_ids=None, chat=True, system=None, json=False, stats=False, logit_bias=None, draft=None)
    given = {name: options.pop(name) for name in usual} | {"prompt": prompt}
    if other := [name for name, value in given.items() if value != usual.get(name)]:
        name = {"chat": "raw"}.get(other[0], other[0])
        raise typer.BadParameter(f"{name} is of one prompt; the requests of --batch are in its file")
    del options["draft_tokens"]
    options["max_tokens"] = options.pop("max_new_tokens")
    return of_models("run_batch", path, out=out, cache_dir=current().cache_dir, **options)


@app.command()
def chat(
    model: Model = None,
    system: System = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", "-n", min=1, help="End each answer after this many tokens.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="The largest number of tokens of the whole conversation.")
    ] = None,
    temperature: Temperature = 0.7,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Decides what is drawn for the first answer; random if it is left out.")
    ] = None,
    cache_dtype: CacheDtype = None,
    dtype: Dtype = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print speeds behind each answer.")] = False,
    adapter: Adapter = None,
    devices: Devices = None,
) -> None:
    """Talk with a language model in the terminal; /help lists the commands."""
    from jtile._config import current

    options = dict(system=system, stats=stats, max_length=max_length, cache_dtype=cache_dtype, dtype=dtype)
    options |= dict(adapter=adapter, devices=devices)
    options |= dict(
        max_tokens=max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    raise typer.Exit(of_models("run_chat", model, cache_dir=current().cache_dir, **options))


@app.command()
def serve(
    model: Model = None,
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 stands for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535)] = 8000,
    name: Annotated[
        str | None, typer.Option(help="The name by which requests ask for the model; by default that of its file.")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="JTILE_API_KEY", help="A key that requests have to show (repeatable).")
    ] = None,
    origin: Annotated[
        list[str] | None, typer.Option(help="The origin of a web page that may send requests, or '*' (repeatable).")
    ] = None,
    requests_per_minute: Annotated[
        int | None,
        typer.Option(min=1, help="How many requests a minute each key may send, or each address if there are no keys."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FOLDER of a LoRA adapter, which requests ask for as a model of that name (repeatable)."
        ),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="How many requests run at a time.")] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="The largest number of tokens of prompt and answer.")
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="How many requests may wait; others are refused with status 429.")
    ] = 1024,
    cache_tokens: Annotated[int | None, typer.Option(min=1, help="How many tokens the cache holds.")] = None,
    cache_dtype: CacheDtype = None,
    dtype: Dtype = None,
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Do not share the cache of equal beginnings of prompts.")
    ] = False,
    no_chunked_prefill: Annotated[
        bool, typer.Option("--no-chunked-prefill", help="Compute each prompt in one piece, while answers wait.")
    ] = False,
    launch_steps: LaunchSteps = None,
    devices: Devices = None,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast", help="Be faster for few requests; answers may then depend on how many run, by rounding."
        ),
    ] = False,
) -> None:
    """Answer OpenAI's HTTP requests (chat, completions) with a language model, many at a time."""
    from jtile._config import current

    options = dict(host=host, port=port, name=name, api_keys=api_key or (), origins=origin or ())
    options |= dict(rows=rows, max_length=max_length, max_waiting=max_waiting, cache_tokens=cache_tokens)
    options |= dict(cache_dtype=cache_dtype, dtype=dtype, prefix_cache=not no_prefix_cache, invariant=not fast)
    options |= dict(devices=devices, launch_steps=launch_steps)
    options |= dict(
        adapters=adapter or (), chunked_prefill=not no_chunked_prefill, requests_per_minute=requests_per_minute
    )
    raise typer.Exit(of_models("run_serve", model, cache_dir=current().cache_dir, **options))


@app.command()
def quantize(
    folder: Annotated[str, typer.Argument(help="A folder with config.json and safetensors of floats.")],
    to: Annotated[str, typer.Option("--to", help="The kind of the quantised weights: fp8, int4, q4_0, q8_0 or int8.")],
    group: Annotated[
        int, typer.Option(help="For int4: how many weights share a scale, 32 times a power of two.")
    ] = 128,
    out: Annotated[str | None, typer.Option("--out", "-o", help="The new folder; by default FOLDER-KIND.")] = None,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="For fp8: round activations to 8 bits, too.")] = False,
) -> None:
    """Write a copy of a model's folder with its layers quantised, which `jtile generate --model` reads."""
    raise typer.Exit(of_models("run_quantize", folder, to, group=group, out=out, dynamic=dynamic))


def run_model(prompt: str | None, **options: Any) -> int:
    """Call jtile.models.run_generate with the cache of this configuration; returns the exit status."""
    from jtile._config import current

    return of_models("run_generate", prompt, cache_dir=current().cache_dir, **options)


def of_models(name: str, /, *args: Any, **options: Any) -> int:
    """Call a function of jtile.models; one sentence of error where the packages that models need are missing."""
    try:
        from jtile import models
    except ModuleNotFoundError as error:
        if (error.name or "jtile").startswith("jtile"):
            raise
        print(f"jtile: models need {error.name}: pip install 'jtile[models]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return getattr(models, name)(*args, **options)


@app.command()
def inspect(
    kernel: Annotated[str, typer.Argument(help="module:kernel, such as jtile.ops:softmax or mine.py:matmul.")],
    args: Annotated[str, typer.Option("--args", help="The types of the arguments, as in f32[128,256],bf16[256].")],
    meta: Annotated[
        list[str] | None, typer.Option("--meta", help="A meta-parameter, as in bm=64 (repeatable).")
    ] = None,
    target: Annotated[str, typer.Option(help="What to compile for; `jtile info` lists the targets.")] = "cpu",
    level: Annotated[list[str] | None, typer.Option("--level", help="Print this level only (repeatable).")] = None,
    transform: Annotated[str, typer.Option(help="jvp or vjp: show the kernels of that derivative instead.")] = "",
) -> None:
    """The text of every level that a kernel passes through on its way to machine code, and the scratch it needs."""
    from jtile.tools import levels

    levels.show(kernel, args, meta or [], target=target, only=level or [], transform=transform)


Args = Annotated[str, typer.Option("--args", help="The types of the arguments, as in f32[128,256],bf16[256].")]
Meta = Annotated[list[str] | None, typer.Option("--meta", help="A keyword argument, as in causal=True (repeatable).")]


@app.command()
def tune(
    what: Annotated[str, typer.Argument(help="module:function, such as jtile.ops:matmul; or show, or merge.")],
    files: Annotated[
        list[str] | None, typer.Argument(help="The files of entries that `show` prints or `merge` joins.")
    ] = None,
    args: Args = "",
    meta: Meta = None,
    time_limit: Annotated[
        float | None, typer.Option(min=0.0, help="How many seconds the whole search may take.")
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="A file to which the new entries are written, too.")
    ] = None,
) -> None:
    """Search for the best parameters of the kernels that a function calls, on this machine's device."""
    from jtile.tools import tuning

    raise typer.Exit(tuning.run(what, files or [], args=args, meta=meta or [], time_limit=time_limit, out=out))


@app.command()
def bench(
    what: Annotated[str, typer.Argument(help="module:function, such as jtile.ops:softmax.")],
    args: Args,
    meta: Meta = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="module:function of the same arguments, which is timed beside it (repeatable)."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How many samples are taken of each function.")] = 15,
) -> None:
    """Time of a function on random data, and of others that do the same, such as jax.nn:softmax."""
    from jtile.tools import tuning

    tuning.show_bench(what, args=args, meta=meta or [], peers=peer or [], rounds=rounds)


@app.command()
def explain(
    what: Annotated[str, typer.Argument(help="module:function, such as jtile.ops:matmul.")],
    args: Args,
    meta: Meta = None,
    compare: Annotated[
        str | None,
        typer.Option(
            help="A variant to compare with: meta-parameters, as in 'bm=64 bn=64', or another module:function."
        ),
    ] = None,
    picture: Annotated[str | None, typer.Option(help="A file for a picture, in PNG, SVG or PDF.")] = None,
) -> None:
    """Bytes, operations, roofline bound, time and bottleneck of the kernels that a function calls."""
    from jtile.tools import tuning

    tuning.show_explanation(what, args=args, meta=meta or [], compare=compare, picture=picture)


@app.command()
def profile(
    what: Annotated[str, typer.Argument(help="module:function, such as jtile.ops:matmul.")],
    args: Args,
    meta: Meta = None,
    trace: Annotated[str | None, typer.Option(help="A trace for https://ui.perfetto.dev.")] = None,
    picture: Annotated[str | None, typer.Option(help="A file for the picture, in PNG, SVG or PDF.")] = None,
    interpret: Annotated[
        bool, typer.Option(help="Run in the interpreter, which needs no GPU and counts steps instead of time.")
    ] = False,
    program: Annotated[
        bool, typer.Option("--program", help="Watch the whole function: the time of each kernel, and gaps.")
    ] = False,
    calls: Annotated[int, typer.Option(min=1, help="How many calls --program watches.")] = 10,
) -> None:
    """What the roles of a function's block-level kernels do when; or where the time of a whole program goes."""
    from jtile.tools import tuning

    if program:
        return tuning.show_program(what, args=args, meta=meta or [], trace=trace, calls=calls)
    tuning.show_profile(what, args=args, meta=meta or [], trace=trace, picture=picture, interpret=interpret)


@app.command()
def view(
    what: Annotated[str, typer.Argument(help="module:kernel or module:function, such as mine.py:matmul.")],
    args: Args,
    meta: Meta = None,
    target: Annotated[str | None, typer.Option(help="What to compile for; by default the device at hand.")] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="The file; by default NAME.html.")] = None,
    gradient: Annotated[bool, typer.Option(help="Show the kernels of reverse mode, too.")] = True,
    run: Annotated[bool, typer.Option(help="Measure the kernel if the target is the device at hand.")] = True,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the page instead of writing it, and make it anew on every save.")
    ] = False,
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="The port for --serve; 0 takes a free one.")
    ] = 8765,
) -> None:
    """One page for a browser: source beside every level down to machine code, passes, grid, speed, gradient."""
    from jtile.tools import viewing

    options: dict[str, Any] = dict(args=args, meta=meta or [], target=target, gradient=gradient, run=run)
    if serve:
        viewing.serve(what, port=port, **options)
    else:
        viewing.show(what, out=out, **options)


@app.command()
def debug(
    what: Annotated[str, typer.Argument(help="module:kernel, such as mine.py:matmul, or a function that calls one.")],
    args: Args = "",
    meta: Meta = None,
    data: Annotated[
        str | None, typer.Option(help="An .npz file with the arguments, in their order; by default they are random.")
    ] = None,
    kernel: Annotated[str | None, typer.Option(help="Which kernel to debug if the function calls several.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides the order of the programs, and random arguments.")] = 0,
    command: Annotated[
        list[str] | None, typer.Option("--command", "-c", help="A command to begin with (repeatable).")
    ] = None,
) -> None:
    """Run a kernel step by step in the interpreter, with breakpoints; `help` at its prompt lists the commands."""
    from jtile.tools import debugging

    debugging.debug(what, args, meta or [], data=data, kernel=kernel, seed=seed, commands=command or [])


@app.command()
def shrink(
    file: Annotated[str, typer.Argument(help="A Python file that fails when it is run.")],
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="The file for what is left; by default FILE.min.py.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="After how many seconds a run counts as endless.")] = 60.0,
    time_limit: Annotated[float, typer.Option(min=0.0, help="How many seconds the whole search may take.")] = 600.0,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="How many runs at a time; by default one for each core, 4 at most.")
    ] = None,
) -> None:
    """Cut a file that fails down to what it needs to fail in the same way."""
    from jtile.tools import shrinking

    shrinking.show(file, out=out, timeout=timeout, time_limit=time_limit, jobs=jobs)


@app.command()
def tile(
    what: Annotated[str, typer.Argument(help="module:function of jax.numpy, such as mine.py:layer_norm.")],
    args: Args,
    meta: Meta = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="A new file for the module.")] = None,
) -> None:
    """Write the tile kernels of a function of jax.numpy as Python source, to be read, edited and kept."""
    from jtile.tools import tiling

    tiling.write(what, args=args, meta=meta or [], out=out)


@app.command()
def demo(
    text: Annotated[bool, typer.Option(help="End with text from SmolLM2, if its weights are installed.")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="How often each kernel and its counterpart is timed.")] = 20,
) -> None:
    """Four kernels against their jnp counterparts under jit, then text from SmolLM2."""
    from jtile.tools import demo as show

    raise typer.Exit(show.run(text=text, repeats=repeats))


@cache_app.command("clear")
def cache_clear() -> None:
    """Delete every compiled kernel of the disk cache."""
    from jtile.tools import cachedir

    cachedir.clear()


@cache_app.command("info")
def cache_info() -> None:
    """Where the disk cache is, and what it holds."""
    from jtile.tools import cachedir

    cachedir.show()


def main(argv: list[str] | None = None) -> Any:
    """Entry point of the console script. jtile's own errors are one message and exit status 1, never a traceback."""
    from jtile._errors import JtileError

    try:
        app(argv)
    except JtileError as error:
        # The variable is read as it is: an option that cannot be parsed may be the error.
        if os.environ.get("JTILE_DEBUG", "0") not in ("", "0"):
            raise
        sys.exit(f"jtile: {error}")
    except BrokenPipeError:  # the reader has closed the pipe, as in `jtile inspect ... | head`
        sys.stderr.close()
        sys.exit(1)


if __name__ == "__main__":
    main()
