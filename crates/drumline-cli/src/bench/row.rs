//! The results for one size, with the fields of the JSON that we and the peers print.

use serde::Serialize;

use super::op::Op;

/// A row of the table, or an object of the JSON array.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    pub(super) op: String,
    pub(super) world: usize,
    pub(super) bytes: usize,
    pub(super) dtype: &'static str,
    pub(super) memory: &'static str,
    pub(super) backend: &'static str,
    pub(super) transport: &'static str,
    pub(super) median_us: f64,
    pub(super) p99_us: f64,
    /// Bytes divided by the median, in 10^9 bytes per second.
    pub(super) algbw_gbps: f64,
    /// The same, scaled by the operation's bus factor.
    pub(super) busbw_gbps: f64,
}

/// Median and 99th percentile, and the rates that follow from the median.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Figures {
    pub(super) median: f64,
    pub(super) p99: f64,
    pub(super) rate: f64,
    pub(super) bus_rate: f64,
}

impl Figures {
    /// From the microseconds of all turns. There is at least one.
    pub(super) fn of(op: Op, world: usize, bytes: usize, mut micros: Vec<f64>) -> Self {
        micros.sort_by(f64::total_cmp);
        let last = micros.len() - 1;
        let median = (micros[last / 2] + micros[micros.len() / 2]) / 2.0;
        let p99 = micros[(0.99 * last as f64 + 0.5) as usize];
        let rate = if bytes == 0 { 0.0 } else { bytes as f64 / median * 1e-3 };
        Self { median, p99, rate, bus_rate: rate * op.bus_factor(world) }
    }
}

/// Rounds a value, so that people can read the JSON too.
pub(super) fn rounded(value: f64, decimals: i32) -> f64 {
    let scale = 10f64.powi(decimals);
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_of_known_lists() {
        let of = |micros: Vec<f64>| {
            let figures = Figures::of(Op::Broadcast, 2, 1000, micros);
            (figures.median, figures.p99)
        };
        assert_eq!(of(vec![3.0]), (3.0, 3.0));
        assert_eq!(of(vec![4.0, 1.0, 3.0, 2.0]), (2.5, 4.0));
        assert_eq!(of((1..=1000).rev().map(f64::from).collect()), (500.5, 990.0));
    }

    #[test]
    fn rates_follow_from_the_median() {
        let figures = Figures::of(Op::AllReduce, 4, 2_000_000, vec![1000.0]);
        assert_eq!((figures.rate, figures.bus_rate), (2.0, 3.0));
        assert_eq!(Figures::of(Op::Barrier, 4, 0, vec![0.5]).bus_rate, 0.0);
    }
}
