//! How many ranks a node has: a number, or one for each GPU or core.

use std::str::FromStr;

use super::error::PlanError;
use super::host::Host;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Nproc {
    Count(usize),
    Auto,
    Cpu,
    Gpu,
    Xpu,
}

impl FromStr for Nproc {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        match (text.trim(), text.trim().parse()) {
            ("auto", _) => Ok(Self::Auto),
            ("cpu", _) => Ok(Self::Cpu),
            ("gpu", _) => Ok(Self::Gpu),
            ("xpu", _) => Ok(Self::Xpu),
            (_, Ok(count)) if (1..=MOST_RANKS).contains(&count) => Ok(Self::Count(count)),
            _ => Err("not a number of ranks; try a number from 1 to 65535, gpu, cpu or auto"),
        }
    }
}

/// A mistyped number must not overload the machine.
const MOST_RANKS: usize = 65_535;

impl Nproc {
    /// The number on this node.
    pub(super) fn on(self, host: &Host<'_>) -> Result<usize, PlanError> {
        match (self, host.gpus().len()) {
            (Self::Count(count), _) => Ok(count),
            (Self::Gpu, 0) => Err(PlanError::NoGpu(host.why_no_gpu())),
            (Self::Gpu | Self::Auto, gpus) if gpus > 0 => Ok(gpus),
            (Self::Xpu, _) => Err(PlanError::NoXpu),
            _ => Ok(host.cores),
        }
    }
}
