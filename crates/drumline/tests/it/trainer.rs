//! `DistTrainer`: equal on any number of ranks, in the documented order, and with one error for all where something
//! fails.

mod averaging;
mod bad_input;
mod changed_data;
mod ending;
mod evaluating;
mod fastnlp_bugs;
mod keeping;
mod observed;
mod order;
pub(super) mod planned;
mod precision;
mod resuming;
mod saying;
mod sharded;
mod supplied;
mod windows;

use std::path::PathBuf;
use std::process::ExitCode;

use drumline::ProcessGroup;
use drumline::data::{Cause, Dataset, MapDataset, Sample};
use drumline::optim::{Named, Sgd, SgdOptions, parameters};
use drumline::trainer::{CrossEntropy, DistTrainer, TrainerError};
use rank_test::{Exit, JobReport};
use tch::nn::{Linear, Module, VarStore, linear};
use tch::{Device, Kind, Tensor};

/// Where a test's ranks save.
pub(super) const FOLDER: &str = "DRUMLINE_TEST_FOLDER";

pub(super) const INPUTS: i64 = 6;
pub(super) const CLASSES: i64 = 3;

pub(super) type Pair = (Tensor, Tensor);

/// Two layers whose weights are always the same at first.
#[derive(Debug)]
pub(super) struct Net {
    first: Linear,
    second: Linear,
    /// Is added to the hidden units, in the mean of its rows of twelve.
    large: Option<Tensor>,
}

impl Net {
    /// With a parameter of 17 rows, which is large enough for an optimizer's state in 8 bits.
    pub(super) fn with_large(store: &VarStore) -> Self {
        let large = store.root().var("large", &[17, 300], tch::nn::Init::Const(0.0));
        Self { large: Some(large), ..Self::new(store) }
    }

    pub(super) fn new(store: &VarStore) -> Self {
        tch::set_num_threads(1);
        let layer = |name: &str, from, to| linear(store.root() / name, from, to, Default::default());
        let net =
            Self { first: layer("first", INPUTS, 12), second: layer("second", 12, CLASSES), large: None };
        for (place, Named { tensor, .. }) in parameters(store).iter().enumerate() {
            let values =
                Tensor::arange(tensor.numel() as i64, (Kind::Float, Device::Cpu)) * 0.7 + place as f64;
            tch::no_grad(|| tensor.shallow_clone().copy_(&(values.sin() * 0.3).view_as(tensor)));
        }
        net
    }
}

impl Module for Net {
    fn forward(&self, input: &Tensor) -> Tensor {
        let hidden = self.first.forward(input);
        let hidden = match &self.large {
            Some(large) => hidden + large.view([-1, 12]).mean_dim(&[0i64][..], false, Kind::Float),
            None => hidden,
        };
        self.second.forward(&hidden.tanh())
    }
}

/// Input and class of a sample.
pub(super) fn sample(index: usize) -> (Tensor, i64) {
    let x = (Tensor::arange(INPUTS, (Kind::Float, Device::Cpu)) * 0.9 + index as f64 * 1.3).sin();
    (x, (index * 7 % 5) as i64 % CLASSES)
}

pub(super) fn collate(samples: Vec<(Tensor, i64)>) -> Result<Pair, Cause> {
    let (inputs, classes): (Vec<_>, Vec<_>) = samples.into_iter().unzip();
    Ok((Tensor::f_stack(&inputs, 0)?, Tensor::from_slice(&classes)))
}

/// So many samples, each shown to `see` when it is loaded.
pub(super) fn data_seen(
    len: usize,
    see: impl Fn(usize) -> Result<(), Cause> + Send + Sync + 'static,
) -> impl Dataset<Batch = Pair> + 'static {
    let load = move |at: Sample| {
        see(at.index)?;
        Ok(sample(at.index))
    };
    MapDataset::new(len, load, collate)
}

pub(super) fn data(len: usize) -> impl Dataset<Batch = Pair> + 'static {
    data_seen(len, |_| Ok(()))
}

pub(super) fn sgd(store: &VarStore) -> anyhow::Result<Sgd> {
    Ok(Sgd::new(parameters(store), SgdOptions { lr: 0.1, momentum: 0.9, ..Default::default() })?)
}

/// A trainer of `net` that says nothing, on so many samples.
fn trainer<'a>(
    group: &ProcessGroup,
    net: &'a Net,
    store: &'a VarStore,
    len: usize,
) -> anyhow::Result<DistTrainer<'a, Net, Pair>> {
    let trainer = DistTrainer::new(group, net, store, data(len));
    Ok(trainer.loss(CrossEntropy::default()).optimizer(sgd(store)?).print_every(0))
}

pub(super) fn weights(store: &VarStore) -> Vec<Tensor> {
    parameters(store).iter().map(|named| named.tensor.detach().copy()).collect()
}

/// The largest difference between two models' weights.
pub(super) fn difference(ours: &[Tensor], theirs: &[Tensor]) -> f64 {
    let pairs = ours.iter().zip(theirs);
    pairs.map(|(a, b)| (a - b).abs().max().double_value(&[])).fold(0.0, f64::max)
}

/// An error unless all ranks have the same bits.
pub(super) fn same_on_all_ranks(group: &ProcessGroup, store: &VarStore) -> anyhow::Result<()> {
    let sums =
        weights(store).iter().map(|weight| weight.sum(Kind::Double).double_value(&[]).to_bits()).collect();
    let all: Vec<Vec<u64>> = group.all_gather_object(&sums)?;
    anyhow::ensure!(all.iter().all(|sums| *sums == all[0]), "ranks have different weights");
    Ok(())
}

pub(super) fn folder() -> anyhow::Result<PathBuf> {
    Ok(std::env::var(FOLDER)?.into())
}

/// One folder, of rank 0.
pub(super) fn shared_folder(group: &ProcessGroup) -> anyhow::Result<(tempfile::TempDir, String)> {
    let temp = tempfile::tempdir()?;
    let path = group.broadcast_object(Some(&temp.path().to_str().unwrap().to_owned()), 0)?;
    Ok((temp, path))
}

/// Ends a rank as a program's `main` does.
fn end_as_a_program<T>(outcome: Result<T, TrainerError>) -> ! {
    let code = drumline::exit_code(outcome.map(drop));
    std::process::exit(i32::from(format!("{code:?}") != format!("{:?}", ExitCode::SUCCESS)))
}

/// All ranks ended with an error, whose words were shown once in all.
#[track_caller]
pub(super) fn assert_reported_once(report: &JobReport, words: &str) {
    for rank in &report.ranks {
        assert_eq!(rank.exit, Exit::Code(1), "rank {}: {report}", rank.rank);
    }
    let reported: usize = report.ranks.iter().map(|rank| rank.stderr_text().matches(words).count()).sum();
    assert_eq!(reported, 1, "`{words}` in: {report}");
}
