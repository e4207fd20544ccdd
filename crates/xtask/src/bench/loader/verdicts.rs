//! The goals of the loader, and what the samples say about each.

use super::samples::{Contender, Samples, Subject};
use crate::bench::report;

/// How many times as fast as torch's DataLoader ours must be.
const GOALS: [(Subject, f64); 2] = [(Subject::Cifar, 20.0), (Subject::Jpeg, 2.0)];

/// The section on goals.
pub(crate) fn markdown(samples: &Samples) -> String {
    let mut rows = vec![["", "what", "goal", "measured"].map(str::to_owned).to_vec()];
    rows.extend(GOALS.iter().map(|(subject, goal)| judge(samples, *subject, *goal)));
    report::goals(&rows)
}

fn judge(samples: &Samples, subject: Subject, goal: f64) -> Vec<String> {
    let (word, measured) = match samples.ratio(subject, Contender::TorchPil) {
        None => ("none", "not measured".to_owned()),
        Some(ratio) if ratio >= goal => ("PASS", format!("{ratio:.1}x")),
        Some(ratio) => ("MISS", format!("{ratio:.1}x")),
    };
    vec![word.to_owned(), format!("{subject}, against torch"), format!(">= {goal}x"), measured]
}

#[cfg(test)]
mod tests {
    use super::super::line::Line;
    use super::super::samples::Sample;
    use super::*;

    #[test]
    fn a_goal_is_met_missed_or_not_measured() {
        let mut samples = Samples::default();
        let mut add = |subject, contender, samples_per_s| {
            let line = Line { samples_per_s, shape: Vec::new(), mean: 0.0 };
            samples.add(Sample { subject, contender, turn: 0, line, steady: true });
        };
        add(Subject::Cifar, Contender::Ours, 100_000.0);
        add(Subject::Cifar, Contender::TorchPil, 4_900.0);
        add(Subject::Jpeg, Contender::TorchPil, 100.0);
        let text = markdown(&samples);
        assert!(text.contains("1 PASS, 0 MISS, 1 not measured") && text.contains("20.4x"), "{text}");
    }
}
