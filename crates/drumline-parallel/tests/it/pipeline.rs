//! Pipelines against one process without a pipeline: equal losses and equal bits of all gradients.

use std::time::Instant;

use anyhow::Result;
use drumline_comm::ProcessGroup;
use drumline_parallel::pipeline::{Order, Pipeline};
use drumline_plan::pipeline::Schedule;
use rank_test::ranks_test;

use super::pipeline_model::{
    Oracle, Variant, batches, clear, gradients, layers, mesh, options, step, values,
};
use super::tensor::on_ranks;

/// Schedules, each with its stages per rank.
const ORDERS: [(Schedule, usize); 10] = [
    (Schedule::GPipe, 1),
    (Schedule::OneFOneB, 1),
    (Schedule::Interleaved, 2),
    (Schedule::Interleaved, 3),
    (Schedule::Interleaved, 4),
    (Schedule::BreadthFirst, 2),
    (Schedule::BreadthFirst, 4),
    (Schedule::ZeroBubble1P, 1),
    (Schedule::ZeroBubble1P, 2),
    (Schedule::ZeroBubbleV, 2),
];

/// Two steps of a pipeline, each compared with one process. `None` if the schedule has no such size.
fn compare(
    group: &ProcessGroup,
    order: &Order,
    micro_batches: usize,
    variant: Variant,
) -> Result<Option<()>> {
    if order.plan(group.size(), micro_batches).is_err() {
        return Ok(None);
    }
    let options = options(order.clone(), micro_batches);
    let masks = options.masks.clone().unwrap();
    let pipeline = Pipeline::new(&layers(variant), &mesh(group, group.size())?, options)?;
    let (values, parameters) = (values(&pipeline)?, pipeline.engine().parameters());
    for number in 0..2 {
        let batches = batches(micro_batches, variant.is_uneven, number);
        masks.set_step(number as u64)?;
        let loss = step(&pipeline, &batches)?;
        let oracle = Oracle::new(variant, &values, &batches, number as u64);
        assert_eq!(loss.sum, oracle.loss());
        let plan = pipeline.plan(micro_batches)?;
        let expected = oracle.in_order_of(plan.program(), pipeline.layers());
        let found = gradients(&parameters);
        assert_eq!(found.len(), parameters.len(), "each parameter has a gradient");
        for (name, found) in &found {
            assert_eq!(*found, expected[name], "`{name}` on rank {}", group.rank());
        }
        let rank = group.rank();
        assert_eq!(pipeline.peak_activations(), plan.activations(rank), "activations of rank {rank}");
        assert!(pipeline.peak_received() <= plan.receive_buffers(rank), "receive buffers of rank {rank}");
        clear(&parameters);
    }
    Ok(Some(()))
}

fn grid(ranks: usize) {
    let begin = Instant::now();
    let compared: usize = on_ranks(ranks, |group| {
        tch::set_num_threads(1);
        let mut compared = 0;
        for (schedule, chunks) in ORDERS {
            for micro_batches in 1..10 {
                for variant in [Variant::PLAIN, Variant::ALL] {
                    let order = Order::Schedule { schedule, chunks };
                    let outcome = compare(&group, &order, micro_batches, variant);
                    let outcome = outcome.map_err(|error| {
                        anyhow::anyhow!("{schedule} with {chunks} stages a rank, {micro_batches} micro-batches, {variant:?}: {error:#}")
                    });
                    compared += usize::from(outcome?.is_some());
                }
            }
        }
        Ok(compared)
    })
    .remove(0);
    assert!(compared > 130, "{compared} pipelines");
    eprintln!("{compared} pipelines of {ranks} ranks in {:?}", begin.elapsed());
}

#[test]
fn two_ranks_have_the_bits_of_one() {
    grid(2);
}

#[test]
fn three_ranks_have_the_bits_of_one() {
    grid(3);
}

#[test]
fn four_ranks_have_the_bits_of_one() {
    grid(4);
}

#[test]
fn one_rank_can_have_all_stages() {
    on_ranks(1, |group| {
        for (schedule, chunks) in ORDERS {
            let order = Order::Schedule { schedule, chunks };
            for ranks in [2, 3] {
                let options = drumline_parallel::pipeline::PipelineOptions {
                    ranks: Some(ranks),
                    ..options(order.clone(), 6)
                };
                let variant = Variant { is_tied: false, ..Variant::ALL };
                let pipeline = Pipeline::new(&layers(variant), &mesh(&group, 1)?, options)?;
                let values = values(&pipeline)?;
                let batches = batches(6, true, 0);
                let loss = step(&pipeline, &batches)?;
                let oracle = Oracle::new(variant, &values, &batches, 0);
                assert_eq!(loss.sum, oracle.loss());
                let expected = oracle.in_order_of(pipeline.plan(6)?.program(), pipeline.layers());
                for (name, found) in gradients(&pipeline.engine().parameters()) {
                    assert_eq!(found, expected[&name], "{schedule} `{name}`");
                }
            }
        }
        Ok(())
    });
}

fn as_processes(schedule: Schedule, variant: Variant) -> Result<()> {
    let group = ProcessGroup::from_env()?;
    for micro_batches in [2, 4] {
        assert!(compare(&group, &Order::from(schedule), micro_batches, variant)?.is_some());
    }
    Ok(())
}

ranks_test!(two_processes_have_the_bits_of_one, 2, {
    as_processes(Schedule::OneFOneB, Variant::ALL)?;
    as_processes(Schedule::ZeroBubbleV, Variant::ALL)?;
});

ranks_test!(three_processes_have_the_bits_of_one, 3, {
    as_processes(Schedule::GPipe, Variant::PLAIN)?;
    as_processes(Schedule::ZeroBubble1P, Variant::ALL)?;
    as_processes(Schedule::BreadthFirst, Variant::ALL)?;
});

ranks_test!(first_values_do_not_depend_on_the_cut, 2, {
    let group = ProcessGroup::from_env()?;
    let variant = Variant { draws: true, ..Variant::ALL };
    let cut = Pipeline::new(&layers(variant), &mesh(&group, 2)?, options(Schedule::GPipe.into(), 1))?;
    let alone = group.new_group(&[0])?;
    let cut = values(&cut)?;
    let Some(alone) = alone else { return Ok(()) };
    let whole = Pipeline::new(&layers(variant), &mesh(&alone, 1)?, options(Schedule::GPipe.into(), 1))?;
    let whole = values(&whole)?;
    assert_eq!(whole.len(), cut.len());
    for (name, value) in whole {
        assert_eq!(value, cut[&name], "`{name}`");
    }
});
