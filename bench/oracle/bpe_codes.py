"""Codes of subword-nmt 0.3.8 and how they split texts, for the tests of ours.

    python bench/oracle/bpe_codes.py       # with subword-nmt==0.3.8; writes bench/oracle/golden/bpe_codes.json

The codes are learnt from words made of syllables, so that pieces overlap in many ways. Cases: texts of such words, of words
with characters that the codes have never seen, and of single characters.
"""

import importlib.metadata
import io
import json
import pathlib
import random

from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

VERSION = "0.3.8"
PATH = pathlib.Path(__file__).resolve().parent / "golden" / "bpe_codes.json"
SYLLABLES = ["la", "lo", "low", "er", "est", "ab", "aba", "ba", "n", "ne", "new", "wi", "de", "é", "ü", "家", "東", "aa", "a", "-", "'s", "1", "12"]
STRANGE = ["Q", "ø", "👍", "e\u0301", "@", "@@", "</w>", "<", "#", "1", "\u00ad"]


def word(rng, parts):
    return "".join(rng.choice(parts) for _ in range(rng.randint(1, 6)))


def main():
    assert importlib.metadata.version("subword-nmt") == VERSION
    rng = random.Random(9)
    frequent = [word(rng, SYLLABLES) for _ in range(300)]
    text = "\n".join(" ".join(rng.choice(frequent) for _ in range(12)) for _ in range(400))
    codes = io.StringIO()
    learn_bpe(io.StringIO(text), codes, 500)
    bpe = BPE(io.StringIO(codes.getvalue()))
    pools = [frequent, [word(rng, SYLLABLES) for _ in range(400)], [word(rng, SYLLABLES + STRANGE) for _ in range(400)], SYLLABLES + STRANGE]
    texts = [" ".join(rng.choice(pool) for _ in range(rng.randint(1, 5))) for pool in pools for _ in range(100)]
    texts += ["", "a" * 7, "ab" * 9, "aba" * 5, " two  spaces "]
    cases = [[text, bpe.segment(text).strip()] for text in texts]
    golden = {"subword-nmt": VERSION, "codes": codes.getvalue(), "cases": cases}
    PATH.write_text(json.dumps(golden, separators=(",", ":")).replace('],["', '],\n["') + "\n")


if __name__ == "__main__":
    main()
