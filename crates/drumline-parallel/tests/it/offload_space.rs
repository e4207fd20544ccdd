//! State for which there is not enough room: an error on all ranks before anything is allocated, or a part of it elsewhere.
//!
//! The optimizer here says that it keeps as much state as a test likes. Only its real state is ever allocated.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Result;
use drumline_comm::{ProcessGroup, available_memory};
use drumline_parallel::{Offload, Place, ShardOptions};
use drumline_plan::Stage;
use drumline_torch::{AdamOptions, AdamW, Named, Optimizer, OptimizerState, StepTensors, TorchError};
use rank_test::ranks_test;
use tch::{Kind, Tensor};

use super::offload::{ADAM, Case, STEPS, Training, assert_same, beside, held_files, on_disk};

/// The bytes of state that blocks 0 and 1 have, as the optimizer says.
static CLAIMED: AtomicU64 = AtomicU64::new(0);

struct Claiming(AdamW);

impl Optimizer for Claiming {
    fn step_with(&mut self, tensors: StepTensors<'_>) -> Result<(), TorchError> {
        self.0.step_with(tensors)
    }

    fn keep_lr_on_device(&mut self) -> Result<(), TorchError> {
        self.0.keep_lr_on_device()
    }

    fn zero_grad(&mut self) -> Result<(), TorchError> {
        self.0.zero_grad()
    }

    fn lr(&self) -> f64 {
        self.0.lr()
    }

    fn set_lr(&mut self, lr: f64) {
        self.0.set_lr(lr);
    }

    fn parameters(&self) -> Vec<Named> {
        self.0.parameters()
    }

    fn replace_parameters(
        &mut self,
        replaced: &mut dyn FnMut(&Named) -> Option<Tensor>,
    ) -> Result<(), TorchError> {
        self.0.replace_parameters(replaced)
    }

    fn step_twins(&mut self, twins: &mut dyn FnMut(&Named) -> Option<Tensor>) -> Result<(), TorchError> {
        self.0.step_twins(twins)
    }

    fn limit_to_twins(&mut self, is_on: bool) -> Result<(), TorchError> {
        self.0.limit_to_twins(is_on)
    }

    fn state(&self) -> OptimizerState {
        self.0.state()
    }

    fn load_state(&mut self, state: &OptimizerState) -> Result<(), TorchError> {
        self.0.load_state(state)
    }

    fn state_bytes(&self, parameter: &Named) -> Option<usize> {
        let is_large = ["h.0.weight", "h.1.weight"].contains(&parameter.name.as_str());
        if is_large { Some(CLAIMED.load(Ordering::Relaxed) as usize) } else { self.0.state_bytes(parameter) }
    }
}

fn claiming(params: Vec<Named>) -> Result<Box<dyn Optimizer>> {
    let options = AdamOptions { lr: 0.05, amsgrad: true, ..AdamOptions::default() };
    Ok(Box::new(Claiming(AdamW::new(params, options)?)))
}

const CLAIMS: Case = Case { kind: Kind::Float, optimizer: claiming };

/// The error of a training on each rank, which is the same.
fn refused(group: &ProcessGroup, options: ShardOptions) -> Result<String> {
    let error = Training::new(group, options, CLAIMS).err().unwrap().to_string();
    assert!(group.all_gather_object(&error)?.iter().all(|other| *other == error), "{error}");
    Ok(error)
}

fn with(place: Place) -> ShardOptions {
    let offload = Offload { optimizer: place, mimics_gpu: true, ..Offload::default() };
    ShardOptions { offload, ..ShardOptions::new(Stage::Zero1) }
}

ranks_test!(too_little_host_memory_is_an_error_that_says_what_fits, 2, {
    let group = ProcessGroup::from_env()?;
    CLAIMED.store(1 << 45, Ordering::Relaxed);
    for place in [Place::Host, Place::Auto(".".into())] {
        let error = refused(&group, with(place))?;
        assert!(error.contains("the optimizer's state has 7"), "70 terabytes: {error}");
        assert!(
            error.contains(" fit on the device, ") && error.contains(" in host memory and 0 on disk"),
            "{error}"
        );
        assert!(error.contains("; try more ranks, a smaller model or optimizer, or room for "), "{error}");
    }
    // The control: with less state the same ranks train.
    CLAIMED.store(1 << 20, Ordering::Relaxed);
    Training::new(&group, beside(Stage::Zero1, 1.0), CLAIMS)?.run(0..1)?;
});

ranks_test!(auto_steps_in_host_memory_what_does_not_fit_on_the_gpu, 2, {
    let group = ProcessGroup::from_env()?;
    // Of a GPU that is like this memory, a quarter is left for activations, so that one of two large units fits there.
    let free = group.broadcast_object(Some(&available_memory().unwrap()), 0)? / group.size() as u64;
    CLAIMED.store(free / 2, Ordering::Relaxed);
    let mut resident = Training::new(&group, ShardOptions::new(Stage::Zero1), ADAM)?;
    let mut offloaded = Training::new(&group, with(Place::Auto(".".into())), CLAIMS)?;
    let note = offloaded.engine.offload_note().unwrap();
    let units = |tier: &str| -> Option<u64> {
        let line = note.lines().find_map(|line| line.trim().strip_prefix(tier))?;
        line.split_whitespace().next()?.parse().ok()
    };
    let [on_device, on_host] = ["device", "host"].map(|tier| units(tier).unwrap());
    assert!(on_device >= 1 && on_host >= 1, "{note}");
    assert!(note.contains(" pinned for "), "{note}");
    assert_eq!(offloaded.run(0..STEPS)?, resident.run(0..STEPS)?);
    assert_same(&offloaded, &resident, &note);
});

ranks_test!(a_disk_without_space_is_an_error_on_all_ranks_that_leaves_nothing, 2, {
    let group = ProcessGroup::from_env()?;
    let folder = tempfile::tempdir()?;
    CLAIMED.store(1 << 45, Ordering::Relaxed);
    let error = refused(&group, on_disk(folder.path(), Stage::Zero1, 1.0))?;
    assert!(error.starts_with("rank 0 cannot offload: state needs 7"), "{error}");
    assert!(error.contains(" are free; try another folder"), "{error}");
    let is_empty = |folder: &Path| -> Result<bool> {
        Ok(held_files(folder).is_empty() && std::fs::read_dir(folder)?.next().is_none())
    };
    assert!(is_empty(folder.path())?);
    // The control: state of its real size fits there.
    CLAIMED.store(1 << 20, Ordering::Relaxed);
    Training::new(&group, on_disk(folder.path(), Stage::Zero1, 1.0), CLAIMS)?.run(0..2)?;
});
