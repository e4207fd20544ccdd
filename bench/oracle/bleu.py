"""BLEU of sacreBLEU 2.6.0 over many small corpora, for the tests of ours.

    python bench/oracle/bleu.py            # with sacrebleu==2.6.0; writes bench/oracle/golden/bleu.json

`tokens` holds lines and what the 13a tokenizer makes of them. A case holds hypotheses, for each its references, how they are
split and whether in lower case, and what sacreBLEU says: lengths, counts, the score, and the line that it prints.
"""

import json
import pathlib
import random

import sacrebleu
from sacrebleu.metrics import BLEU
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

VERSION = "2.6.0"
PATH = pathlib.Path(__file__).resolve().parent / "golden" / "bleu.json"

WORDS = """the a of house houses old green tree trees walks walked slowly to 1 2,000 3.14 10-20 U.S. e.g. don't it's "quoted"
(in brackets) [square] {curly} 50% $5 a/b x=y semi; colon: comma, stop. what? no! dash- -dash well-known A.B.C. ... , . - & &amp; &quot;so&quot;
&lt;tag&gt; <skipped> Straße naïve Ünïcödé ÉCOLE über dž ß İstanbul 家 東京 日本語、 これは。 привет мир Ελλάδα مرحبا שלום 👍 👩‍👩‍👧 e\u0301 \u00a0
a\u00a0b a\u2003b \u200b x\u200by a\u3000b #tag @you ^ ~ ` | \\ _under_ *star* 1,000,000.50 .5 5. 5, ,5 1.a a.1 1-a a-1 --"""
# Not split(): some of the words are spaces.
WORDS = WORDS.replace("\n", " ").split(" ")

LINES = [
    "", " ", "\t", ".", ",", "...", ". . .", "-", "1-", "-1", "1-2-3", "a.b", "a.1", "1.a", "1.1", "1,1", "a,b", "1.", "a.", ".1", ".a", ",,1,,",
    "&amp;lt;", "&quot;&amp;&lt;&gt;", "&amp;quot;", "&", "&&amp;", "<skipped>", "a<skipped>b", "<<skipped>skipped>", "a-\nb", "a\nb", "a - b",
    "Hello, world!", "It's 5 o'clock.", "(a)[b]{c}", "a/b\\c", "3.14,15", "U.S.A.", "e.g., this", "\u00a0x\u00a0", "x\u2028y", "x\x1cy\x1fz", "x\x85y",
    "\u0660.\u0661", "\u00b2.5", "日本。語", "１.２", "«quoted»", "—dash—", "’tis", "\u200b.\u200b", "a\rb", "5-\u20ac", "9.-9", "a.,b", "1.,2", "!@#$%^&*()_+",
]


def options():
    return [("13a", False), ("13a", True), ("char", False), ("none", False), ("none", True)]


def case(hypotheses, references, tokenize="13a", lowercase=False):
    """`references`: a list for each hypothesis, of any length; sacreBLEU wants it the other way round."""
    most = max((len(refs) for refs in references), default=0)
    streams = [[refs[i] if i < len(refs) else None for refs in references] for i in range(most)]
    score = BLEU(tokenize=tokenize, lowercase=lowercase, force=True).corpus_score(hypotheses, streams)
    return {
        "hypotheses": hypotheses, "references": references, "tokens": tokenize, "lower_case": lowercase,
        "sys_len": score.sys_len, "ref_len": score.ref_len, "correct": score.counts, "total": score.totals,
        "score": score.score, "text": str(score),
    }


def sentence(rng, longest):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(0, longest)))


def changed(rng, text):
    """The same with words left out, doubled, exchanged or in other order: something between a bad and a good translation."""
    words = []
    for word in text.split(" "):
        words.extend(rng.choice([[word], [word], [word], [word], [], [word, word], [rng.choice(WORDS)], [word.upper()]]))
    if len(words) > 1 and rng.random() < 0.3:
        i = rng.randrange(len(words) - 1)
        words[i], words[i + 1] = words[i + 1], words[i]
    return " ".join(words)


def by_hand():
    pairs = [
        ([""], [["a b c d"]]),
        (["a b c d"], [[""]]),
        ([""], [[""]]),
        (["a"], [["a"]]),
        (["a b c"], [["a b c"]]),
        (["a b c d"], [["a b c d"]]),
        (["a b c d e"], [["a b c d"]]),
        (["x y z w v"], [["a b c d e"]]),
        (["a x b y c z d"], [["a b c d"]]),
        (["a b x c d y"], [["a b c d"]]),
        (["a a a a a a"], [["a a b"]]),
        (["the the the the", ""], [["the cat is on the mat"], ["there is a cat"]]),
        (["a b c d e f"], [["a b c d e f g h"], ]),
        (["a b c d e f"], [["a b c d e", "a b c d e f g"]]),
        (["a b c d e f"], [["a b c d e f g", "a b c d e"]]),
        (["the cat sat"], [["a cat sat down here", "the dog sat", "the cat lay"]]),
        (["It is a guide to action.", "He read the book, too!"], [["It is a guide to action that ensures.", "It is the guide."], ["He was reading it, too!"]]),
        (["a b c d  "], [["  a b c d"]]),
        (["A B C D"], [["a b c d"]]),
        (["ÀÉÎ Straße ΣΑΣ DŽ"], [["àéî strasse σας dž"]]),
        (["日本語のテスト。"], [["日本語のテスト！"]]),
        (["a b c d", "x", "", "e f g h i"], [["a b c d"], ["y"], ["z"], ["e f g h j"]]),
    ]
    for hypotheses, references in pairs:
        for tokenize, lowercase in options():
            yield case(hypotheses, references, tokenize, lowercase)


def at_random():
    rng = random.Random(6)
    for number in range(120):
        longest = rng.choice([3, 8, 25])
        references = [[sentence(rng, longest) for _ in range(rng.choice([1, 1, 2, 3]))] for _ in range(rng.choice([1, 3, 8]))]
        hypotheses = [rng.choice([changed(rng, refs[0]), changed(rng, refs[-1]), sentence(rng, longest)]) for refs in references]
        yield case(hypotheses, references, *options()[number % len(options())])


def main():
    assert sacrebleu.__version__ == VERSION, sacrebleu.__version__
    rng = random.Random(13)
    lines = LINES + [sentence(rng, 30) for _ in range(60)] + ["".join(rng.choice("a1.,- &/é家") for _ in range(20)) for _ in range(100)]
    tokens = [[line, Tokenizer13a()(line)] for line in lines]
    cases = ",\n".join(json.dumps(c, separators=(",", ":")) for c in [*by_hand(), *at_random()])
    head = json.dumps({"sacrebleu": VERSION, "tokens": tokens}, separators=(",", ":"))
    PATH.write_text(f'{head[:-1]},"cases":[\n{cases}\n]}}\n')


if __name__ == "__main__":
    main()
