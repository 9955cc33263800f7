# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""The scores of written texts equal values worked out by hand."""

import math
import pathlib
import sys
import types

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples"))

import text_scores

CAT, RUG = "The cat sat on the mat", "the cat sat on a mat"


class NoSynonyms:
    """A WordNet that knows no word."""

    def synsets(self, word):
        return []


class BigIsGrand:
    """A WordNet in which `big` and `grand` are one meaning."""

    def synsets(self, word):
        lemmas = [types.SimpleNamespace(name=lambda n=n: n) for n in ("big", "grand")]
        meaning = types.SimpleNamespace(lemmas=lambda: lemmas)
        return [meaning] if word in ("big", "grand") else []


def test_bleu():
    # Of 6 words, 5 pairs, 4 triples and 3 quadruples, these are in the reference.
    expected = 100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** (1 / 4)
    value, note = text_scores.bleu([[RUG]], [CAT])
    assert value == pytest.approx(expected)
    assert "case:lc" in note and "tok:13a" in note


def test_bleu_takes_another_number_of_references_for_each_text():
    assert text_scores.bleu([[RUG, "no", CAT], [RUG]], [CAT, RUG])[0] == pytest.approx(100)


def test_nist():
    # Words: a is 1 of 3 and b 2 of 3. Of two pairs written, `b b` is right; after b it
    # comes every second time.
    expected = (math.log2(3) + 2 * math.log2(1.5)) / 3 + 1 / 2
    assert text_scores.nist([["a b b"]], ["b b a"])[0] == pytest.approx(expected)


def test_nist_of_nothing_is_zero():
    assert text_scores.nist([["a b b"]], [""])[0] == 0


def test_meteor():
    # All three words in one piece.
    value, _ = text_scores.meteor([["a grand dog"]], ["A big dog"], BigIsGrand())
    assert value == pytest.approx(1 - 0.5 * (1 / 3) ** 3)
    # Two of three words, in two pieces.
    value, _ = text_scores.meteor([["a grand dog"]], ["A big dog"], NoSynonyms())
    assert value == pytest.approx(2 / 3 * 0.5)
    # The better reference counts, and texts are averaged.
    value, _ = text_scores.meteor([["x", "a grand dog"], ["x"]], ["A big dog", "y"], NoSynonyms())
    assert value == pytest.approx(1 / 3 / 2)


def test_rouge_l():
    # The longest common part is `the cat on mat`, 4 of 6 words on both sides.
    value, _ = text_scores.rouge_l([["no", "the cat lay on a mat"]], [CAT])
    assert value == pytest.approx(100 * 4 / 6)


def test_cider():
    # Every word and pair is in one of the two references: cosine 1 for two of four orders.
    assert text_scores.cider([["a b"], ["c d"]], ["A b", "c d"])[0] == pytest.approx(5)
    assert text_scores.cider([["a b"], ["c d"]], ["c d", "a b"])[0] == 0


@pytest.fixture
def wordnet(tmp_path):
    """The database files of a WordNet with one meaning of two words."""
    for kind in ("noun", "verb", "adj", "adv"):
        for name in (f"data.{kind}", f"index.{kind}", f"{kind}.exc"):
            (tmp_path / name).write_text("")
    (tmp_path / "data.adj").write_text("00000000 00 a 02 big 0 grand 0 000 | of great size  \n")
    entries = "".join(f"{word} a 1 0 1 0 00000000  \n" for word in ("big", "grand"))
    (tmp_path / "index.adj").write_text(entries)
    return tmp_path


def test_synonyms_come_from_database_files(wordnet):
    reader = text_scores.wordnet_reader(wordnet)
    value, _ = text_scores.meteor([["a grand dog"]], ["A big dog"], reader)
    assert value == pytest.approx(1 - 0.5 * (1 / 3) ** 3)


def test_all_metrics_are_reported(wordnet):
    found = text_scores.scores([[RUG], ["a grand dog"]], [CAT, "a big dog"], wordnet)
    assert [s.name for s in found] == ["BLEU", "NIST", "METEOR", "ROUGE-L", "CIDEr"]
    assert all(s.value > 0 for s in found)


def test_what_is_missing_is_reported_by_name(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    found = {s.name: s for s in text_scores.scores([[RUG], ["a dog"]], [CAT, "a dog"], tmp_path)}
    missing = {name for name, score in found.items() if score.value is None}
    assert missing == {"METEOR", "ROUGE-L"}
    assert "rouge_score" in found["ROUGE-L"].note
    assert "missing" in found["METEOR"].note and "wordnet-base" in found["METEOR"].note


@pytest.mark.parametrize("references", [[], [[RUG], [RUG]], [[]]])
def test_a_text_without_reference_is_refused(references):
    with pytest.raises(ValueError, match="needs a reference. Received: 1 texts and"):
        text_scores.scores(references, [CAT], ".")


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
