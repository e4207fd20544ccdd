//! The executor that sleeps instead of computing, and sends messages of real size: it shows what a schedule costs on real
//! ranks, with more ranks than the machine has cores.

use std::time::{Duration, Instant};

use drumline_plan::pipeline::{Compute, Message, Work};
use drumline_torch::StepSamples;
use tch::{Device, Kind, Tensor};

use super::interpreter::{Executor, run_row};
use super::link::Links;
use super::parcel::Parcel;
use super::plan::Plan;
use crate::error::ParallelError;

/// A rank that sleeps.
///
/// ```
/// use drumline_comm::LocalGroup;
/// use drumline_parallel::pipeline::{Links, Order, Sleeper};
/// use drumline_plan::pipeline::Schedule;
/// use std::time::Duration;
///
/// let plan = Order::from(Schedule::GPipe).plan(2, 4)?;
/// let spans = LocalGroup::run(2, |group| {
///     let mut links = Links::new(&group, plan.program()).expect("links");
///     let mut sleeper = Sleeper::new(&mut links, |_| Duration::from_micros(100), 1 << 16);
///     sleeper.run(&plan, group.rank()).expect("a step");
///     Ok(sleeper.spans().len())
/// })?;
/// assert_eq!(spans, [8, 8]);
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct Sleeper<'a> {
    links: &'a mut Links,
    time: Box<dyn Fn(Work) -> Duration + 'a>,
    message: Tensor,
    spans: Vec<(Work, Instant, Instant)>,
}

impl std::fmt::Debug for Sleeper<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sleeper").field("spans", &self.spans.len()).finish_non_exhaustive()
    }
}

impl<'a> Sleeper<'a> {
    /// Computations take `time`, and messages have this many bytes.
    pub fn new(links: &'a mut Links, time: impl Fn(Work) -> Duration + 'a, bytes: usize) -> Self {
        let message = Tensor::zeros([bytes as i64], (Kind::Uint8, Device::Cpu));
        Self { links, time: Box::new(time), message, spans: Vec::new() }
    }

    /// A step of this rank.
    pub fn run(&mut self, plan: &Plan, rank: usize) -> Result<(), ParallelError> {
        self.links.begin_step();
        run_row(plan, rank, self).map_err(|halted| halted.cause)
    }

    /// The computations so far, with the times at which they began and ended.
    pub fn spans(&self) -> &[(Work, Instant, Instant)] {
        &self.spans
    }
}

impl Executor for Sleeper<'_> {
    type Value = Parcel;
    type Error = ParallelError;

    fn compute(&mut self, work: Work, _: Option<Parcel>) -> Result<Option<Parcel>, ParallelError> {
        let begin = Instant::now();
        std::thread::sleep((self.time)(work));
        self.spans.push((work, begin, Instant::now()));
        let samples = StepSamples { first: 0, stride: 1, count: 0 };
        let tensors = (work.compute != Compute::Weight).then(|| Some(self.message.shallow_clone()));
        Ok(Some(Parcel { samples, tensors: tensors.into_iter().collect(), needs_grad: vec![false] }))
    }

    fn send(&mut self, message: Message, to: usize, value: Parcel) -> Result<(), ParallelError> {
        self.links.send(message, to, value)
    }

    fn expect(&mut self, message: Message, from: usize) -> Result<(), ParallelError> {
        self.links.expect(message, from, Device::Cpu)
    }

    fn receive(&mut self, message: Message, from: usize) -> Result<Parcel, ParallelError> {
        self.links.receive(message, from)
    }

    fn reduce(&mut self, _: usize) -> Result<(), ParallelError> {
        Ok(())
    }

    fn broken(&self, what: &'static str) -> ParallelError {
        ParallelError::Internal { what }
    }
}
