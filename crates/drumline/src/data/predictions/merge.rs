//! Puts rows that arrive in any order into the data set's order.

use std::collections::BTreeMap;

use super::PredictionFault;

/// How many missing samples an error lists.
const LISTED: usize = 10;

#[derive(Debug)]
pub(super) struct Merge {
    num_samples: usize,
    max_waiting: usize,
    /// The first sample whose row has not been taken.
    next: usize,
    waiting: BTreeMap<usize, String>,
    waiting_bytes: usize,
}

impl Merge {
    pub(super) fn new(num_samples: usize, max_waiting: usize) -> Self {
        Self { num_samples, max_waiting, next: 0, waiting: BTreeMap::new(), waiting_bytes: 0 }
    }

    pub(super) fn add(&mut self, rank: usize, index: usize, line: String) -> Result<(), PredictionFault> {
        if index >= self.num_samples {
            return Err(PredictionFault::Outside { index, rank, num_samples: self.num_samples });
        }
        let bytes = line.len();
        if index < self.next || self.waiting.insert(index, line).is_some() {
            return Err(PredictionFault::Duplicate { index, rank });
        }
        self.waiting_bytes += bytes;
        Ok(())
    }

    /// The next row in order, if it is there.
    pub(super) fn pop(&mut self) -> Option<String> {
        let line = self.waiting.remove(&self.next)?;
        self.next += 1;
        self.waiting_bytes -= line.len();
        Some(line)
    }

    /// Returns an error if too many bytes wait.
    pub(super) fn check_waiting(&self) -> Result<(), PredictionFault> {
        let (index, waiting, max_waiting) = (self.next, self.waiting.len(), self.max_waiting);
        if self.waiting_bytes > max_waiting {
            return Err(PredictionFault::TooFarAhead { index, waiting, max_waiting });
        }
        Ok(())
    }

    /// Returns an error if rows are missing.
    pub(super) fn check_complete(&self) -> Result<(), PredictionFault> {
        let num_samples = self.num_samples;
        let count = num_samples - self.next - self.waiting.len();
        if count == 0 {
            return Ok(());
        }
        let missing = (self.next..num_samples).filter(|index| !self.waiting.contains_key(index));
        Err(PredictionFault::Missing { count, num_samples, first: missing.take(LISTED).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_order_comes_out_sorted(order in Just((0..60).collect::<Vec<usize>>()).prop_shuffle()) {
            let mut merge = Merge::new(60, 10_000);
            let mut out = Vec::new();
            for index in order {
                merge.add(0, index, index.to_string()).unwrap();
                out.extend(std::iter::from_fn(|| merge.pop()));
            }
            prop_assert!(out.into_iter().eq((0..60).map(|index| index.to_string())));
            prop_assert_eq!(merge.check_complete(), Ok(()));
            prop_assert_eq!(merge.waiting_bytes, 0);
        }
    }

    #[test]
    fn wrong_rows_are_named() {
        let mut merge = Merge::new(20, 8);
        merge.add(0, 0, "zero".into()).unwrap();
        assert!(merge.pop().is_some() && merge.pop().is_none());
        assert_eq!(merge.add(1, 0, String::new()), Err(PredictionFault::Duplicate { index: 0, rank: 1 }));
        merge.add(0, 5, "five".into()).unwrap();
        assert_eq!(merge.add(2, 5, String::new()), Err(PredictionFault::Duplicate { index: 5, rank: 2 }));
        let outside = PredictionFault::Outside { index: 20, rank: 2, num_samples: 20 };
        assert_eq!(merge.add(2, 20, String::new()), Err(outside));
    }

    #[test]
    fn too_many_waiting_and_missing_ones_are_named() {
        let mut merge = Merge::new(20, 8);
        merge.add(0, 5, "12345678".into()).unwrap();
        assert_eq!(merge.check_waiting(), Ok(()));
        merge.add(0, 1, "9".into()).unwrap();
        let message = merge.check_waiting().unwrap_err().to_string();
        assert!(
            message.starts_with("2 predictions wait for that of sample 0, which is more than 8 bytes; try"),
            "{message}"
        );
        let message = merge.check_complete().unwrap_err().to_string();
        assert_eq!(message, "18 of 20 samples have no prediction: [0, 2, 3, 4, 6, 7, 8, 9, 10, 11], …");
    }
}
