//! BLEU, equal to sacreBLEU's default: 13a tokens, mixed case, up to 4 words, exponential smoothing, several references.
//!
//! An *n-gram* is n consecutive words. An n-gram of the hypothesis is *correct* at most as often as it occurs in one reference:
//! the one that has it most often.
//!
//! ```text
//!   each rank, each sentence: of_sentence ─▶ BleuStats ─ summed ─ to_sums ─▶ all-reduce ─▶ from_sums ─▶ score, once
//! ```
//! Only counts are summed, so the score does not depend on how sentences are divided among ranks. The tests compare with golden
//! files of the real package (`bench/oracle/bleu.py`).

mod ngrams;
mod tokens;

use crate::TextError;
use ngrams::{Counts, Ngrams};
use std::fmt;
use std::iter::Sum;
use std::ops::AddAssign;
use std::str::FromStr;

/// The number of words in the longest n-gram.
const ORDER: usize = 4;

/// How sentences are split before they are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BleuTokens {
    /// `13a`: like WMT's script mteval-v13a; for ordinary text, whose punctuation is attached to words.
    #[default]
    Mteval13a,
    /// `char`: each character except spaces (`eval_at_char_level`); for languages without spaces.
    Characters,
    /// `none`: only at white space.
    Words,
}

impl FromStr for BleuTokens {
    type Err = TextError;

    /// Parses sacreBLEU's names.
    fn from_str(name: &str) -> Result<Self, TextError> {
        match name {
            "13a" => Ok(Self::Mteval13a),
            "char" => Ok(Self::Characters),
            "none" => Ok(Self::Words),
            _ => Err(TextError::BleuTokens { name: name.to_owned() }),
        }
    }
}

/// Whether upper and lower case differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Case {
    /// `A` and `a` are different.
    #[default]
    Mixed,
    /// All text is converted to lower case (`-lc`).
    Lower,
}

/// How BLEU is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BleuOptions {
    /// How sentences are split.
    pub tokens: BleuTokens,
    /// Whether upper and lower case differ.
    pub case: Case,
}

impl FromStr for BleuOptions {
    type Err = TextError;

    /// Parses sacreBLEU's arguments, as in NJUNMT's `sacrebleu_args`: `-tok NAME` or `--tokenize NAME`, `-lc`.
    fn from_str(arguments: &str) -> Result<Self, TextError> {
        let mut options = Self::default();
        let mut words = arguments.split_whitespace();
        while let Some(word) = words.next() {
            match word {
                "-tok" | "--tokenize" => options.tokens = words.next().unwrap_or("").parse()?,
                "-lc" => options.case = Case::Lower,
                _ => return Err(TextError::BleuArgument { name: word.to_owned() }),
            }
        }
        Ok(options)
    }
}

/// The counts from which BLEU is computed. They are summed over sentences and ranks.
///
/// ```
/// use drumline_text::bleu::BleuStats;
///
/// let pairs = [("It is a guide, to action.", "It is the guide to action."), ("A b c d!", "A b c d!")];
/// let stats: BleuStats = pairs.iter().map(|(hypothesis, reference)| BleuStats::of_sentence(hypothesis, &[reference])).sum();
/// assert!((stats.score() - 51.14).abs() < 0.01);
/// assert_eq!(BleuStats::from_sums(&stats.to_sums()), stats);
/// println!("{stats}");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BleuStats {
    /// Words in the hypotheses.
    pub sys_len: u64,
    /// Words in the references; for each sentence, in the reference whose length is nearest.
    pub ref_len: u64,
    /// Correct n-grams in the hypotheses, for n from 1 to 4.
    pub correct: [u64; ORDER],
    /// All n-grams in the hypotheses, for n from 1 to 4.
    pub total: [u64; ORDER],
}

impl BleuStats {
    /// The counts of one sentence, with sacreBLEU's defaults. Without references nothing is correct.
    pub fn of_sentence(hypothesis: &str, references: &[&str]) -> Self {
        Self::with(&BleuOptions::default(), hypothesis, references)
    }

    /// The counts of one sentence.
    pub fn with(options: &BleuOptions, hypothesis: &str, references: &[&str]) -> Self {
        let hypothesis = options.split(hypothesis);
        let references: Vec<_> = references.iter().map(|reference| options.split(reference)).collect();
        let Counts { total, correct } = Ngrams::of(&hypothesis).count(&references);
        let sys_len = hypothesis.len();
        let nearest = references.iter().map(Vec::len).min_by_key(|len| (len.abs_diff(sys_len), *len));
        Self { sys_len: sys_len as u64, ref_len: nearest.unwrap_or(0) as u64, correct, total }
    }

    /// BLEU, from 0 to 100.
    pub fn score(&self) -> f64 {
        let logs: f64 = self.precisions().iter().map(|precision| precision.ln()).sum();
        self.brevity_penalty() * (logs / ORDER as f64).exp()
    }

    /// The percentage of correct n-grams, for each n. If none is correct for some n, it is smoothed (`exp`): the first such n gets
    /// half the percentage of one correct n-gram, the next a quarter, and so on. All are 0 if no n-gram at all is correct.
    pub fn precisions(&self) -> [f64; ORDER] {
        let mut precisions = [0.0; ORDER];
        if self.correct == [0; ORDER] {
            return precisions;
        }
        let mut smoothing = 1.0;
        for (precision, (correct, total)) in precisions.iter_mut().zip(self.correct.iter().zip(self.total)) {
            *precision = match (*correct, total) {
                (_, 0) => break,
                (0, total) => {
                    smoothing *= 2.0;
                    100.0 / (smoothing * total as f64)
                }
                (correct, total) => 100.0 * correct as f64 / total as f64,
            };
        }
        precisions
    }

    /// 1, or less if the hypotheses are shorter than the references.
    pub fn brevity_penalty(&self) -> f64 {
        match (self.sys_len, self.ref_len) {
            (sys_len, ref_len) if sys_len >= ref_len => 1.0,
            (0, _) => 0.0,
            (sys_len, ref_len) => (1.0 - ref_len as f64 / sys_len as f64).exp(),
        }
    }

    /// The counts as numbers for an all-reduce. They are exact up to 2^53.
    pub fn to_sums(&self) -> [f64; 10] {
        let [c1, c2, c3, c4] = self.correct;
        let [t1, t2, t3, t4] = self.total;
        [self.sys_len, self.ref_len, c1, c2, c3, c4, t1, t2, t3, t4].map(|count| count as f64)
    }

    /// The counts of numbers from [`to_sums`](Self::to_sums).
    pub fn from_sums(sums: &[f64; 10]) -> Self {
        let [sys_len, ref_len, c1, c2, c3, c4, t1, t2, t3, t4] = sums.map(|sum| sum as u64);
        Self { sys_len, ref_len, correct: [c1, c2, c3, c4], total: [t1, t2, t3, t4] }
    }
}

impl AddAssign for BleuStats {
    fn add_assign(&mut self, other: Self) {
        self.sys_len += other.sys_len;
        self.ref_len += other.ref_len;
        self.correct.iter_mut().zip(other.correct).for_each(|(sum, count)| *sum += count);
        self.total.iter_mut().zip(other.total).for_each(|(sum, count)| *sum += count);
    }
}

impl Sum for BleuStats {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::default(), |mut sum, stats| {
            sum += stats;
            sum
        })
    }
}

impl fmt::Display for BleuStats {
    /// The line that sacreBLEU prints.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [p1, p2, p3, p4] = self.precisions();
        let ratio = if self.ref_len == 0 { 0.0 } else { self.sys_len as f64 / self.ref_len as f64 };
        write!(f, "BLEU = {:.2} {p1:.1}/{p2:.1}/{p3:.1}/{p4:.1} ", self.score())?;
        write!(f, "(BP = {:.3} ratio = {ratio:.3} ", self.brevity_penalty())?;
        write!(f, "hyp_len = {} ref_len = {})", self.sys_len, self.ref_len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Deserialize)]
    struct Golden {
        tokens: Vec<(String, String)>,
        cases: Vec<GoldenCase>,
    }

    #[derive(Deserialize)]
    struct GoldenCase {
        hypotheses: Vec<String>,
        references: Vec<Vec<String>>,
        tokens: String,
        lower_case: bool,
        sys_len: u64,
        ref_len: u64,
        correct: [u64; 4],
        total: [u64; 4],
        score: f64,
        text: String,
    }

    fn golden() -> Golden {
        serde_json::from_str(include_str!("../../../bench/oracle/golden/bleu.json")).unwrap()
    }

    #[test]
    fn lines_are_split_like_sacrebleu() {
        let lines = golden().tokens;
        assert!(lines.len() > 200);
        for (line, expected) in lines {
            // For the golden lines, sacreBLEU's trimming of trailing spaces was skipped.
            assert_eq!(tokens::mteval_13a(&line).join(" "), expected, "{line:?}");
        }
    }

    #[test]
    fn scores_equal_sacrebleu() {
        let cases = golden().cases;
        assert!(cases.len() > 200);
        for case in cases {
            let lower = if case.lower_case { Case::Lower } else { Case::Mixed };
            let options = BleuOptions { tokens: case.tokens.parse().unwrap(), case: lower };
            let stats = |(hypothesis, references): (&String, &Vec<String>)| {
                let references: Vec<_> = references.iter().map(String::as_str).collect();
                BleuStats::with(&options, hypothesis, &references)
            };
            let stats: BleuStats = case.hypotheses.iter().zip(&case.references).map(stats).sum();
            let BleuStats { sys_len, ref_len, correct, total } = stats;
            let expected = (case.sys_len, case.ref_len, case.correct, case.total);
            assert_eq!((sys_len, ref_len, correct, total), expected, "{:?}", case.hypotheses);
            assert!((stats.score() - case.score).abs() < 1e-9, "{} {}", stats.score(), case.score);
            assert_eq!(stats.to_string(), case.text);
            assert_eq!(BleuStats::from_sums(&stats.to_sums()), stats);
        }
    }

    #[test]
    fn arguments_are_those_of_sacrebleu() {
        assert_eq!("13a".parse::<BleuTokens>().unwrap(), BleuTokens::default());
        let options: BleuOptions = " -lc --tokenize char".parse().unwrap();
        assert_eq!(options, BleuOptions { tokens: BleuTokens::Characters, case: Case::Lower });
        assert_eq!("".parse::<BleuOptions>().unwrap(), BleuOptions::default());
        for (arguments, expected) in [("-tok", "named ``"), ("-lc -w 3", "`-w`; try -tok")] {
            let error = arguments.parse::<BleuOptions>().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        assert!("zh".parse::<BleuTokens>().unwrap_err().to_string().contains("`zh`; try 13a"));
    }

    #[test]
    fn empty_input_has_score_zero() {
        assert_eq!(BleuStats::default().score(), 0.0);
        let without_references = BleuStats::of_sentence("a b c d", &[]);
        assert_eq!((without_references.score(), without_references.total), (0.0, [4, 3, 2, 1]));
    }
}
