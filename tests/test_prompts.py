"""Needle prompts: the length, the one place of the answer, the depth, the same prompt for the same seed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pagelocks.prompts import DIGITS, HAYSTACKS, NeedlePrompt, needle_prompt


class Words:
    """A tokenizer of words and single other characters, with and without a chat template."""

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template
        self._ids: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return [self._ids.setdefault(piece, len(self._ids)) for piece in re.findall(r"[a-zA-Z']+|\S|\n", text)]

    def apply_chat_template(self, turn: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        (message,) = turn
        return f"<{message['role']}>{message['content']}<assistant>"


def check(prompt: NeedlePrompt, tokenizer: Any, tokens: int) -> None:
    assert list(prompt.token_ids) == tokenizer.encode(prompt.text)
    # Full to within one sentence, and never more.
    assert tokens - 40 <= len(prompt.token_ids) <= tokens
    assert re.fullmatch(rf"[1-9][0-9]{{{DIGITS - 1}}}", prompt.answer)
    assert prompt.text.count(prompt.answer) == 1
    # Nothing else could be taken for a number, and the needle stands before the question.
    assert re.findall(r"\d+", prompt.text) == [prompt.answer]
    needle = f"The special magic number for {prompt.key} is"
    assert prompt.text.count(f"{needle} {prompt.answer}.") == 1
    assert prompt.text.endswith(needle)
    assert f"for {prompt.key}?" in prompt.text[prompt.text.index(prompt.answer) :]


@pytest.mark.parametrize("haystack", HAYSTACKS)
@pytest.mark.parametrize("template", [None, "any"])
def test_a_prompt_is_full_and_holds_the_answer_once(haystack: str, template: str | None) -> None:
    tokenizer = Words(template)
    for tokens in (200, 201, 202, 777, 3000):
        for seed in range(5):
            prompt = needle_prompt(tokenizer, tokens, seed, haystack)
            check(prompt, tokenizer, tokens)
            assert (prompt.haystack, prompt.seed) == (haystack, seed)
            assert prompt.text.startswith("<user>") == (template is not None)


@pytest.mark.parametrize("haystack", HAYSTACKS)
def test_the_least_length_works_and_one_token_less_names_it(haystack: str) -> None:
    with pytest.raises(ValueError, match=r"tokens=-5 is not allowed: .* alone take (\d+) tokens") as caught:
        needle_prompt(Words(), -5, 0, haystack)
    least = int(re.search(r"take (\d+) tokens", str(caught.value))[1])  # type: ignore[index]
    assert len(needle_prompt(Words(), least, 0, haystack).token_ids) == least
    with pytest.raises(ValueError, match=f"tokens={least - 1} .* Ask for {least} or more"):
        needle_prompt(Words(), least - 1, 0, haystack)


@pytest.mark.parametrize("haystack", HAYSTACKS)
def test_the_seed_alone_decides(haystack: str) -> None:
    first = [needle_prompt(Words(), 500, seed, haystack) for seed in range(20)]
    assert first == [needle_prompt(Words(), 500, seed, haystack) for seed in range(20)]
    assert len({prompt.answer for prompt in first}) == 20
    assert len({prompt.key for prompt in first}) > 5
    # The same fact at another length: only the haystack grows.
    longer = needle_prompt(Words(), 1500, 3, haystack)
    assert (longer.answer, longer.key, longer.depth) == (first[3].answer, first[3].key, first[3].depth)


@pytest.mark.parametrize("haystack", HAYSTACKS)
def test_the_needle_stands_at_its_depth(haystack: str) -> None:
    depths = []
    for seed in range(40):
        prompt = needle_prompt(Words(), 2000, seed, haystack)
        body = prompt.text.split("\n\n")[1]
        found = body.index(prompt.answer) / len(body)
        assert abs(found - prompt.depth) < 0.05
        depths.append(found)
    assert min(depths) < 0.15 and max(depths) > 0.85


def test_noise_repeats_and_prose_does_not() -> None:
    for haystack, distinct in (("noise", range(5, 6)), ("prose", range(300, 2000))):
        prompt = needle_prompt(Words(), 6000, 0, haystack)
        sentences = [s for s in prompt.text.split("\n\n")[1].split(".") if prompt.answer not in s]
        assert len({sentence.strip() for sentence in sentences} - {""}) in distinct


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": "6000"}, r"tokens='6000' is not allowed: a whole number"),
        ({"tokens": True}, r"tokens=True is not allowed: a whole number"),
        ({"tokens": 10.0}, r"tokens=10.0 is not allowed: a whole number"),
        ({"seed": None}, r"seed=None is not allowed: a whole number"),
        ({"haystack": "essay"}, r"haystack='essay' is not allowed: one of noise, prose"),
    ],
)
def test_bad_values_say_what_is_allowed(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        needle_prompt(Words(), **{"tokens": 500, "seed": 0, **change})


@pytest.mark.model
@pytest.mark.parametrize("haystack", HAYSTACKS)
def test_with_a_real_tokenizer(haystack: str) -> None:
    from transformers import AutoTokenizer

    from pagelocks.models import fetch

    tokenizer = AutoTokenizer.from_pretrained(fetch("SmolLM2-135M-Instruct"))
    for tokens in (1024, 6000):
        for seed in (0, 1):
            check(needle_prompt(tokenizer, tokens, seed, haystack), tokenizer, tokens)
