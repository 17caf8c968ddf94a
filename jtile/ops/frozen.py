"""Products with frozen weights: what their forward passes save, and the cotangents of everything but the weights."""

from __future__ import annotations

from collections.abc import Callable

from jtile.ops.epilogues import ACTIVATIONS, activation_derivative, gate_derivative
from jtile.ops.operands import NO_EPILOGUE, Epilogue


def saving(product: Callable, x, weights, epilogue: Epilogue, activation):
    """The result of a product with one weight, or of a gated product with two, made by `product(x, weights, epilogue)`;
    and what `gradients` starts from."""
    if len(weights) > 1:
        gate, up = (product(x, (w,), NO_EPILOGUE) for w in weights)
        return ACTIVATIONS[activation](gate) * up, (gate, up)
    z = product(x, weights, epilogue._replace(residual=None))
    y = ACTIVATIONS[activation](z)
    y = y if epilogue.residual is None else y + epilogue.residual
    return y, (z if activation else None,)


def gradients(weights, epilogue: Epilogue, saved, g, activation, dx: Callable):
    """(the cotangent of x, those of the epilogue) for the cotangent g of `saving`'s result; `dx(g, weight)`: that of x
    for the cotangent of a product."""
    if len(weights) > 1:
        of_both = gate_derivative(saved[0], saved[1], g, activation)
        gate, up = (dx(d, w) for d, w in zip(of_both, weights, strict=True))
        return gate + up, NO_EPILOGUE
    dz = g if activation is None else activation_derivative(saved[0], g, activation)
    bias = None if epilogue.bias is None else dz.sum(0, keepdims=True)
    residual = None if epilogue.residual is None else g
    return dx(dz, weights[0]), Epilogue(bias, residual)
