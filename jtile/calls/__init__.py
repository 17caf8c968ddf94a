"""From a function over Refs to an ordinary JAX function: `@jt.kernel`, `jt.call`, and what a call takes and returns."""
