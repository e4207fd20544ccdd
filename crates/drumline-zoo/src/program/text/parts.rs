//! From a configuration to the parts that both commands need.

use std::path::Path;

use anyhow::ensure;
use drumline_text::{BatchBy, BatchPlan};
use tch::nn::{ModuleT, VarStore};

use crate::program::args::RunArgs;
use crate::program::checked::{check_device, check_weights};
use crate::text::{Lexicon, TextConfig, build};
use crate::weights;

/// What every rank finds out alone, before it waits for the others.
pub(super) fn checked(args: &RunArgs) -> anyhow::Result<TextConfig> {
    let mut config = TextConfig::load(Some(&args.cfg), &args.pairs)?;
    config.run.device = args.device.unwrap_or(config.run.device);
    check_weights(config.model.weights.as_deref())?;
    check_device(config.run.device)?;
    Ok(config)
}

/// Whether a file of the configuration is there.
pub(super) fn check_file(key: &str, path: &Path) -> anyhow::Result<()> {
    ensure!(
        path.is_file(),
        "{key}: no file {}; try another {key}, or drumline data synth-text --out data/text",
        path.display()
    );
    Ok(())
}

/// The net, with the weights of `MODEL.WEIGHTS` or fresh ones.
pub(super) fn net(
    config: &TextConfig,
    lexicon: &Lexicon,
    store: &VarStore,
) -> anyhow::Result<Box<dyn ModuleT>> {
    let net = build(&store.root(), config, lexicon)?;
    if let Some(file) = &config.model.weights {
        weights::load(store, file)?;
    }
    Ok(net)
}

/// Evaluations take texts of like length together, whatever their order.
pub(super) fn plan_of_evaluation(batch_size: usize) -> BatchPlan {
    BatchPlan { buffer: usize::MAX, ..BatchPlan::new(BatchBy::Samples(batch_size)) }
}
