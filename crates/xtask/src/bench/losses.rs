//! Whether contenders trained the same: their losses, step by step.

use anyhow::ensure;

/// When losses count as the same.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SameLosses {
    /// How much two losses of a step may differ, of the larger one.
    pub(crate) tolerance: f64,
    /// The first steps are compared: later ones add up what rounding did before.
    pub(crate) steps: usize,
}

impl SameLosses {
    /// Returns an error that names the first step whose losses differ.
    pub(crate) fn check(self, ours: &[f64], reference: &[f64]) -> anyhow::Result<()> {
        ensure!(ours.len() == reference.len(), "{} losses, others have {}", ours.len(), reference.len());
        for (step, (a, b)) in ours.iter().zip(reference).take(self.steps).enumerate() {
            let is_same = (a - b).abs() <= self.tolerance * a.abs().max(b.abs());
            ensure!(is_same, "loss of step {step} is {a}, of others {b}");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_compared_step_by_step() {
        let same = SameLosses { tolerance: 1e-3, steps: 2 };
        let error = |losses: &[f64]| same.check(losses, &[2.0, 1.0, 0.5]).unwrap_err().to_string();
        assert!(same.check(&[2.0001, 1.0, 9.0], &[2.0, 1.0, 0.5]).is_ok());
        assert_eq!(error(&[2.0, 1.5, 0.5]), "loss of step 1 is 1.5, of others 1");
        assert_eq!(error(&[2.0, f64::NAN, 0.5]), "loss of step 1 is NaN, of others 1");
        assert_eq!(error(&[2.0]), "1 losses, others have 3");
    }
}
