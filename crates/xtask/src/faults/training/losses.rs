//! How the figures of two runs compare.

use std::fmt;

/// Whether two runs computed the same bits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Losses {
    Equal,
    /// Equal until the last step of the first run, which ended before the other.
    EqualUntil(usize),
    /// The first step at which they differ.
    DifferFrom(usize),
}

impl Losses {
    pub(crate) fn compare(steps: &[String], reference: &[String]) -> Self {
        let equal = steps.iter().zip(reference).take_while(|(one, other)| one == other).count();
        match steps.len() {
            all if all > equal => Losses::DifferFrom(equal + 1),
            all if all == reference.len() => Losses::Equal,
            all => Losses::EqualUntil(all),
        }
    }
}

impl fmt::Display for Losses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Losses::Equal => f.write_str("bit-equal"),
            Losses::EqualUntil(step) => write!(f, "bit-equal until step {step}"),
            Losses::DifferFrom(step) => write!(f, "differ from step {step}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_equal_only_if_they_are_whole() {
        let steps = |list: &[&str]| list.iter().map(|step| (*step).to_owned()).collect::<Vec<_>>();
        let compared = |steps: &[String], reference: &[String]| Losses::compare(steps, reference).to_string();
        let reference = steps(&["1 0.5 2", "2 0.25 1"]);
        assert_eq!(compared(&reference, &reference), "bit-equal");
        assert_eq!(compared(&reference[..1], &reference), "bit-equal until step 1");
        assert_eq!(compared(&reference, &reference[..1]), "differ from step 2");
        assert_eq!(compared(&steps(&["1 0.5 2", "2 0.26 1"]), &reference), "differ from step 2");
        assert_eq!(compared(&[], &reference), "bit-equal until step 0");
    }
}
