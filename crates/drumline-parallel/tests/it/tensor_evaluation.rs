//! Evaluations of a model of which ranks have parts: a rank that stops or fails does not leave the others waiting.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use drumline_comm::{GroupOptions, LocalGroup, Mesh, ProcessGroup};
use drumline_parallel::tensor::TensorParallel;
use drumline_parallel::{
    Cut, Engine, EngineOptions, EngineSetup, Forwards, ModelParallel, ParallelError, ShardOptions,
};
use drumline_plan::Stage;
use tch::nn::VarStore;
use tch::{Device, no_grad};

use super::tensor::{TIMEOUT, WELL_BEFORE, as_comm, on_ranks};
use super::tensor_model::{Between, Model, batch, fill};

/// How ranks with the same part train it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Within {
    Ddp,
    Zero3,
}

/// A model of which two ranks have parts, and its engine.
struct Evaluating {
    engine: Box<dyn Engine>,
    model: Model,
}

impl Evaluating {
    fn new(group: &ProcessGroup, within: Within) -> Result<Self> {
        tch::set_num_threads(1);
        let options = || -> Box<dyn EngineOptions> {
            match within {
                Within::Ddp => Default::default(),
                // Parameters are gathered when they are used, also small ones.
                Within::Zero3 => Box::new(ShardOptions {
                    gather_parameters: Some(true),
                    keep_gathered: 30,
                    ..ShardOptions::new(Stage::Zero3)
                }),
            }
        };
        let shape =
            ModelParallel { tp: 2, within: options(), ..Default::default() }.mesh_shape(group.size())?;
        let mesh = Mesh::new(group, shape)?;
        let (tp, store) = (TensorParallel::on(&mesh), VarStore::new(Device::Cpu));
        let model = Model::new(&store, &tp)?;
        fill(&store, &tp.parts());
        let options = ModelParallel { tp: 2, parts: tp.parts(), within: options(), ..Default::default() };
        Ok(Self { engine: Box::new(options).engine(EngineSetup::new(&store, &mesh))?, model })
    }

    fn forward(&self) -> Result<f64, ParallelError> {
        let (tokens, targets) = batch(0);
        let loss = || no_grad(|| self.model.loss(&tokens, &targets, Between::Sequence));
        Ok(self.engine.evaluate_with(loss)??.double_value(&[]))
    }

    /// The number of forwards of an evaluation of four, of which this rank asks for the end after some.
    fn forwards(&self, asks_after: Option<usize>) -> Result<usize> {
        self.engine.begin_evaluation(Forwards::Counted(4))?;
        let mut done = 0;
        for number in 0..4 {
            if asks_after.is_some_and(|after| number >= after) {
                assert_eq!(self.engine.cut_evaluation(), Cut::AfterForward);
            }
            match self.forward() {
                Err(ParallelError::EvaluationCut) => break,
                made => assert!(made? > 0.0),
            }
            done += 1;
        }
        self.engine.end_evaluation(None)?;
        Ok(done)
    }
}

#[test]
fn ranks_with_parts_of_one_model_stop_together() {
    for (ranks, within, stopped) in [
        (2, Within::Ddp, &[2, 2][..]),
        // Replicas do not wait for each other.
        (4, Within::Ddp, &[4, 4, 2, 2]),
        (4, Within::Zero3, &[2, 2, 2, 2]),
    ] {
        let done = on_ranks(ranks, |group| {
            let evaluating = Evaluating::new(&group, within)?;
            let asks = (group.rank() + 1 == ranks).then_some(2);
            // An evaluation that was cut leaves nothing for the next one.
            Ok([evaluating.forwards(asks)?, evaluating.forwards(None)?])
        });
        let expected: Vec<_> = stopped.iter().map(|stopped| [*stopped, 4]).collect();
        assert_eq!(done, expected, "{within:?} on {ranks} ranks");
    }
}

#[test]
fn a_rank_that_fails_in_an_evaluation_ends_those_with_other_parts() {
    for (ranks, within) in [(2, Within::Ddp), (4, Within::Ddp), (4, Within::Zero3)] {
        let options = GroupOptions { timeout: TIMEOUT, ..Default::default() };
        let run = |fails: bool| {
            let (started, is_over) = (Instant::now(), AtomicBool::new(false));
            LocalGroup::outcomes(ranks, &options, |group| {
                let run = || -> Result<()> {
                    let evaluating = Evaluating::new(&group, within)?;
                    evaluating.engine.begin_evaluation(Forwards::Counted(2))?;
                    evaluating.forward()?;
                    if fails && group.rank() == 1 {
                        evaluating.engine.end_evaluation(Some("a batch is too wide"))?;
                        // Its group lives on meanwhile: only what it says ends the others.
                        while !is_over.load(Ordering::Relaxed) && started.elapsed() < WELL_BEFORE {
                            std::thread::sleep(Duration::from_millis(5));
                        }
                        return Ok(());
                    }
                    let made = evaluating.forward();
                    is_over.fetch_or(group.rank() == 0, Ordering::Relaxed);
                    made?;
                    Ok(evaluating.engine.end_evaluation(None)?)
                };
                run().map_err(|error| as_comm(format!("{error:#}")))
            })
        };
        let started = Instant::now();
        let outcomes = run(true);
        assert!(started.elapsed() < WELL_BEFORE, "nobody waits for the timeout: {outcomes:?}");
        let error = outcomes[0].as_ref().unwrap_err().to_string();
        assert!(error.contains("a batch is too wide") && error.contains("rank 1"), "{within:?}: {error}");
        assert!(run(false).into_iter().all(|outcome| outcome.is_ok()), "control");
    }
}
