"""Golden F1 scores, for the tests of drumline's metrics.

    python bench/oracle/f1.py        # with scikit-learn and seqeval; writes bench/oracle/golden/f1.json

Classes are drawn at random, with some skill in the predictions; tags also in orders that break their own rules, such as an
I- at the beginning of a sentence.
"""

import json
import pathlib
import random
import warnings

from seqeval.metrics import f1_score as span_f1
from sklearn.metrics import f1_score

GOLDEN = pathlib.Path(__file__).resolve().parent / "golden"


def guesses(rng, target, classes, skill):
    return [right if rng.random() < skill else rng.randrange(classes) for right in target]


def class_case(rng, classes, length, ignored):
    # Rare classes are rarer still, so that some are absent.
    weights = [1 / (1 + place) ** 2 for place in range(classes)]
    target = rng.choices(range(classes), weights, k=length)
    predicted = guesses(rng, target, classes, 0.6)
    pairs = [(right, guess) for right, guess in zip(target, predicted) if right != ignored]
    rights, found = zip(*pairs)
    micro, macro = (f1_score(rights, found, average=average) for average in ["micro", "macro"])
    return dict(classes=classes, ignored=ignored, predicted=predicted, target=target, micro=micro, macro=macro)


def span_case(rng, prefixes, types, sentences):
    tags = ["O"] + [f"{prefix}-{kind}" for kind in types for prefix in prefixes]
    target = [[rng.randrange(len(tags)) for _ in range(rng.randint(1, 12))] for _ in range(sentences)]
    predicted = [guesses(rng, sentence, len(tags), 0.7) for sentence in target]
    names = [[[tags[tag] for tag in sentence] for sentence in which] for which in (target, predicted)]
    return dict(tags=tags, predicted=predicted, target=target, f1=float(span_f1(*names)))


def main():
    rng = random.Random(6)
    warnings.simplefilter("ignore")
    classes = [
        class_case(rng, count, length, ignored)
        for count in [2, 3, 10]
        for length in [3, 20, 100]
        for ignored in [None, 1, 2]
    ]
    spans = [
        span_case(rng, prefixes, types, sentences)
        for prefixes in ["BI", "BIES"]
        for types in [["A"], ["PER", "LOC", "ORG"]]
        for sentences in [1, 1, 4, 10, 30, 30]
    ]
    lines = {name: ",\n".join(json.dumps(case) for case in cases) for name, cases in [("classes", classes), ("spans", spans)]}
    text = ",\n".join(f'"{name}": [\n{cases}\n]' for name, cases in lines.items())
    (GOLDEN / "f1.json").write_text(f"{{\n{text}\n}}\n")


if __name__ == "__main__":
    main()
