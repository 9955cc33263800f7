# Copyright 2026 The dice_tf Authors.
# SPDX-License-Identifier: Apache-2.0
"""How close written texts are to references: BLEU, NIST, METEOR, ROUGE-L and CIDEr.

Each metric is that of a library, on words of one tokenizer (13a, that of the BLEU and NIST
script mteval-v13a), in lower case. A metric that cannot be computed here is reported with
the reason, never replaced by another. Values differ from those of the scripts of the E2E
challenge where the implementations do: METEOR is that of NLTK (version 1.0; not the Java
program, and it looks synonyms up by stems, so that it finds fewer), ROUGE-L the F-measure
of rouge-score.
"""

import io
import pathlib
import statistics
from typing import NamedTuple
import warnings

NIST_ORDER = 5


class Score(NamedTuple):
    """The value of a metric, or why there is none.

    Attributes:
        name: Name of the metric.
        value: Float, or `None`.
        note: Text: what computed it, or what is missing.
    """

    name: str
    value: float | None
    note: str


def scores(references, texts, wordnet_dir):
    """Returns all metrics of written texts.

    Args:
        references: One non-empty list of reference texts per written text.
        texts: List of written texts.
        wordnet_dir: Folder of WordNet's database files, for the synonyms of METEOR.

    Returns:
        List of `Score`: BLEU and ROUGE-L in [0, 100], METEOR in [0, 1], NIST and CIDEr
        as their authors scale them.

    Example:

    >>> [s.value for s in scores([["a cat sat on a mat"]], ["a cat sat on a mat"], ".")][:1]
    [100.0]
    """
    if len(references) != len(texts) or not texts or not all(references):
        raise ValueError(
            "Every written text needs a reference. Received: "
            f"{len(texts)} texts and {len(references)} lists of references."
        )
    metrics = {
        "BLEU": bleu,
        "NIST": nist,
        "METEOR": lambda r, t: meteor(r, t, wordnet_reader(wordnet_dir)),
        "ROUGE-L": rouge_l,
        "CIDEr": cider,
    }
    found = []
    for name, metric in metrics.items():
        try:
            found.append(Score(name, *metric(references, texts)))
        except (ImportError, FileNotFoundError) as error:
            found.append(Score(name, None, f"missing: {error}"))
    return found


def bleu(references, texts):
    """Returns BLEU-4 of the whole set by sacrebleu, in [0, 100], and a note."""
    import sacrebleu

    # sacrebleu takes the first references of all texts, then the second ones, ...
    most = max(map(len, references))
    by_number = [[r[k] if k < len(r) else None for r in references] for k in range(most)]
    metric = sacrebleu.BLEU(lowercase=True)
    return metric.corpus_score(texts, by_number).score, f"sacrebleu, {metric.get_signature()}"


def nist(references, texts):
    """Returns NIST of the whole set by NLTK, and a note."""
    from nltk.translate import nist_score

    references, texts = _words(references, texts)
    # NLTK divides by the number of n-grams written, which is 0 for orders above this.
    order = min(NIST_ORDER, max(map(len, texts)))
    value = nist_score.corpus_nist(references, texts, n=order) if order else 0.0
    return float(value), f"nltk, order {NIST_ORDER}"


def meteor(references, texts, wordnet):
    """Returns the mean METEOR by NLTK, the best reference of each text counting, and a note.

    Args:
        references: One list of reference texts per written text.
        texts: List of written texts.
        wordnet: NLTK's reader of WordNet, for synonyms.
    """
    from nltk.translate import meteor_score

    value = statistics.fmean(
        meteor_score.meteor_score(r, t, wordnet=wordnet)
        for r, t in zip(*_words(references, texts), strict=True)
    )
    return value, "nltk, METEOR 1.0 with WordNet"


def rouge_l(references, texts):
    """Returns the mean F-measure of ROUGE-L, the best reference counting, and a note."""
    from rouge_score import rouge_scorer

    scorer = rouge_scorer.RougeScorer(["rougeL"])
    values = [
        scorer.score_multi(r, t)["rougeL"].fmeasure for r, t in zip(references, texts, strict=True)
    ]
    return 100 * statistics.fmean(values), "rouge-score, F-measure without stemming"


def cider(references, texts):
    """Returns CIDEr-D by pycocoevalcap, and a note."""
    from pycocoevalcap.cider import cider as of_coco

    references, texts = _words(references, texts)
    join = " ".join
    value, _ = of_coco.Cider().compute_score(
        {i: [join(r) for r in each] for i, each in enumerate(references)},
        {i: [join(t)] for i, t in enumerate(texts)},
    )
    return float(value), "pycocoevalcap, CIDEr-D"


def wordnet_reader(folder):
    """Returns NLTK's reader on the database files of WordNet.

    Args:
        folder: Folder with `data.noun`, `index.noun`, ... as in Debian's wordnet-base.

    Raises:
        FileNotFoundError: If they are not there.
    """
    import nltk
    from nltk.corpus.reader.wordnet import WordNetCorpusReader

    class Reader(WordNetCorpusReader):
        """Without the list of lexicographers' files, and the map to other languages."""

        def open(self, file):
            if file != "lexnames":
                return super().open(file)
            # Debian leaves it out. 45 files; synonyms do not need their names.
            return io.StringIO("".join(f"{i} file{i} 0\n" for i in range(45)))

        def map_wn(self, version="wordnet"):
            return None

    folder = pathlib.Path(folder).absolute()
    if not (folder / "index.noun").is_file():
        raise FileNotFoundError(
            f"WordNet, of which there is no {folder / 'index.noun'}: install Debian's package "
            "wordnet-base, or pass the folder as --wordnet_dir"
        )
    # NLTK reads from folders that it was told about only.
    if str(folder) not in nltk.data.path:
        nltk.data.path.append(str(folder))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The multilingual functions")
        return Reader(str(folder), None)


def _words(references, texts):
    from sacrebleu.tokenizers import tokenizer_13a

    split = lambda text: tokenizer_13a.Tokenizer13a()(text.lower()).split()
    return [[split(r) for r in each] for each in references], [split(t) for t in texts]
