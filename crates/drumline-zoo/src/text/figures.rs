//! The loss, and the metrics of an evaluation.

use drumline::metrics::{Average, F1, Metric, SpanF1, TopK};
use drumline::trainer::CrossEntropy;
use drumline_text::Labels;

use super::config::TextTask;
use super::data::NO_TAG;

/// Cross-entropy over texts, or over words without padding.
pub fn loss(task: TextTask) -> CrossEntropy {
    let ignored = match task {
        TextTask::Classify => None,
        TextTask::Tag => Some(NO_TAG),
    };
    CrossEntropy { ignored, ..CrossEntropy::default() }
}

/// A metric with its name.
pub type Figure = (&'static str, Box<dyn Metric>);

/// The metrics of a task, from 0 to 1. The first one selects the best model. For classes: accuracy and F1. For tags:
/// accuracy, and F1 of spans if the tags have the form `O`, `B-…`, `I-…`, otherwise F1 of words.
pub fn figures(task: TextTask, labels: &Labels) -> Vec<Figure> {
    let f1 = |average| F1::new(labels.len(), average);
    let names: Vec<_> = labels.names().iter().map(String::as_str).collect();
    match (task, SpanF1::new(&names)) {
        (TextTask::Classify, _) => vec![
            ("acc", Box::new(TopK::new(1))),
            ("f1_micro", Box::new(f1(Average::Micro))),
            ("f1_macro", Box::new(f1(Average::Macro))),
        ],
        (TextTask::Tag, Ok(spans)) => vec![("f1_span", Box::new(spans.ignoring(NO_TAG))), accuracy(f1)],
        (TextTask::Tag, Err(_)) => {
            vec![accuracy(f1), ("f1_macro", Box::new(f1(Average::Macro).ignoring(NO_TAG)))]
        }
    }
}

/// Each word has exactly one tag, so micro-averaged F1 is the accuracy.
fn accuracy(f1: impl Fn(Average) -> F1) -> Figure {
    ("acc", Box::new(f1(Average::Micro).ignoring(NO_TAG)))
}

/// All names that the metrics of a task may have.
pub(super) fn names(task: TextTask) -> &'static [&'static str] {
    match task {
        TextTask::Classify => &["loss", "acc", "f1_micro", "f1_macro"],
        TextTask::Tag => &["loss", "acc", "f1_span", "f1_macro"],
    }
}

/// The accuracy metric of each step, which is cheap to compute.
pub fn figure_of_step(task: TextTask, labels: &Labels) -> Figure {
    match task {
        TextTask::Classify => ("acc", Box::new(TopK::new(1))),
        TextTask::Tag => accuracy(|average| F1::new(labels.len(), average)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_detected_from_the_labels() {
        let of = |task, labels: &[&str]| -> Vec<&str> {
            figures(task, &Labels::of(labels.iter().copied())).into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(of(TextTask::Tag, &["O", "B-PER"]), ["f1_span", "acc"]);
        assert_eq!(of(TextTask::Tag, &["NOUN", "VERB"]), ["acc", "f1_macro"]);
        assert_eq!(of(TextTask::Classify, &["O", "B-PER"]), ["acc", "f1_micro", "f1_macro"]);
        for task in [TextTask::Classify, TextTask::Tag] {
            assert!(of(task, &["O"]).iter().all(|name| names(task).contains(name)));
        }
    }
}
