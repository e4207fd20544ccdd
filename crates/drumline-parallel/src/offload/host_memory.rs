//! Host memory for the twins of units and for gradients, pinned if a GPU copies from and to it.

use drumline_plan::{OffloadPlan, Tier};
use drumline_torch::Pages;
use tch::Device;

use super::Result;
use super::reservation::Stepped;
use super::twins::{TwinUnit, bytes_of};
use crate::error::ParallelError;

/// One slot is stepped while others are filled.
pub(super) const NUM_SLOTS: usize = 3;

/// The twins of units, and the memory that is copied.
pub(super) struct HostMemory {
    pub(super) units: Vec<TwinUnit>,
    pub(super) num_slots: usize,
    /// The bytes that GPUs copy from and to.
    pinned: usize,
    /// The bytes that the tensors there have.
    asked: usize,
    /// The bytes of weights, and of gradients.
    copied: usize,
    /// How many bytes of host memory the CPU reads and writes in a second.
    rate: f64,
}

impl HostMemory {
    pub(super) fn new(units: Vec<Vec<Stepped>>, device: Device) -> Result<Self> {
        let copied: Vec<usize> = units.iter().map(|unit| bytes_of(unit)).collect();
        let (all, largest) = (copied.iter().sum::<usize>(), copied.iter().copied().max().unwrap_or(0));
        if all == 0 {
            return Ok(Self { units: Vec::new(), num_slots: 0, pinned: 0, asked: 0, copied: 0, rate: 0.0 });
        }
        let pages = |bytes: usize| match device {
            Device::Cpu => Pages::touched(bytes).map_err(|cause| {
                let what = "offloaded state";
                ParallelError::Memory { what, bytes, cause }
            }),
            _ => Ok(Pages::pinned(bytes)?),
        };
        let weights = pages(all)?;
        let slots = (0..NUM_SLOTS.min(units.len())).map(|_| pages(largest)).collect::<Result<Vec<_>>>()?;
        let pinned = weights.num_bytes() + slots.iter().map(Pages::num_bytes).sum::<usize>();
        let (asked, rate) = (all + slots.len() * largest, weights.measure());
        let mut start = 0;
        let twins = units.into_iter().zip(copied).map(|(unit, bytes)| {
            let twins = TwinUnit::new(unit, &weights, start, &slots);
            start += bytes;
            twins
        });
        Ok(Self {
            units: twins.collect::<Result<_>>()?,
            num_slots: slots.len(),
            pinned,
            asked,
            copied: all,
            rate,
        })
    }

    pub(super) fn note(&self, plan: &OffloadPlan) -> String {
        let mb = |bytes: u64| bytes as f64 / 1e6;
        let row = |tier| (plan.num_units(tier), mb(plan.bytes(tier)));
        let ((num_there, there), (num_beside, beside)) = (row(Tier::Device), row(Tier::Host));
        let mut text = format!(
            "where each rank's optimizer state lies:\n  device  {num_there:4} units  {there:9.1} MB\n  host    \
             {num_beside:4} units  {beside:9.1} MB"
        );
        if num_beside > 0 {
            let (pinned, asked, rate) = (mb(self.pinned as u64), mb(self.asked as u64), self.rate / 1e9);
            // State is read and written, gradients are read, and weights are written.
            let seconds = (2 * plan.bytes(Tier::Host) + 2 * self.copied as u64) as f64 / self.rate;
            text += &format!(
                ", and {pinned:.1} MB pinned for {asked:.1} MB of weights and gradients; memory is read and written at \
                 {rate:.1} GB/s: at least {seconds:.3} s a step"
            );
        }
        text
    }
}
