//! Which rank draws and loads the first weights of a model whose states ranks divide: rank 0.
//!
//! ```text
//!   rank 0        draws its weights; those of a file are mapped, not read      ─┐ engine: each rank gets its rows,
//!   other ranks   have the variables, whose memory nobody touches or fills     ─┘ one unit after the other
//! ```
//! So all ranks of a machine together need the memory of one model to start, not of one each. Replicas (DDP) draw and
//! load for themselves.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::path::Path;

use rustix::fs::Advice;
use tch::Tensor;

use crate::error::ZooError;

/// The bytes of a request to read ahead.
const AHEAD: u64 = 128 << 10;

/// What a rank does with the first weights of a model that is being built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FirstWeights {
    /// It has its own.
    #[default]
    Own,
    /// It has those of all ranks.
    Giver,
    /// It gets the giver's later.
    Taker,
}

thread_local! {
    static BUILDING: Cell<FirstWeights> = const { Cell::new(FirstWeights::Own) };
}

impl FirstWeights {
    /// What a rank of an engine that gives all ranks the weights of rank 0 does: one with
    /// [`ShardOptions`](drumline::engine::ShardOptions) that ignores no parameter. What an engine does not give to the
    /// others stays undefined on them.
    pub fn of_rank(rank: usize) -> Self {
        if rank == 0 { Self::Giver } else { Self::Taker }
    }

    /// Builds a model, and loads its weights if they are in a file.
    ///
    /// ```
    /// use drumline_zoo::first_weights::FirstWeights;
    /// use drumline_zoo::models::gpt::{Gpt, GptOptions};
    /// use tch::{Device, nn::VarStore};
    ///
    /// let rank = 1;
    /// let store = VarStore::new(Device::Cpu);
    /// let options = GptOptions { n_layer: 1, n_head: 2, n_embd: 8, n_positions: 8, vocab_size: 30, ..Default::default() };
    /// let model = FirstWeights::of_rank(rank).build(|| Gpt::new(&store.root(), &options))?;
    /// // An engine with `ShardOptions` gives it the weights of rank 0.
    /// # let _ = model;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn build<R>(self, build: impl FnOnce() -> R) -> R {
        struct Before(FirstWeights);
        impl Drop for Before {
            fn drop(&mut self) {
                BUILDING.set(self.0);
            }
        }
        let _before = Before(BUILDING.replace(self));
        build()
    }

    /// Of the model that is being built.
    pub(crate) fn of_this_build() -> Self {
        BUILDING.get()
    }

    /// Whether the values of this rank's weights matter.
    pub(crate) fn have_values(self) -> bool {
        self != Self::Taker
    }

    /// Whether another rank reads this file of weights. A rank that waits for it lets the kernel read ahead meanwhile.
    pub(crate) fn leaves(self, file: &Path) -> bool {
        if self.have_values() {
            return false;
        }
        // Where that fails, the other rank waits a little longer for the disk.
        let _ = read_ahead(file);
        true
    }

    /// Gives a variable the value of a file. The giver's variable becomes the value itself, which may be mapped from the
    /// file.
    pub(crate) fn fill(self, variable: &mut Tensor, value: &Tensor) -> Result<(), ZooError> {
        let fits = |tensor: &Tensor| (tensor.kind(), tensor.size(), tensor.device(), tensor.stride());
        // What does not require gradients may be a part of a variable.
        let is_whole = variable.requires_grad();
        tch::no_grad(|| {
            if self == Self::Giver && is_whole && fits(variable) == fits(value) {
                variable.f_set_data(value)
            } else {
                variable.f_copy_(value)
            }
        })
        .map_err(|error| ZooError::Torch(error.into()))
    }
}

/// Asks the kernel to have a file in memory. It returns before the bytes are there.
fn read_ahead(file: &Path) -> io::Result<()> {
    let file = File::open(file)?;
    let len = file.metadata()?.len();
    // The kernel reads no more than this at a time.
    for offset in (0..len).step_by(AHEAD as usize) {
        rustix::fs::fadvise(&file, offset, NonZeroU64::new(AHEAD), Advice::WillNeed)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rank_test::ranks_test;
    use tch::nn::VarStore;
    use tch::{Device, Kind};

    use super::*;
    use crate::gpt::weights;
    use crate::models::gpt::{Gpt, GptOptions};

    const SMALL: usize = 8 << 20;

    /// Memory that only this process has.
    fn private_bytes() -> usize {
        let text = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches("kB").trim().parse::<usize>().unwrap() << 10
    }

    fn options() -> GptOptions {
        let small =
            GptOptions { n_layer: 2, n_head: 4, n_embd: 512, n_positions: 64, ..GptOptions::default() };
        GptOptions { vocab_size: 30_000, ..small }
    }

    fn num_bytes(store: &VarStore) -> usize {
        store.variables().values().map(|variable| variable.numel() * 4).sum()
    }

    // Runs in its own process, because other tests allocate memory meanwhile.
    ranks_test!(a_taker_touches_no_weights_and_a_giver_maps_those_of_a_file, 1, {
        tch::set_num_threads(1);
        let folder = tempfile::tempdir()?;
        let (file, options) = (folder.path().join("model.safetensors"), options());
        let grown = |first_weights: FirstWeights, file: Option<&std::path::Path>| {
            let before = private_bytes();
            let store = VarStore::new(Device::Cpu);
            first_weights.build(|| {
                Gpt::new(&store.root(), &options).unwrap();
                file.iter().for_each(|file| weights::load(&store, &options, file).unwrap());
            });
            (private_bytes().saturating_sub(before), store)
        };
        let (own, written) = grown(FirstWeights::Own, None);
        assert!(own > num_bytes(&written) - SMALL, "control: {own} of {}", num_bytes(&written));
        weights::save(&written, &options, &file)?;
        let (taker, _) = grown(FirstWeights::Taker, Some(&file));
        assert!(taker < SMALL, "{taker}");
        let (giver, loaded) = grown(FirstWeights::Giver, Some(&file));
        assert!(giver < own / 2, "the file's bytes stay in the file: {giver} and {own}");
        for (name, variable) in loaded.variables() {
            assert_eq!(variable, written.variables()[&name], "{name}");
            assert_eq!((variable.kind(), variable.requires_grad()), (Kind::Float, true));
        }
    });
}
