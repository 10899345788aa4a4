"""What stands before and after the context, task by task: our own words, and the answer forms that the scores read."""

# ruff: noqa: RUF001 (Chinese has its own comma)

from __future__ import annotations

Around = tuple[str, str]
"""Text before and after the context; {input}, {options[0]} and {call} stand for the row's."""

_PASSAGES = (
    "Several passages follow, and a question that they answer together. Reply with the bare answer, nothing else.\n\n",
    "\n\nUse the passages above to answer. Give the bare answer, nothing else.\n\nQuestion: {input}\nAnswer:",
)
_CODE = "Here is some code. Write the line that comes next.\n\n"
_UNANSWERABLE = (
    'Answer with a phrase or a sentence, as short as can be, without an explanation. Say "yes" or "no" where that is '
    'asked, and "unanswerable" where the article does not tell.'
)

# Where the input of a task ends in "Type:", "Summary:" or the like, it is the file's, after examples of that form.
LONGBENCH: dict[str, Around] = {
    "narrativeqa": (
        "The text below is a story, from a novel or a film script. A question about it comes after it.\n\nStory: ",
        "\n\nAnswer from the story, with a single phrase if one will do, and explain nothing.\n\n"
        "Question: {input}\n\nAnswer:",
    ),
    "qasper": (
        f"Below is a scientific article, then a question about it. {_UNANSWERABLE}\n\nArticle: ",
        f"\n\nThat was the article. {_UNANSWERABLE}\n\nQuestion: {{input}}\n\nAnswer:",
    ),
    "multifieldqa_en": (
        "A question follows this text; it wants a brief answer.\n\n",
        "\n\nNow the question. Take the answer from the text and write nothing besides it.\n\n"
        "Question: {input}\nAnswer:",
    ),
    "multifieldqa_zh": (
        "下面是一篇文章，文章之后有一个问题，请用中文作简短的回答。\n\n",
        "\n\n请根据文章内容回答问题，只写答案本身，别的一概不写。\n\n问题：{input}\n回答：",
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "dureader": (
        "下面有若干篇文章，之后有一个问题，答案要从这些文章里找。\n\n文章：",
        "\n\n根据这些文章，回答这个问题。\n\n问题：{input}\n回答：",
    ),
    "gov_report": (
        "This is a report of a government agency. Sum it up on about one page.\n\nReport:\n",
        "\n\nThe report ends here. Write the summary, about one page of it.\n\nSummary:",
    ),
    "qmsum": (
        "You get the transcript of a meeting and then a question or a task about it; a few sentences will do.\n\n"
        "Transcript:\n",
        "\n\nReply from the transcript, in one sentence or a few.\n\nQuery: {input}\nAnswer:",
    ),
    "multi_news": (
        "These are several news articles on one matter. Sum them up on about one page.\n\nNews:\n",
        "\n\nThe articles end here. Write one summary of all of them, about a page.\n\nSummary:",
    ),
    "vcsum": (
        "请阅读这份会议记录，读完后概括会议讨论了什么。\n会议记录：\n",
        "\n\n会议总结：",
    ),
    "trec": (
        "Questions and their types are listed below. Name the type of the last question.\n\n",
        "\n{input}",
    ),
    "triviaqa": (
        "Passages with questions follow, the first ones answered. Answer the last one as they are answered, without a "
        "word more.\n\n",
        "\n\n{input}",
    ),
    "samsum": (
        "Dialogues follow, each with a summary of a few short sentences. Write the summary of the last one.\n\n",
        "\n\n{input}",
    ),
    "lsht": (
        "下面列出一些新闻和它们的类别，请写出最后一条新闻的类别。\n\n",
        "\n{input}",
    ),
    "passage_count": (
        "Paragraphs from Wikipedia follow, and some of them come more than once. Find out how many different ones "
        "there are.\n\n",
        "\n\nHow many different paragraphs were there, repeats not counted? Write the number alone, such as 7.\n\n"
        "The number is: ",
    ),
    "passage_retrieval_en": (
        "Numbered paragraphs from Wikipedia follow, and then an abstract of one of them. Find out of which.\n\n",
        "\n\nThis is the abstract.\n\n{input}\n\nWhich paragraph does it sum up? Write your answer in the form "
        '"Paragraph 3".\n\nThe paragraph is: ',
    ),
    "passage_retrieval_zh": (
        "下面是一些带编号的段落，最后是其中某一段的摘要，请找出是哪一段。\n\n",
        '\n\n摘要如下：\n\n{input}\n\n这是哪一段的摘要？请按"段落3"这样的格式写出编号。\n\n该段落是：',
    ),
    "lcc": (_CODE, "The next line:\n"),
    "repobench-p": (_CODE, "{input}The next line:\n"),
}

_HIDDEN = "Something that matters is hidden in the text below, among much that does not. Find it: {} is asked for.\n\n"
_OPTIONS = "\nA. {options[0]}\nB. {options[1]}\nC. {options[2]}\nD. {options[3]}\n\n"

INFINITEBENCH: dict[str, Around] = {
    "passkey": (_HIDDEN.format("a pass key"), "\n\n{input}\n\nThe pass key is"),
    "number_string": (_HIDDEN.format("a sequence of digits"), "\n\n{input}\n\nThe sequence of digits is"),
    "kv_retrieval": (
        "A JSON object follows, and then one of its keys. Give the value of that key.\n\n",
        "\n\n{input}",
    ),
    "longbook_qa_eng": (
        "A book follows, and then a question about it. Answer in as few words as you can.\n\n",
        "\n\nQuestion: {input}\nShort answer:",
    ),
    "longbook_qa_chn": (
        "下面是一本书，书后有一个问题，请用尽量少的字回答。\n\n",
        "\n\n问题：{input}\n简短的答案：",
    ),
    "longbook_choice_eng": (
        "A book follows, and then a question with four answers to choose from.\n\n",
        "\n\nQuestion: {input}\n" + _OPTIONS + "One of the four is right. The letter of the right one alone:",
    ),
    "longbook_sum_eng": (
        "Sum up the book that follows.\n\n",
        "\n\nThe book ends here.\n\nSummary:",
    ),
    "longdialogue_qa_eng": (
        'In the script below one mention of a character\'s name has been overwritten with "$$MASK$$".\n\n',
        "\n\nThe script ends here. Whose name was it? Write the name as it stands before the colons, and nothing "
        'else.\n\nThe name under "$$MASK$$" is',
    ),
    "math_find": (
        "A list of numbers follows. One number is to be found in it.\n\n",
        "\n\n{input}",
    ),
    # Each result after the first number: the published answers have no value for that one.
    "math_calc": (
        "Work out a long sum from left to right, and write down the result after each operation, nothing else.\n\n"
        "Expression: 2 + 5 - 4\nValues: [7, 3]\n\nExpression: 9 - 1 + 6 - 3\nValues: [8, 14, 11]\n\nExpression: ",
        "\nValues:",
    ),
    "code_run": (
        "The Python functions below call one another. The value of one call is asked for.\n\n",
        "\n\nWork out what {call} returns. End with that number alone.\n\n{call} returns",
    ),
    # A letter without a full stop or a colon would count as wrong.
    "code_debug": (
        "Exactly one function in the Python code below was given an error on purpose, one that makes it crash.\n\n",
        "\n\nWhich of these functions is it?\n" + _OPTIONS + 'Give its letter with a full stop, in the form "X.", and '
        "then its name.\n\nThe function is",
    ),
}
