"""Evaluations of answers: what a model still gets right when it reads a small part of its cache."""


class EvalFailure(RuntimeError):
    """An evaluation that ran, and whose result is an error."""
