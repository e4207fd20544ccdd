//! What one rank of a pipeline finds wrong ends all ranks, where they wait for one another outside of a row as well.

use std::time::Instant;

use drumline_parallel::pipeline::{LayerList, LayerSpec, Linear, Pipeline, PipelineOptions, Scale};
use drumline_parallel::{Agreed, Brought};
use drumline_plan::pipeline::Schedule;

use super::pipeline_faults::END_WITHIN;
use super::pipeline_model::{Variant, agreed, batches, layers, loss, mesh, options, step};
use super::tensor::on_ranks;

#[test]
fn a_layer_that_one_rank_cannot_build_is_an_error_on_all() {
    let list = |fails: bool| {
        let mut list = LayerList::default();
        for place in 0..2 {
            list.push(LayerSpec::new(format!("fc{place}"), move |layer| {
                if fails && place == 1 {
                    return Err("its file is missing".into());
                }
                Ok(Box::new(Linear::new(&layer.path(), 4, 4)?))
            }));
        }
        list
    };
    let errors = on_ranks(2, |group| {
        let made = Pipeline::new(&list(true), &mesh(&group, 2)?, PipelineOptions::default());
        Ok(made.unwrap_err().to_string())
    });
    let own = "layer `fc1`: its file is missing";
    assert_eq!(errors, [format!("rank 1 cannot build its stages: {own}"), own.to_owned()]);
    // The control: without the fault both are made.
    on_ranks(2, |group| {
        Ok(Pipeline::new(&list(false), &mesh(&group, 2)?, PipelineOptions::default()).map(drop)?)
    });
}

#[test]
fn an_evaluation_of_other_numbers_is_an_error_on_all_ranks() {
    let errors = on_ranks(2, |group| {
        let pipeline =
            Pipeline::new(&layers(Variant::PLAIN), &mesh(&group, 2)?, options(Schedule::OneFOneB.into(), 2))?;
        let error = pipeline.evaluate(&batches(2 + group.rank(), false, 0), loss).unwrap_err().to_string();
        // Nobody waited, and the same numbers are evaluated.
        assert!(pipeline.evaluate(&batches(2, false, 0), loss)? > 0.0);
        Ok(error)
    });
    let expected = "rank 1 brings 3 micro-batches and rank 0 brings 2; \
                    try the same number on all ranks of a pipeline";
    assert_eq!(errors, [expected; 2]);
}

#[test]
fn a_loss_that_fails_in_an_evaluation_ends_replicas_too() {
    let begin = Instant::now();
    let errors = on_ranks(4, |group| {
        let pipeline =
            Pipeline::new(&layers(Variant::PLAIN), &mesh(&group, 2)?, options(Schedule::OneFOneB.into(), 2))?;
        // The last stage of one of two replicas.
        let fails = group.rank() == 3;
        let outcome = pipeline.evaluate(&batches(2, false, 0), |outputs, batch| {
            if fails { Err("a loss of nothing".into()) } else { loss(outputs, batch) }
        });
        Ok(outcome.unwrap_err().to_string())
    });
    assert!(errors.iter().all(|error| error.contains("a loss of nothing")), "{errors:?}");
    assert!(begin.elapsed() < END_WITHIN);
}

#[test]
fn a_step_that_counts_nothing_is_an_error() {
    let errors = on_ranks(2, |group| {
        let pipeline =
            Pipeline::new(&layers(Variant::PLAIN), &mesh(&group, 2)?, options(Schedule::OneFOneB.into(), 2))?;
        let batches = batches(2, false, 0);
        // As a rank would count that has no targets.
        let count = if group.rank() == 0 { 0.0 } else { 12.0 };
        let brought = Brought { batches: 2, samples: 4, count, ..Default::default() };
        let nothing = Agreed::reach(pipeline.engine().mesh(), &brought)?;
        Ok(pipeline.step(&nothing, &batches, Scale::No, loss).unwrap_err().to_string())
    });
    assert!(
        errors.iter().all(|error| error.starts_with("the count of a step is 0; expected more than 0")),
        "{errors:?}"
    );
    // The control: what the first stage's rank counts is what counts.
    on_ranks(2, |group| {
        let pipeline =
            Pipeline::new(&layers(Variant::PLAIN), &mesh(&group, 2)?, options(Schedule::OneFOneB.into(), 2))?;
        let batches = batches(2, false, 0);
        assert_eq!(agreed(pipeline.engine().mesh(), &batches)?.count, 12.0);
        step(&pipeline, &batches).map(drop)
    });
}
