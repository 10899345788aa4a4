"""The scores that tasks share.  What they count is the benchmarks'; each function names its source."""

from __future__ import annotations

import functools
import importlib
import logging
import re
import string
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

PACKAGES = {
    "jieba": "jieba",
    "math_verify": "math-verify",
    "rapidfuzz.fuzz": "rapidfuzz",
    "rouge": "rouge",
    "rouge_score.rouge_scorer": "rouge-score",
}
"""Modules that scores import -> what pip calls them."""


def package(module: str) -> Any:
    """The module; ImportError that says how to get it if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"this task is scored with {PACKAGES[module]}: run pip install 'pagelocks[eval]'") from error


_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")


def _ranges(*pairs: tuple[int, int]) -> str:
    return "".join(chr(code) for first, last in pairs for code in range(first, last + 1))


# What LongBench's and InfiniteBench's normalize_zh_answer drop.  Their list leaves out U+3008 to U+300A, the opening
# book-title mark among them, and the full-width full stop; so must this one, for the same score.
_CHINESE = _ranges(
    (0x2013, 0x2014), (0x2018, 0x2019), (0x201B, 0x201F), (0x2026, 0x2027), (0x3001, 0x3003), (0x300B, 0x3011),
    (0x3014, 0x301F), (0x3030, 0x3030), (0x303E, 0x303F), (0xFE4F, 0xFE4F), (0xFF5F, 0xFF64),
)  # fmt: skip
_WIDE = "".join(chr(ord(mark) + 0xFEE0) for mark in string.punctuation if mark != ".")
_NO_CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + _WIDE + _CHINESE)


def overlap_f1(said: Sequence[str], wanted: Sequence[str]) -> float:
    """F1 of the items two sequences share, each as often as both have it; 0 if they share none."""
    shared = sum((Counter(said) & Counter(wanted)).values())
    return 2 * shared / (len(said) + len(wanted)) if shared else 0.0


def f1(answer: str, reference: str) -> float:
    """F1 of the words, as SQuAD counts it: without case, punctuation and articles."""

    def words(text: str) -> list[str]:
        return _ARTICLE.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()

    return overlap_f1(words(answer), words(reference))


def _bare(text: str) -> str:
    return "".join(text.lower().translate(_NO_CHINESE_PUNCTUATION).split())


def f1_of_characters(answer: str, reference: str) -> float:
    """F1 of the characters but punctuation: InfiniteBench's for Chinese."""
    return overlap_f1(_bare(answer), _bare(reference))


def f1_of_segments(answer: str, reference: str) -> float:
    """F1 of the words that jieba finds, but punctuation: LongBench's for Chinese."""
    said, wanted = ([bare for word in _segments(text) if (bare := _bare(word))] for text in (answer, reference))
    return overlap_f1(said, wanted)


def _segments(text: str) -> list[str]:
    jieba = package("jieba")
    jieba.setLogLevel(logging.WARNING)  # it would announce its dictionary
    return list(jieba.cut(text))


_ONE_AT_A_TIME = threading.Lock()


def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L's F1 as the `rouge` package counts it, sentences ending at full stops: LongBench's.

    LongBench gives 0 where that package fails.  It does so on an empty text, and then this is 0 too; but it also does
    so on sentences of many hundred words (Chinese ones above all, as 。 ends none), since it recurses once a word.
    Here those are scored.
    """
    scorer = _rouge()
    deep = len(answer.split()) + len(reference.split()) + 100
    with _ONE_AT_A_TIME:  # the limit is the interpreter's
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(before + deep)
        try:
            return float(scorer.get_scores(answer, reference)[0]["rouge-l"]["f"])
        except (ValueError, ZeroDivisionError):
            return 0.0
        finally:
            sys.setrecursionlimit(before)


@functools.cache
def _rouge() -> Any:
    return package("rouge").Rouge(metrics=["rouge-l"])


def rouge_l_of_segments(answer: str, reference: str) -> float:
    """`rouge_l` of the words that jieba finds: LongBench's for Chinese."""
    return rouge_l(" ".join(_segments(answer)), " ".join(_segments(reference)))


def rouge_lsum(answer: str, reference: str) -> float:
    """ROUGE-Lsum's F1 as Hugging Face's evaluate counts it, without stemming, a sentence a line: InfiniteBench's."""
    return float(_rouge_scorer().score(reference, answer)["rougeLsum"].fmeasure)


@functools.cache
def _rouge_scorer() -> Any:
    return package("rouge_score.rouge_scorer").RougeScorer(["rougeLsum"], use_stemmer=False)


def edit_similarity(answer: str, reference: str) -> float:
    """Twice the common characters over all, in whole per cent: LongBench's fuzz.ratio.

    LongBench's fuzzywuzzy gives the same where python-Levenshtein is installed, and otherwise falls back on difflib,
    whose figure can be lower as its matching blocks need not be the best ones.
    """
    return float(round(package("rapidfuzz.fuzz").ratio(answer, reference)) / 100)
