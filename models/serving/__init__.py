"""Serving: many requests at a time on one model, with a paged cache whose prefixes are shared."""
