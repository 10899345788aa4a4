"""Turns of a conversation as text, by the model's own chat template; without one, paragraphs."""

from __future__ import annotations

from typing import Any

from ..config import reject

_ANSWER = "The answer stands here."


def first_turn(tokenizer: Any, text: str) -> str:
    """A user's turn up to where the assistant begins."""
    if tokenizer.chat_template is None:
        return f"{text}\n\n"
    turn = [{"role": "user", "content": text}]
    rendered: str = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    return rendered


def next_turn(tokenizer: Any, text: str) -> str:
    """What stands between an answer and the next one: the end of the assistant's turn, then the user's next."""
    if tokenizer.chat_template is None:
        return f"\n\n{text}\n\n"
    turns = [{"role": "user", "content": "."}, {"role": "assistant", "content": _ANSWER}]
    turns.append({"role": "user", "content": text})
    whole: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    if whole.count(_ANSWER) != 1:
        allowed = "a template that repeats an assistant's turn as it is, once"
        raise reject("chat_template", f"{whole.count(_ANSWER)} times", allowed, "Use another model.")
    return whole.split(_ANSWER)[1]
