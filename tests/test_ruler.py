"""RULER's tasks: lengths, what is in a prompt and how often, the same record for the same numbers, the scores."""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import Any

import pytest

from pagelocks.eval.ruler import TASKS, Record, fact_tokens, score, score_task, task
from pagelocks.eval.ruler.needles import DEPTHS, KINDS
from pagelocks.eval.ruler.text import distinct, vocabulary
from pagelocks.eval.ruler.words import zipf_counts

NEEDLE = re.compile(r"(?:The|Among the) special magic (\w+?)s? for (\S+) is (\S+)\.(?=\s|$)")
ESSAYS = [name for name, kind in KINDS.items() if kind.haystack == "essay"]


class Words:
    """A tokenizer of words and single other characters."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self.calls = 0

    def encode(self, text: str) -> list[int]:
        self.calls += 1
        return [self._ids.setdefault(piece, len(self._ids)) for piece in re.findall(r"[a-zA-Z']+|\S|\n", text)]


@pytest.fixture(scope="module")
def smol() -> Any:
    from transformers import AutoTokenizer

    from pagelocks.models import fetch

    return AutoTokenizer.from_pretrained(fetch("SmolLM2-135M-Instruct"))


def words_in(text: str) -> Counter[str]:
    return Counter(re.findall(r"[\w-]+", text))


def check(record: Record, tokenizer: Any, slack: int) -> None:
    """What holds for every task, then what holds for its own."""
    assert list(record.prompt_token_ids) == tokenizer.encode(record.prompt)
    used = len(record.prompt_token_ids) + record.max_new_tokens
    assert record.length - slack <= used <= record.length
    assert record.prompt == f"{record.request}\n\n{record.prefix}"
    assert record.request == f"{record.context}\n\n{record.question}"
    assert record.prefix == record.prefix.strip()
    assert not any(reference in record.question + record.prefix for reference in record.references)
    assert list(record.facts) == sorted(record.facts) and record.facts
    kind = record.task.split("_")[0]
    {"niah": check_needle, "vt": check_chain, "cwe": check_common, "fwe": check_frequent, "qa": check_qa}[kind](record)


def check_needle(record: Record) -> None:
    kind = KINDS[record.task]
    found = [match.groups() for match in NEEDLE.finditer(record.context)]
    assert {what for what, _, _ in found} == {kind.value}
    form = r"[1-9]\d{6}" if kind.value == "number" else r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    assert all(re.fullmatch(form, value) for _, _, value in found)
    keys, values = [key for _, key, _ in found], [value for _, _, value in found]
    assert len(set(values)) == len(values)
    assert all(re.fullmatch(r"[a-z]+-[a-z]+" if kind.key == "word" else form, key) for key in keys)
    if kind.haystack == "needle":
        assert len(found) == record.meta["size"] + 1 and len(set(keys)) == len(keys)
        # Nothing but needles, one a line.
        assert all(NEEDLE.fullmatch(line) for line in record.context.split("\n\n")[1].split("\n"))
    else:
        assert (
            Counter(keys) == dict.fromkeys(record.meta["keys"], kind.values) and len(found) == kind.keys * kind.values
        )
        rest = NEEDLE.sub("", record.context.split("\n\n")[1])
        assert not re.search(r"\d|magic|special", rest)
        assert rest.count(".") == record.meta["size"]
    asked = record.meta["asked"]
    assert len(asked) == kind.queries and all(f"{key}" in record.question and key in record.prefix for key in asked)
    given = {key: {v for _, k, v in found if k == key} for key in asked}
    assert set().union(*given.values()) == set(record.references)
    assert len(record.references) == kind.queries * kind.values
    assert all(record.prompt.count(reference) == 1 for reference in record.references)
    assert [NEEDLE.fullmatch(record.context[a:b])[3] for a, b in record.facts] == [  # type: ignore[index]
        value for _, key, value in found if key in asked
    ]
    if kind.haystack == "essay":
        assert len(set(record.meta["depths"])) == len(record.meta["depths"]) and set(record.meta["depths"]) <= set(
            DEPTHS
        )


def check_chain(record: Record) -> None:
    example, main = record.context.split("\n\n")[1], record.context.split("\n\n")[-1]
    chains = [re.findall(r"SET ([A-Z]{5}) = (\w+)\.", text) for text in (example, main)]
    for chain in chains:
        names, values = [name for name, _ in chain], [value for _, value in chain]
        assert len(set(names)) == 5 and re.fullmatch(r"[1-9]\d{4}", values[0]) and values[1:] == names[:-1]
    assert [name for name, _ in chains[1]] == list(record.references)
    assert not {name for name, _ in chains[0]} & set(record.references) and chains[0][0][1] != chains[1][0][1]
    assert chains[1][0][1] in record.question and chains[1][0][1] in record.prefix
    assert f"{chains[0][0][1]} are {', '.join(name for name, _ in chains[0])}." in record.context
    counts = words_in(record.context)
    assert [counts[name] for name in record.references] == [2, 2, 2, 2, 1]
    assert [record.context[a:b][4:9] for a, b in record.facts] == list(record.references)
    assert not re.search(r"\d|[A-Z]{2}", re.sub(r"SET \w+ = \w+\.", "", main))


def check_common(record: Record) -> None:
    lists = [re.findall(r"(\d+)\. ([a-z]+)", part) for part in record.context.split("\n\n") if part.startswith("1. ")]
    assert len(lists) == 2
    for items in lists:
        assert [int(number) for number, _ in items] == list(range(1, len(items) + 1))
    example, main = ([word for _, word in items] for items in lists)
    times = (6, 1) if record.length < 4096 else (30, 3)
    counts = Counter(main)
    assert {word for word, count in counts.items() if count == times[0]} == set(record.references)
    assert set(counts.values()) == set(times) and len(record.references) == 10
    assert len(counts) == 10 + record.meta["size"]
    assert not set(example) & set(main) and sorted(Counter(example).values()) == [1] * 10 + [3] * 10
    solved = [word for word, count in Counter(example).items() if count == 3]
    line = record.context.split("\n\n")[3]
    assert set(re.findall(r"\w+", line.removeprefix(record.prefix))) == set(solved)
    facts = Counter(record.context[a:b].split()[1] for a, b in record.facts)
    assert facts == dict.fromkeys(record.references, times[0])
    every = {word for category in ("nouns", "adjectives", "verbs") for word in vocabulary(category)}
    assert {*main, *example} <= every


def check_frequent(record: Record) -> None:
    text = record.context.split("\n\n")[1].split()
    ranked = Counter(text).most_common()
    assert ranked[0][0] == "..." and [word for word, _ in ranked[1:4]] == list(record.references)
    assert ranked[1][1] > ranked[2][1] > ranked[3][1] > ranked[4][1]
    counts = zipf_counts(record.meta["size"], record.length // 50)
    assert [count for _, count in ranked] == [count for count in counts if count]
    assert all(re.fullmatch(r"[a-z]{6}", word) for word, _ in ranked[1:])
    assert len(record.facts) == sum(count for _, count in ranked[1:4])


def check_qa(record: Record) -> None:
    passages = re.findall(r"Passage (\d+):\n(.+?)(?=\n\nPassage|\Z)", record.context, re.S)
    assert [int(number) for number, _ in passages] == list(range(1, len(passages) + 1))
    assert len({text for _, text in passages}) == len(passages) == record.meta["size"] + len(record.facts)
    right = [record.context[a:b] for a, b in record.facts]
    assert len(right) == (1 if record.task == "qa_1" else 2)
    (answer,) = record.references
    assert words_in(record.context)[answer] == 1 and sum(answer in text for text in right) == 1
    name = re.search(r"([A-Z]\w+ [A-Z]\w+)(?: born| move| a trade)", record.question)[1]  # type: ignore[index]
    if record.task == "qa_1":
        assert f"{name} was" in right[0]
        before = "born in" if "born" in record.question else "moved to"
        assert f"{name} was born" in right[0] and f"{before} {answer}" in right[0]
    else:
        first, second = sorted(right, key=lambda text: f"{name} was born" not in text)
        teacher = re.search(rf"{name} was .* where (\w+ \w+) taught", first)[1]  # type: ignore[index]
        assert f"{teacher} was born in {answer} " in second


@pytest.mark.model
@pytest.mark.parametrize("length", [1024, 4096, 28_000])
@pytest.mark.parametrize("name", TASKS)
def test_every_task_with_a_real_tokenizer(smol: Any, name: str, length: int) -> None:
    for index in (0, 1) if length < 28_000 else (2,):
        record = TASKS[name].make(smol, length, 42, index)
        # Less than a unit short: a passage, a pair of UUIDs, or a few per cent.
        check(record, smol, 100 if name[:2] == "qa" or name == "niah_multikey_3" else max(30, length // 200))
        assert record.substitute == (name in ESSAYS or name[:2] == "qa")
        spans = fact_tokens(smol, record)
        chat = smol.apply_chat_template([{"role": "user", "content": record.request}], tokenize=False)
        wrapped = fact_tokens(smol, record, chat, add_special_tokens=False)
        ids = smol.encode(chat, add_special_tokens=False)
        for (start, end), (first, last), (a, b) in list(zip(record.facts, spans, wrapped, strict=True))[:20]:
            text = record.context[start:end]
            assert smol.decode(record.prompt_token_ids[first:last]).strip() == text == smol.decode(ids[a:b]).strip()


@pytest.mark.parametrize("name", TASKS)
def test_every_length_is_filled_and_never_exceeded(name: str) -> None:
    tokenizer = Words()
    for length in range(1000, 1030):
        check(TASKS[name].make(tokenizer, length, 7, 3), tokenizer, 90 if name == "niah_multikey_3" else 45)
    before = tokenizer.calls
    TASKS[name].make(tokenizer, 28_000, 7, 3)
    assert tokenizer.calls - before <= 10


@pytest.mark.parametrize("name", TASKS)
def test_no_more_fits(name: str) -> None:
    tokenizer = Words()
    record = TASKS[name].make(tokenizer, 1500, 0, 0)
    used = len(record.prompt_token_ids) + record.max_new_tokens
    sizes = [TASKS[name].draft(_order(name, 1500)).build(record.meta["size"] + more) for more in (0, 1)]
    same, longer = (len(tokenizer.encode(f"{p.context}\n\n{p.question}\n\n{p.prefix}")) for p in sizes)
    assert same == len(record.prompt_token_ids)
    # One unit of fwe may leave the text as it is.
    assert longer + record.max_new_tokens > 1500 or (name == "fwe" and longer == same and used > 1495)


def _order(name: str, length: int) -> Any:
    from pagelocks.eval.ruler.base import Order

    return Order(name, length, 0, 0, None)


@pytest.mark.parametrize("name", TASKS)
def test_task_length_seed_and_index_decide(name: str) -> None:
    tokenizer = Words()
    later = [TASKS[name].make(tokenizer, 1200, 42, index) for index in (3, 0)]
    assert later == [TASKS[name].make(tokenizer, 1200, index=index) for index in (3, 0)]
    records = [TASKS[name].make(tokenizer, 1200, seed, index) for seed in range(3) for index in range(4)]
    assert len({record.references for record in records}) == len(records)
    assert TASKS[name].make(tokenizer, 1201, 42, 0).references != later[1].references


def test_the_same_record_in_another_process_and_release() -> None:
    # Pinned: numbers that were published with records must stay theirs.
    record = TASKS["fwe"].make(Words(), 1000, 42, 0)
    assert record.references == ("wjcmlb", "auyabm", "eggfjh")
    assert TASKS["vt"].make(Words(), 1000, 42, 0).references == ("HXGLT", "HDWZD", "NXCBM", "VNQWE", "FMCNK")


def test_counts_follow_zipf_with_exponent_2() -> None:
    # 1000 / 1.6449 = 607.9, then a quarter, a ninth, ... of it.
    assert zipf_counts(1000, 6) == [607, 151, 67, 37, 24, 16]


def test_cwe_repeats_less_below_4096_tokens() -> None:
    times = [TASKS["cwe"].make(Words(), length).meta["times"] for length in (4095, 4096)]
    assert times == [(6, 1), (30, 3)]


def test_distinct_values_are_drawn_again() -> None:
    draws, used = iter([1, 1, 2, 1, 2, 3]), set[int]()
    assert [distinct(lambda: next(draws), used) for _ in range(3)] == [1, 2, 3]


def test_facts_stand_everywhere() -> None:
    for name in ("niah_single_1", "niah_single_2", "niah_multikey_2", "qa_1"):
        records = [TASKS[name].make(Words(), 1200, 0, index) for index in range(30)]
        found = [record.facts[0][0] / len(record.context) for record in records]
        assert min(found) < 0.25 and max(found) > 0.75, name


def make_up(name: str, references: tuple[str, ...]) -> Record:
    return Record(name, 9, 0, 0, "", "", "", references, 1, (), (), False, {})


@pytest.mark.parametrize(
    ("name", "references", "answer", "expected"),
    [
        ("niah_single_1", ("1234567",), "is 1234567.", 1.0),
        ("niah_single_1", ("1234567",), "is 123456 7.", 0.0),
        ("niah_multivalue", ("11", "22", "33", "44"), "11, 33 and 55", 0.5),
        ("vt", ("ABCDE", "FGHIJ"), "abcde", 0.5),
        ("cwe", ("tree", "sky"), "TREE\n\nSky", 1.0),
        ("cwe", ("tree", "sky"), "tr\x00ee s\x1f\x07ky", 1.0),
        ("fwe", ("abcdef", "bcdefg", "cdefgh"), "cdefgh", 1 / 3),
        ("qa_1", ("the Rhine", "Rhine River"), "it is THE RHINE", 1.0),
        ("qa_2", ("yes", "no"), "maybe", 0.0),
        ("qa_2", ("yes",), "", 0.0),
    ],
)
def test_scores(name: str, references: tuple[str, ...], answer: str, expected: float) -> None:
    assert score(answer, make_up(name, references)) == pytest.approx(expected)


def test_the_score_of_a_task_is_the_mean_times_100() -> None:
    records = [make_up("vt", ("A", "B")), make_up("vt", ("C", "D")), make_up("vt", ("E", "F"))]
    assert score_task(["a b", "c", "x"], records) == pytest.approx(50)
    for answers, of in ((["a"], records), ([], []), (["a", "b"], [records[0], make_up("cwe", ("A",))])):
        with pytest.raises(ValueError, match=r"is not allowed: one answer for each record, and records of one task"):
            score_task(answers, of)
    with pytest.raises(ValueError, match=r"answer=None is not allowed: a string"):
        score(None, records[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TASKS)
def test_too_short_a_length_names_one_that_works(name: str) -> None:
    for index in range(10):
        with pytest.raises(ValueError, match=rf"length=60 is not allowed: {name} takes at least \d+ tokens") as caught:
            TASKS[name].make(Words(), 60, 0, index)
        remedy = re.search(r"Ask for (\d+) or more", str(caught.value))
        assert remedy and len(TASKS[name].make(Words(), int(remedy[1]), 0, index).prompt_token_ids) > 0


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("vt", {"length": "4096"}, r"length='4096' is not allowed: a whole number"),
        ("vt", {"length": 4096.0}, r"length=4096.0 is not allowed: a whole number"),
        ("vt", {"length": 0}, r"length=0 is not allowed: the least is 1"),
        ("vt", {"seed": None}, r"seed=None is not allowed: a whole number"),
        ("vt", {"index": True}, r"index=True is not allowed: a whole number"),
        ("vt", {"index": -1}, r"index=-1 is not allowed: the least is 0"),
        ("vt", {"source": "a.txt"}, r"source='a.txt' is not allowed: vt takes no file. Leave source out"),
        ("niah_single_2", {"source": "/no/such.txt"}, r"source='/no/such.txt' is not allowed: a text file is needed"),
        ("qa_1", {"source": "/no/such"}, r"source='/no/such' is not allowed: a JSON file of SQuAD v2"),
        ("qa_2", {"source": "/no/such"}, r"source='/no/such' is not allowed: a JSON file of HotpotQA"),
    ],
)
def test_bad_values_say_what_is_allowed(name: str, change: dict[str, Any], message: str) -> None:
    tokenizer = Words()
    with pytest.raises(ValueError, match=message):
        TASKS[name].make(tokenizer, **{"length": 2000, **change})
    assert tokenizer.calls == 0


def test_an_unknown_task_gets_the_list() -> None:
    with pytest.raises(ValueError, match=r"task='niah' is not allowed: one of niah_single_1, .*, qa_2"):
        task("niah")
    assert len(TASKS) == 13 and all(task(name) is made and made.name == name for name, made in TASKS.items())
    expected = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
    assert {name: made.max_new_tokens for name, made in TASKS.items()} == dict.fromkeys(KINDS, 128) | expected


def test_missing_words_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    vocabulary.cache_clear()
    for name in ("cwe", "niah_single_1"):
        with pytest.raises(ImportError, match=r"wonderwords: run pip install 'pagelocks\[eval\]'"):
            TASKS[name].make(Words(), 2000)


def test_cwe_longer_than_its_words_says_so() -> None:
    with pytest.raises(ValueError, match=r"length=500000 is not allowed: the \d+ words that there are fill \d+ tokens"):
        TASKS["cwe"].make(Words(), 500_000)
