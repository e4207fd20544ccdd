//! What is minimised, and the figures of an evaluation.

use drumline::trainer::CrossEntropy;
use drumline::{Average, F1, Metric, SpanF1, TopK};
use drumline_text::Labels;

use super::config::Task;
use super::data::NO_TAG;

/// Cross-entropy of texts, or of words that are there.
pub fn loss(task: Task) -> CrossEntropy {
    let ignored = match task {
        Task::Classify => None,
        Task::Tag => Some(NO_TAG),
    };
    CrossEntropy { ignored, ..CrossEntropy::default() }
}

/// A figure and its name.
pub type Figure = (&'static str, Box<dyn Metric>);

/// The figures of a task, from 0 to 1, that which chooses the best model first: accuracy and F1 of texts; of tags accuracy, and F1 of spans
/// where they are `O`, `B-…`, `I-…`, otherwise of words.
pub fn figures(task: Task, labels: &Labels) -> Vec<Figure> {
    let f1 = |average| F1::new(labels.len(), average);
    let names: Vec<_> = labels.names().iter().map(String::as_str).collect();
    match (task, SpanF1::new(&names)) {
        (Task::Classify, _) => vec![
            ("acc", Box::new(TopK::new(1))),
            ("f1_micro", Box::new(f1(Average::Micro))),
            ("f1_macro", Box::new(f1(Average::Macro))),
        ],
        (Task::Tag, Ok(spans)) => vec![("f1_span", Box::new(spans.ignoring(NO_TAG))), accuracy(f1)],
        (Task::Tag, Err(_)) => {
            vec![accuracy(f1), ("f1_macro", Box::new(f1(Average::Macro).ignoring(NO_TAG)))]
        }
    }
}

/// Each word has one tag, so that F1 over all of them together is the share of right ones.
fn accuracy(f1: impl Fn(Average) -> F1) -> Figure {
    ("acc", Box::new(f1(Average::Micro).ignoring(NO_TAG)))
}

/// All names that a task's figures may have.
pub(super) fn names(task: Task) -> &'static [&'static str] {
    match task {
        Task::Classify => &["loss", "acc", "f1_micro", "f1_macro"],
        Task::Tag => &["loss", "acc", "f1_span", "f1_macro"],
    }
}

/// The accuracy, for each step: it costs little.
pub fn figure_of_step(task: Task, labels: &Labels) -> Figure {
    match task {
        Task::Classify => ("acc", Box::new(TopK::new(1))),
        Task::Tag => accuracy(|average| F1::new(labels.len(), average)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_labels_say_whether_there_are_spans() {
        let of = |task, labels: &[&str]| -> Vec<&str> {
            figures(task, &Labels::of(labels.iter().copied())).into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(of(Task::Tag, &["O", "B-PER"]), ["f1_span", "acc"]);
        assert_eq!(of(Task::Tag, &["NOUN", "VERB"]), ["acc", "f1_macro"]);
        assert_eq!(of(Task::Classify, &["O", "B-PER"]), ["acc", "f1_micro", "f1_macro"]);
        for task in [Task::Classify, Task::Tag] {
            assert!(of(task, &["O"]).iter().all(|name| names(task).contains(name)));
        }
    }
}
