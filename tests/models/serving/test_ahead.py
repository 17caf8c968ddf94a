"""Two short steps under way before the tokens of the first one are read, as on GPUs."""

import numpy as np


def kept(completion):
    return [(token.id, token.logprob) for token in completion.tokens]


def test_two_steps_ahead(engine, monkeypatch):
    """Every answer is the one that its request gets alone, though pages of equal answers become one page while their
    sequences run, and are given to others."""
    kinds = [dict(prompt=[*range(n)], max_tokens=12, eos=None, logprobs=True) for n in (3, 6, 13)]
    alone = [kept(engine.stream(**kind).result()) for kind in kinds]
    deepest = []
    read = engine._core._read
    monkeypatch.setattr(engine._core, "_ahead", 2)
    monkeypatch.setattr(engine._core, "_read", lambda *of: (deepest.append(len(engine._core._flying)), read(*of))[1])
    rng = np.random.default_rng(0)
    open_streams = []
    for which in rng.integers(3, size=40):
        open_streams.append((which, engine.stream(**kinds[which])))
        if len(open_streams) > 8:
            kind, stream = open_streams.pop(0)
            assert kept(stream.result()) == alone[kind]
    for kind, stream in open_streams:
        assert kept(stream.result()) == alone[kind]
    assert max(deepest) == 2
