//! F1 over spans of tags, such as names in sentences.
//!
//! ```text
//!   tags    B-PER I-PER O B-LOC I-PER S-ORG     between two tags of a type a span ends after E and S, before B and S;
//!   spans   └── PER ──┘   └LOC┘ └PER┘ └ORG┘     otherwise where the type changes, or O follows
//! ```
//! So a span may begin with I or E, if the tags do not follow their scheme. `conlleval` and seqeval count in the same
//! way.

use std::collections::BTreeSet;

use drumline_torch::TorchError;
use tch::{Device, Tensor};

use super::Metric;
use super::labelled::Labelled;

/// F1 of spans, from 0 to 1. A span is found if its first tag, last tag and type are correct. The value is 0 if there
/// are sentences without any spans.
///
/// The names of the classes are tags: `O`, and `B-…`, `I-…` and, for BIOES, `E-…` and `S-…` with a type.
///
/// ```
/// use drumline::metrics::{Metric, SpanF1};
/// use drumline::tch::{Kind, Tensor};
///
/// let mut f1 = SpanF1::new(&["O", "B-PER", "I-PER", "B-LOC", "I-LOC"])?.ignoring(-1);
/// let right = Tensor::from_slice(&[1i64, 2, 0, 3, 3, 0, -1, -1]).view([2, 4]); // a sentence of 4 words, one of 2
/// let found = Tensor::from_slice(&[1i64, 2, 0, 3, 0, 0, 0, 0]).view([2, 4]);
/// f1.update(&found.one_hot(5).to_kind(Kind::Float), &right)?;
/// assert_eq!(f1.value(), 2.0 * 2.0 / (2.0 + 3.0));
/// # Ok::<(), drumline::torch::TorchError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct SpanF1 {
    tags: Vec<Option<Tag>>,
    ignored: Option<i64>,
    sums: Sums,
}

/// Correctly found, found and actual spans, and the number of tags.
type Sums = [f64; 4];

/// A tag within a span.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Tag {
    begins: bool,
    ends: bool,
    /// The type of its span.
    of: String,
}

impl Tag {
    fn parse(name: &str) -> Result<Option<Self>, TorchError> {
        let (prefix, of) = name.split_once('-').unwrap_or((name, ""));
        let (begins, ends) = match prefix {
            "O" if of.is_empty() => return Ok(None),
            "B" => (true, false),
            "I" => (false, false),
            "E" => (false, true),
            "S" => (true, true),
            _ => {
                let expected = "O, or B, I, E or S with a type; try names such as B-PER";
                return Err(TorchError::value("span F1: a tag", format!("`{name}`"), expected));
            }
        };
        Ok(Some(Self { begins, ends, of: of.to_owned() }))
    }
}

/// The first tag, the tag after the last, and the type of each span.
fn spans<'t>(tags: &[Option<&'t Tag>]) -> BTreeSet<(usize, usize, &'t str)> {
    let mut spans = BTreeSet::new();
    let mut open: Option<(usize, &Tag)> = None;
    for (place, tag) in tags.iter().copied().chain([None]).enumerate() {
        let continues =
            |(_, last): &(usize, &Tag)| tag.is_some_and(|tag| !last.ends && !tag.begins && last.of == tag.of);
        match (open.filter(continues), tag) {
            (Some((first, _)), Some(tag)) => open = Some((first, tag)),
            (_, tag) => {
                spans.extend(open.map(|(first, last)| (first, place, last.of.as_str())));
                open = tag.map(|tag| (place, tag));
            }
        }
    }
    spans
}

impl SpanF1 {
    /// For outputs of these classes, in this order. Returns an error if a name is not a tag.
    pub fn new<S: AsRef<str>>(tags: &[S]) -> Result<Self, TorchError> {
        let tags = tags.iter().map(|name| Tag::parse(name.as_ref())).collect::<Result<_, _>>()?;
        Ok(Self { tags, ignored: None, sums: Sums::default() })
    }

    /// Leaves out tokens whose correct class is this one, such as the padding of sentences.
    #[must_use]
    pub fn ignoring(self, class: i64) -> Self {
        Self { ignored: Some(class), ..self }
    }

    fn add(&mut self, found: &[i64], right: &[i64]) {
        let tags = |classes: &[i64]| {
            classes.iter().map(|class| self.tags[*class as usize].as_ref()).collect::<Vec<_>>()
        };
        let (found, right) = (tags(found), tags(right));
        let (found, there) = (spans(&found), spans(&right));
        let new = [found.intersection(&there).count(), found.len(), there.len(), right.len()];
        self.sums.iter_mut().zip(new).for_each(|(sum, new)| *sum += new as f64);
    }
}

impl Metric for SpanF1 {
    /// Takes outputs of sentences × places × tags, and correct tags of sentences × places.
    fn update(&mut self, output: &Tensor, target: &Tensor) -> Result<(), TorchError> {
        let _no_grad = tch::no_grad_guard();
        let (size, tags) = (output.size(), self.tags.len());
        if size.len() != 3 || size[2] != tags as i64 {
            return Err(TorchError::Shape {
                what: "span F1: the output".to_owned(),
                expected: format!("sentences × places × {tags} tags"),
                got: size,
            });
        }
        Labelled::new("span F1", output, target, self.ignored)?;
        let classes = |tensor: &Tensor| -> Result<Vec<i64>, TorchError> {
            Ok(Vec::try_from(tensor.f_to_device(Device::Cpu)?)?)
        };
        for sentence in 0..size[0] {
            let target = target.f_select(0, sentence)?;
            let found = output.f_select(0, sentence)?.f_argmax(1, false)?;
            let pairs = classes(&found)?.into_iter().zip(classes(&target)?);
            let (found, right): (Vec<_>, Vec<_>) =
                pairs.filter(|(_, right)| Some(*right) != self.ignored).unzip();
            self.add(&found, &right);
        }
        Ok(())
    }

    fn sums(&self) -> Vec<f64> {
        self.sums.to_vec()
    }

    fn value_of(&self, sums: &[f64]) -> f64 {
        let (spans, tags) = (sums[1] + sums[2], sums[3]);
        if spans > 0.0 || tags == 0.0 { 2.0 * sums[0] / spans } else { 0.0 }
    }

    fn reset(&mut self) {
        self.sums = Sums::default();
    }
}

#[cfg(test)]
mod tests {
    use super::super::golden::{self, one_hot};
    use super::*;

    /// Sentences of different lengths, padded with a class that is ignored.
    fn padded(sentences: &[Vec<i64>], with: i64) -> Tensor {
        let longest = sentences.iter().map(Vec::len).max().unwrap_or(0);
        let mut all: Vec<_> = sentences.to_vec();
        all.iter_mut().for_each(|sentence| sentence.resize(longest, with));
        Tensor::from_slice(&all.concat()).view([sentences.len() as i64, longest as i64])
    }

    #[test]
    fn values_are_seqevals() {
        let cases = golden::read().spans;
        assert!(cases.len() > 20);
        for case in cases {
            let mut f1 = SpanF1::new(&case.tags).unwrap().ignoring(-100);
            let (found, right) = (padded(&case.predicted, 1), padded(&case.target, -100));
            let scores = one_hot(&Vec::<i64>::try_from(found.flatten(0, 1)).unwrap(), case.tags.len());
            let scores = scores.view([right.size()[0], right.size()[1], case.tags.len() as i64]);
            f1.update(&scores, &right).unwrap();
            let near = (f1.value() - case.f1).abs() < 1e-12;
            assert!(near, "{case:?}: {}, expected {}", f1.value(), case.f1);
        }
    }

    #[test]
    fn spans_end_where_the_next_begins_or_is_another() {
        let tags: Vec<_> = ["B-A", "I-A", "O", "B-B", "I-A", "S-C", "E-C", "E-C", "I-C", "B", "I"]
            .map(|name| Tag::parse(name).unwrap())
            .into();
        let found: Vec<_> = spans(&tags.iter().map(Option::as_ref).collect::<Vec<_>>()).into_iter().collect();
        let expected = [
            (0, 2, "A"),
            (3, 4, "B"),
            (4, 5, "A"),
            (5, 6, "C"),
            (6, 7, "C"),
            (7, 8, "C"),
            (8, 9, "C"),
            (9, 11, ""),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn wrong_tags_and_shapes_are_errors_and_no_sentence_is_nan() {
        let message = SpanF1::new(&["O", "X-PER"]).unwrap_err().to_string();
        assert!(message.contains("a tag is `X-PER`; expected O, or"), "{message}");
        let mut f1 = SpanF1::new(&["O", "B-A"]).unwrap();
        assert!(f1.value().is_nan());
        let output = Tensor::zeros([2, 3, 2], (tch::Kind::Float, Device::Cpu));
        let message =
            f1.update(&output.select(0, 0), &Tensor::from_slice(&[0i64, 0, 0])).unwrap_err().to_string();
        assert!(message.contains("shape [3, 2]; expected sentences × places × 2 tags"), "{message}");
        f1.update(&output, &Tensor::zeros([2, 3], (tch::Kind::Int64, Device::Cpu))).unwrap();
        assert_eq!(f1.value(), 0.0);
    }
}
