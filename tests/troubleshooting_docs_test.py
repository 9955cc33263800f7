# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""docs/troubleshooting.md: every message of dice_tf is there, and no other."""

import ast
import inspect
import pathlib
import re

import pytest

from dice_tf import errors

ROOT = pathlib.Path(__file__).absolute().parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
SOURCES = sorted((ROOT / "dice_tf").rglob("*.py"))

# Texts that a message takes in: (file, function or name, how many messages come from there).
REASONS = [
    ("checks/model_checks.py", "_problem", 5),
    ("training/optimizer_arguments.py", "_REFUSED_KERAS_ARGUMENTS", 5),
    ("training/optimizers.py", "_WRAPPERS", 2),
    ("training/optimizers.py", "_refusal", 4),
    ("engine/recording.py", "_refusal", 5),
    ("engine/recording.py", "finished_calls", 2),
    ("accounting/loss_distribution.py", "loss_distribution_curve", 3),
]


def template(node):
    """Returns the text of a string expression, with … for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return "…"


def plain(text):
    """Returns text without line breaks, and with one … for several and for their commas."""
    return re.sub(r"…(, …|….…)*", "…", " ".join(text.split()))


def messages():
    """Returns pairs of a place and the template of every message that is raised or warned."""
    found = []
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not (isinstance(call, ast.Call) and call.args):
                continue
            warns = ast.unparse(call.func) in ("warnings.warn", "logging.warning", "logging.warn")
            if isinstance(node, ast.Raise) or warns:
                name = f"{source.relative_to(ROOT)}:{node.lineno}"
                found.append((name, plain(template(call.args[0]))))
    return found


def headline(message):
    """Returns what a message says first: up to its remedy and to the values received."""
    return re.split(r"(?<=[^.])\.? Received|\.? \(received|(?<=[^.])\. ", message)[0].rstrip(".")


def reasons(file, name):
    """Returns the texts that a function returns or collects, or that a constant holds."""
    tree = ast.parse((ROOT / "dice_tf" / file).read_text(encoding="utf-8"))
    (owner,) = [
        node
        for node in ast.walk(tree)
        if getattr(node, "name", None) == name
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name)
    ]
    nodes = [
        value
        for node in ast.walk(owner)
        for value in (
            [node.value] if isinstance(node, ast.Return)
            else node.values if isinstance(node, ast.Dict)
            else node.args if isinstance(node, ast.Call) and name != "_problem"
            else []
        )
    ]  # fmt: skip
    texts = [plain(template(node)) for node in nodes if node is not None]
    return [text for text in texts if text.count(" ") > 2]


def quotes():
    """Returns the messages that the page quotes, each as one line."""
    blocks = re.findall(r"(?:^>.*\n)+", PAGE, re.MULTILINE)
    lines = [block.replace("\n>", "\n").lstrip(">") for block in blocks]
    return [plain(quote) for block in lines for quote in re.split(r"\n\s*\n", block)]


def same(text):
    """Returns text with what the page may leave out removed: stops and final gaps."""
    return text.rstrip("….: ")


MESSAGES = messages()
REASON_TEXTS = [(f"{file}:{name}", text) for file, name, _ in REASONS
                for text in reasons(file, name)]  # fmt: skip
QUOTES = quotes()


def test_messages_have_at_most_sixty_words():
    assert [name for name, text in MESSAGES if len(text.split()) > 60] == []


def test_messages_are_found():
    assert len(MESSAGES) > 90 and len(QUOTES) > 90
    # All of them, or a message could hide behind a variable: these carry nothing but one.
    assert [name for name, text in MESSAGES if len(text.replace("…", "")) < 12] == []
    for file, name, count in REASONS:
        assert len(reasons(file, name)) == count, (file, name, reasons(file, name))


@pytest.mark.parametrize("name, text", MESSAGES + REASON_TEXTS, ids=lambda value: value[:40])
def test_every_message_is_on_the_page(name, text):
    del name
    start = same(headline(text))
    assert any(start in quote for quote in QUOTES), f"docs/troubleshooting.md lacks: {text}"


@pytest.mark.parametrize("quote", QUOTES, ids=lambda value: value[:60])
def test_no_quote_is_of_a_message_that_is_gone(quote):
    known = [text for _, text in MESSAGES + REASON_TEXTS]
    # A quote may join a message and the reason in it.
    heads = [text for text in known if text.endswith("…")]
    parts = [quote, *(quote[len(same(h)) :] for h in heads if quote.startswith(same(h)))]
    assert any(same(part).strip() in text for part in parts for text in known), quote


def test_every_class_of_error_is_named():
    classes = [name for name, value in vars(errors).items() if inspect.isclass(value)]
    assert len(classes) > 10
    for name in classes:
        assert f"`{name}`" in PAGE or f"`dice_tf.errors.{name}`" in PAGE, name


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
