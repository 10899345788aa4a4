"""Evaluations of answers: what a model still gets right when it reads a small part of its cache."""
