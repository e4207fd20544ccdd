//! Stage 3 with parameters that are gathered when they are used, as on GPUs: here on CPUs, with the same code.

use std::time::{Duration, Instant};

use anyhow::Result;
use drumline_comm::{Mesh, ProcessGroup};
use drumline_parallel::{
    Accumulation, Agreed, Brought, Clip, Cut, Engine, EngineOptions, EngineSetup, Forwards, GradSync,
    ParallelError, ShardOptions,
};
use drumline_plan::Stage;
use drumline_torch::{AdamOptions, AdamW, Optimizer, parameters};
use rank_test::ranks_test;
use tch::nn::{Linear, Module, VarStore, linear};
use tch::{Device, Kind, Tensor};

const STEPS: i64 = 4;
const WIDTH: i64 = 24;
/// How soon all ranks know that their orders differ.
const AT_ONCE: Duration = Duration::from_secs(1);

/// Blocks of equal size, and a small norm.
struct Blocks {
    vs: VarStore,
    blocks: Vec<Linear>,
    scale: Tensor,
}

impl Blocks {
    fn new(rank: usize) -> Self {
        tch::set_num_threads(1);
        let vs = VarStore::new(Device::Cpu);
        let block = |index: usize| linear(vs.root() / "h" / index, WIDTH, WIDTH, Default::default());
        let blocks = (0..ORDER.len()).map(block).collect();
        let scale = vs.root().ones("scale", &[WIDTH]);
        for named in parameters(&vs) {
            let index = Tensor::arange(named.tensor.numel() as i64, (Kind::Float, Device::Cpu));
            let value = (index * 0.37 + rank as f64 + named.name.len() as f64).sin() * 0.4;
            tch::no_grad(|| named.tensor.shallow_clone().copy_(&value.view_as(&named.tensor)));
        }
        Self { vs, blocks, scale }
    }

    /// Runs the blocks in this order.
    fn forward(&self, x: &Tensor, order: &[usize]) -> Tensor {
        order.iter().fold(x * &self.scale, |x, block| self.blocks[*block].forward(&x).tanh())
    }

    fn names(&self) -> Vec<String> {
        parameters(&self.vs).into_iter().map(|named| named.name).collect()
    }
}

fn input(rank: usize, step: i64) -> Tensor {
    let index = Tensor::arange(4 * WIDTH, (Kind::Float, Device::Cpu)) + (rank as i64 * 1000 + step * 77);
    (index * 0.11).cos().view([4, WIDTH])
}

fn options(gathers: bool) -> ShardOptions {
    let gather_parameters = Some(gathers);
    ShardOptions {
        gather_parameters,
        keep_gathered: 30,
        shards_alone: true,
        ..ShardOptions::new(Stage::Zero3)
    }
}

struct Training {
    model: Blocks,
    engine: Box<dyn Engine>,
    optimizer: AdamW,
}

/// More units than there are slots of parameters and of gradients together.
const ORDER: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

impl Training {
    fn new(group: &ProcessGroup, options: ShardOptions) -> Result<Self> {
        let model = Blocks::new(group.rank());
        let mut optimizer =
            AdamW::new(parameters(&model.vs), AdamOptions { lr: 0.01, ..AdamOptions::default() })?;
        let mesh = Mesh::new(group, options.mesh_shape(group.size())?)?;
        let engine = Box::new(options).engine(EngineSetup::new(&model.vs, &mesh))?;
        engine.adopt(&mut optimizer)?;
        Ok(Self { model, engine, optimizer })
    }

    fn micro_batch(&self, x: &Tensor, order: &[usize], sync: GradSync) -> Result<f64> {
        let loss =
            self.engine.forward_with(sync, || self.model.forward(x, order).square().mean(Kind::Float))?;
        self.engine.backward(&loss, sync)?;
        Ok(loss.double_value(&[]))
    }

    fn step(&mut self, rank: usize, step: i64) -> Result<f64> {
        self.optimizer.zero_grad()?;
        self.micro_batch(&input(rank, step), &ORDER, GradSync::Accumulate)?;
        let loss = self.micro_batch(&input(rank, step + 100), &ORDER, GradSync::Reduce)?;
        self.engine.step(&mut self.optimizer)?;
        Ok(loss)
    }

    fn values(&self) -> Result<Vec<Tensor>> {
        self.model.names().iter().map(|name| Ok(self.engine.full(name)?)).collect()
    }
}

fn equal_to_one_copy_a_node() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    for accumulation in [Accumulation::OwnRows, Accumulation::All] {
        let with = |gathers| ShardOptions { accumulation: Some(accumulation), ..options(gathers) };
        let mut shared = Training::new(&group, with(false))?;
        let mut gathered = Training::new(&group, with(true))?;
        for step in 0..STEPS {
            assert_eq!(shared.step(group.rank(), step)?, gathered.step(group.rank(), step)?);
        }
        for (ours, theirs) in gathered.values()?.iter().zip(shared.values()?) {
            assert!(ours.equal(&theirs));
        }
        // The control: another input makes other weights.
        let before = gathered.values()?;
        gathered.step(group.rank(), 50)?;
        assert!(!gathered.values()?[0].equal(&before[0]));
    }
    Ok(())
}

ranks_test!(gathered_parameters_train_to_the_same_bits_on_one_rank, 1, { equal_to_one_copy_a_node()? });
ranks_test!(gathered_parameters_train_to_the_same_bits_on_two_ranks, 2, { equal_to_one_copy_a_node()? });
ranks_test!(gathered_parameters_train_to_the_same_bits_on_three_ranks, 3, { equal_to_one_copy_a_node()? });

ranks_test!(gathered_parameters_are_clipped_by_the_same_norm, 3, {
    let group = ProcessGroup::from_env()?;
    let [shared, gathered] = [Training::new(&group, options(false))?, Training::new(&group, options(true))?];
    let norm = |training: &Training| -> Result<f64> {
        training.micro_batch(&input(group.rank(), 1), &ORDER, GradSync::Reduce)?;
        let norm = training.engine.clip(Clip::Norm(0.05), &training.optimizer.parameters())?;
        Ok(norm.unwrap())
    };
    // Ranks own other rows, and so add up in another order.
    let [ours, theirs] = [norm(&gathered)?, norm(&shared)?];
    assert!(theirs > 0.0 && (ours - theirs).abs() < 1e-6 * theirs, "{ours} and {theirs}");
});

ranks_test!(replicas_gather_in_their_own_ranks, 4, {
    let group = ProcessGroup::from_env()?;
    let with = |gathers| ShardOptions { shard: Some(2), ..options(gathers) };
    let [mut shared, mut gathered] =
        [Training::new(&group, with(false))?, Training::new(&group, with(true))?];
    for step in 0..STEPS {
        assert_eq!(shared.step(group.rank(), step)?, gathered.step(group.rank(), step)?);
    }
});

ranks_test!(a_frozen_block_is_gathered_and_not_trained, 2, {
    let group = ProcessGroup::from_env()?;
    let model = Blocks::new(group.rank());
    let _ = model.blocks[1].ws.set_requires_grad(false);
    let mut optimizer = AdamW::new(parameters(&model.vs), AdamOptions::default())?;
    let mesh = Mesh::new(&group, options(true).mesh_shape(group.size())?)?;
    let setup = EngineSetup::new(&model.vs, &mesh);
    let engine = Box::new(options(true)).engine(setup)?;
    engine.adopt(&mut optimizer)?;
    let before = ["h.1.weight", "h.2.weight"].map(|name| engine.full(name).unwrap());
    let mut training = Training { model, engine, optimizer };
    training.step(group.rank(), 0)?;
    assert!(training.engine.full("h.1.weight")?.equal(&before[0]));
    assert!(!training.engine.full("h.2.weight")?.equal(&before[1]));
});

ranks_test!(ranks_without_samples_take_part_in_gathers, 2, {
    let group = ProcessGroup::from_env()?;
    let mut losses = Vec::new();
    for gathers in [false, true] {
        let mut training = Training::new(&group, options(gathers))?;
        training.step(group.rank(), 0)?;
        // Rank 0 has two micro-batches, rank 1 has one.
        let batches = 2 - group.rank();
        let brought = Brought { batches, samples: batches * 4, count: 1.0, ..Brought::default() };
        let agreed = Agreed::reach(training.engine.mesh(), &brought)?;
        training.optimizer.zero_grad()?;
        training.engine.begin_step(&agreed)?;
        for index in 0..batches {
            training.engine.begin_micro_batch();
            let sync = GradSync::of(index, agreed.most_batches());
            training.micro_batch(&input(group.rank(), index as i64), &ORDER, sync)?;
        }
        training.engine.join_rest(batches, agreed.most_batches())?;
        training.engine.step(&mut training.optimizer)?;
        losses.push(training.step(group.rank(), 9)?);
    }
    assert_eq!(losses[0], losses[1]);
});

/// A step in which only the first ranks have a batch, with two forwards and one backward.
fn step_with_some(
    training: &mut Training,
    group: &ProcessGroup,
    step: i64,
    num_with_batch: usize,
) -> Result<()> {
    let batches = usize::from(group.rank() < num_with_batch);
    let brought = Brought { batches, samples: batches * 4, count: 1.0, ..Brought::default() };
    let agreed = Agreed::reach(training.engine.mesh(), &brought)?;
    training.optimizer.zero_grad()?;
    training.engine.begin_step(&agreed)?;
    if batches > 0 {
        training.engine.begin_micro_batch();
        let forward = |sync| {
            let x = input(group.rank(), step);
            training
                .engine
                .forward_with(sync, || training.model.forward(&x, &ORDER).square().mean(Kind::Float))
        };
        let loss = forward(GradSync::Reduce)? + forward(GradSync::Reduce)? * 0.5;
        training.engine.backward(&loss, GradSync::Reduce)?;
    }
    training.engine.join_rest(batches, agreed.most_batches())?;
    Ok(training.engine.step(&mut training.optimizer)?)
}

ranks_test!(a_rank_without_a_batch_joins_from_the_first_step_on, 3, {
    let group = ProcessGroup::from_env()?;
    let mut values = Vec::new();
    for gathers in [false, true] {
        let mut training = Training::new(&group, options(gathers))?;
        for (step, num_with_batch) in [2, 1, 3, 2, 1].into_iter().enumerate() {
            step_with_some(&mut training, &group, step as i64, num_with_batch)?;
        }
        values.push(training.values()?);
    }
    for (ours, theirs) in values[0].iter().zip(&values[1]) {
        assert!(ours.equal(theirs));
    }
});

ranks_test!(a_rank_that_cannot_know_what_others_use_ends_all_at_once, 2, {
    let group = ProcessGroup::from_env()?;
    let training = Training::new(&group, options(true))?;
    let began = Instant::now();
    // Nobody says that rank 1 has no batch in this first step.
    let error = if group.rank() == 0 {
        training.micro_batch(&input(0, 0), &ORDER, GradSync::Reduce).map(drop).unwrap_err()
    } else {
        training.engine.begin_micro_batch();
        training.engine.backward_nothing(GradSync::Reduce).unwrap_err().into()
    };
    assert!(began.elapsed() < Duration::from_secs(5), "at once, and not after a timeout: {error}");
    assert!(error.to_string().contains("rank 1"), "{error}");
});

ranks_test!(a_model_outlives_its_engine, 2, {
    let group = ProcessGroup::from_env()?;
    let x = input(0, 3);
    for releases in [true, false] {
        let mut training = Training::new(&group, options(true))?;
        training.step(group.rank(), 0)?;
        let expected = training.values()?;
        if releases {
            training.engine.release()?;
        }
        let Training { model, engine, optimizer: _ } = training;
        drop(engine);
        if releases {
            let all = parameters(&model.vs).into_iter().map(|named| named.tensor.detach());
            assert!(all.zip(&expected).all(|(ours, expected)| ours.equal(expected)));
            assert!(f64::try_from(model.forward(&x, &ORDER).sum(Kind::Double))?.is_finite());
        } else {
            // The control: an error of libtorch, and no crash.
            assert!(model.blocks[2].ws.f_matmul(&x.transpose(0, 1)).is_err());
        }
    }
});

ranks_test!(ranks_evaluate_different_numbers_of_batches, 2, {
    let group = ProcessGroup::from_env()?;
    let mut outputs = Vec::new();
    for gathers in [false, true] {
        let mut training = Training::new(&group, options(gathers))?;
        training.step(group.rank(), 0)?;
        training.engine.begin_evaluation(Forwards::Any)?;
        for batch in 0..=group.rank() {
            let forward = || tch::no_grad(|| training.model.forward(&input(0, batch as i64), &ORDER));
            outputs.push(training.engine.evaluate_with(forward)?);
        }
        training.engine.end_evaluation(None)?;
        training.step(group.rank(), 1)?;
        outputs.push(training.engine.full("h.3.weight")?);
    }
    let (shared, gathered) = outputs.split_at(outputs.len() / 2);
    assert!(shared.iter().zip(gathered).all(|(ours, theirs)| ours.equal(theirs)));
});

/// The outputs of an evaluation between two steps, and the loss of the second step.
fn evaluated(
    group: &ProcessGroup,
    options: ShardOptions,
    forwards: Forwards,
    num: usize,
) -> Result<(Vec<Tensor>, f64)> {
    let mut training = Training::new(group, options)?;
    training.step(group.rank(), 0)?;
    training.engine.begin_evaluation(forwards)?;
    let mut outputs = Vec::new();
    let counted = if let Forwards::Counted(own) = forwards { own } else { num };
    for batch in 0..counted.max(num) {
        if batch == num && training.engine.cut_evaluation() == Cut::Now {
            break;
        }
        let forward = || tch::no_grad(|| training.model.forward(&input(0, batch as i64), &ORDER));
        match training.engine.evaluate_with(forward) {
            Err(ParallelError::EvaluationCut) => break,
            output => outputs.push(output?),
        }
    }
    training.engine.end_evaluation(None)?;
    let loss = training.step(group.rank(), 1)?;
    Ok((outputs, loss))
}

ranks_test!(counted_forwards_gather_units_when_they_are_used, 3, {
    let group = ProcessGroup::from_env()?;
    let whole = evaluated(&group, options(true), Forwards::Any, 5)?;
    // Numbers of forwards, after how many a rank asks for the end, and how many all ranks then have.
    for (counts, asks_after, ends_after) in [
        ([2, 5, 3], [2, 5, 3], 5),
        ([4, 4, 4], [4, 1, 4], 1),
        ([4, 4, 4], [4, 4, 0], 0),
        ([1, 4, 2], [1, 3, 2], 3),
        ([0, 2, 1], [0, 2, 1], 2),
    ] {
        let (own, asks_after) = (counts[group.rank()], asks_after[group.rank()]);
        let (outputs, loss) = evaluated(&group, options(true), Forwards::Counted(own), asks_after)?;
        assert!(outputs.iter().zip(&whole.0).all(|(ours, theirs)| ours.equal(theirs)));
        assert_eq!((outputs.len(), loss), (own.min(ends_after), whole.1), "{counts:?}");
    }
});

ranks_test!(a_rank_that_fails_in_an_evaluation_ends_the_others, 2, {
    let group = ProcessGroup::from_env()?;
    let mut training = Training::new(&group, options(true))?;
    training.step(group.rank(), 0)?;
    training.engine.begin_evaluation(Forwards::Counted(2))?;
    if group.rank() == 0 {
        training.engine.end_evaluation(Some("a batch is too wide"))?;
        return Ok(());
    }
    let began = Instant::now();
    let forward = || tch::no_grad(|| training.model.forward(&input(0, 0), &ORDER));
    let error = training.engine.evaluate_with(forward).unwrap_err().to_string();
    assert!(error.contains("a batch is too wide") && error.contains("rank 0"), "{error}");
    assert!(began.elapsed() < Duration::from_secs(5), "at once, and not after a timeout");
});

ranks_test!(another_order_of_units_is_an_error_that_names_both, 2, {
    let group = ProcessGroup::from_env()?;
    let mut training = Training::new(&group, options(true))?;
    training.step(group.rank(), 0)?;
    let order = if group.rank() == 0 { [0, 2, 1, 3] } else { [0, 3, 1, 2] };
    group.barrier()?;
    let began = Instant::now();
    let error = training.micro_batch(&input(0, 0), &order, GradSync::Reduce).unwrap_err().to_string();
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
    assert!(error.contains("unit h.2") && error.contains("unit h.3"), "{error}");
});

ranks_test!(a_rank_that_skips_a_unit_is_an_error_that_names_both, 2, {
    let group = ProcessGroup::from_env()?;
    let training = Training::new(&group, options(true))?;
    let order: &[usize] = if group.rank() == 0 { &ORDER } else { &[0, 1, 3, 4, 5, 6, 7] };
    group.barrier()?;
    let began = Instant::now();
    let error = training.micro_batch(&input(0, 0), order, GradSync::Reduce).unwrap_err().to_string();
    assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
    assert!(error.contains("unit h.2") && error.contains("unit h.3"), "{error}");
});

ranks_test!(a_unit_that_a_rank_skips_after_it_was_gathered_ahead_is_no_error, 2, {
    let group = ProcessGroup::from_env()?;
    let mut training = Training::new(&group, options(true))?;
    training.step(group.rank(), 0)?;
    let order: &[usize] = if group.rank() == 0 { &ORDER } else { &[0, 1, 3, 4, 5, 6, 7] };
    training.micro_batch(&input(0, 0), order, GradSync::Reduce)?;
});

ranks_test!(a_use_outside_of_a_step_is_an_error_that_names_it, 2, {
    let group = ProcessGroup::from_env()?;
    let mut training = Training::new(&group, options(true))?;
    training.step(group.rank(), 0)?;
    // Reads something, and does not crash.
    let _ = training.model.blocks[2].ws.sum(Kind::Float);
    let error = training.step(group.rank(), 1).unwrap_err().to_string();
    assert!(error.contains("`aten::sum`") && error.contains("`h.2`"), "{error}");
});

ranks_test!(an_operation_on_too_many_units_is_an_error, 2, {
    let group = ProcessGroup::from_env()?;
    let training = Training::new(&group, options(true))?;
    let all = || Tensor::cat(&training.model.blocks.iter().map(|block| &block.ws).collect::<Vec<_>>(), 0);
    let error = training.engine.forward_with(GradSync::Reduce, all).unwrap_err().to_string();
    assert!(error.contains("parameters of 8 units at once"), "{error}");
});

ranks_test!(a_trial_of_one_rank_gathers_nothing_and_leaves_no_trace, 2, {
    let group = ProcessGroup::from_env()?;
    let mut expected = Training::new(&group, options(true))?;
    let mut training = Training::new(&group, options(true))?;
    for step in 0..STEPS {
        let trial = || training.micro_batch(&input(7, step), &ORDER, GradSync::Reduce).map(drop);
        if group.rank() == 0 {
            training.engine.alone_with(trial)?;
        }
        assert_eq!(training.step(group.rank(), step)?, expected.step(group.rank(), step)?);
    }
});

ranks_test!(a_small_frozen_parameter_that_is_changed_is_changed_on_all_ranks, 2, {
    let group = ProcessGroup::from_env()?;
    let model = Blocks::new(group.rank());
    let frozen = model.blocks[1].bs.as_ref().unwrap().shallow_clone();
    let _ = frozen.set_requires_grad(false);
    let mesh = Mesh::new(&group, options(true).mesh_shape(group.size())?)?;
    let engine = Box::new(options(true)).engine(EngineSetup::new(&model.vs, &mesh))?;
    let own = engine.state().into_iter().filter(|placed| placed.name == "h.1.bias");
    let own: Vec<Tensor> = own.map(|placed| placed.tensor).collect();
    engine.change_parameters(&mut || {
        tch::no_grad(|| own.iter().for_each(|rows| drop(rows.shallow_clone().fill_(5.0))));
    })?;
    assert_eq!(frozen.min().double_value(&[]), 5.0, "rows of the other rank, too");
    assert_eq!(engine.full("h.1.bias")?.min().double_value(&[]), 5.0);
});

ranks_test!(parameters_are_not_changed_inside_an_evaluation, 2, {
    let group = ProcessGroup::from_env()?;
    let mut training = Training::new(&group, options(true))?;
    training.step(group.rank(), 0)?;
    training.engine.begin_evaluation(Forwards::Any)?;
    let error = training.engine.change_parameters(&mut || {}).unwrap_err().to_string();
    assert!(error.contains("inside an evaluation"), "{error}");
    training.engine.end_evaluation(None)?;
    training.step(group.rank(), 1)?;
});
