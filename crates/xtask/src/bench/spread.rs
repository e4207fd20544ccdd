//! Figures of several runs in three numbers.

/// Least, middle and most.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) least: f64,
    pub(crate) most: f64,
}

impl Spread {
    /// `None` of nothing.
    pub(crate) fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let (least, most) = (*values.first()?, *values.last()?);
        Some(Self { median: median(values)?, least, most })
    }

    /// `2.5 (2.0 to 3.0)`, with so many digits.
    pub(crate) fn shown(&self, digits: usize) -> String {
        let Self { median, least, most } = self;
        format!("{median:.digits$} ({least:.digits$} to {most:.digits$})")
    }
}

/// The middle value; of two middle ones their mean.
pub(crate) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.len().checked_sub(1)? / 2, values.len() / 2);
    Some((values[low] + values[high]) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_even_and_no_values() {
        assert_eq!(Spread::of(vec![3.0, 1.0, 2.0]), Some(Spread { median: 2.0, least: 1.0, most: 3.0 }));
        assert_eq!(Spread::of(vec![4.0, 1.0]).unwrap().shown(2), "2.50 (1.00 to 4.00)");
        assert_eq!(Spread::of(Vec::new()), None);
    }
}
