//! `drumline-train train`: from a configuration to a trained network, with [`DistTrainer`].

use drumline::trainer::{CrossEntropy, DistTrainer, LearningRate};
use drumline::{At, ImageBatch, Schedule};
use drumline_torch::{Determinism, Sgd, flush_denormals, keep_freed_memory, use_deterministic_algorithms};
use tch::nn::VarStore;

use super::args::TrainArgs;
use super::checked::CheckedTraining;
use super::course::{Begin, Course};
use super::gpt;
use super::job::Job;
use super::kind::{Kind, kind_of};
use super::nmt;
use super::parity;
use super::pieces::{self, Percent, Placing};
use super::text;
use crate::models::Model;
use crate::precision::Numbers;

/// Trains as the command line says; an error if that was not possible.
pub(super) fn run(args: &TrainArgs) -> anyhow::Result<()> {
    keep_freed_memory();
    flush_denormals(true)?;
    match kind_of(&args.run.cfg) {
        Kind::Images => images(args),
        Kind::Translation => nmt::run_file(args),
        Kind::Text => text::train(args),
        Kind::Gpt => gpt::train(args),
    }
}

fn images(args: &TrainArgs) -> anyhow::Result<()> {
    let checked = CheckedTraining::new(&args.run);
    let job = Job::join()?;
    let checked = job.agree(checked)?;
    let config = &checked.run.config;
    job.say_hello();
    let seed = job.seed(config.run.rng_seed)?;
    if let Some(steps) = args.verify_parity {
        return parity::verify(&job, &checked, seed, steps);
    }
    let course = Course::from(config);
    match course.begin(&job, seed)? {
        Some(begin) => train(&job, &checked, &course, begin),
        None => Ok(()),
    }
}

fn train(job: &Job, checked: &CheckedTraining, course: &Course, mut begin: Begin) -> anyhow::Result<()> {
    let (config, seed) = (&checked.run.config, begin.seed);
    let device = job.device(config.run.device)?;
    if config.cudnn.deterministic {
        use_deterministic_algorithms(Determinism::Require)?;
    }
    tch::Cuda::cudnn_set_benchmark(config.cudnn.benchmark);
    tch::manual_seed(seed as i64);
    let store = VarStore::new(device);
    let (net, options) = job.agree(pieces::model(config, &store, &job.group))?;
    let trainer = job.agree(trainer(job, checked, (&net, &store), seed))?.ddp_options(options);
    let found = begin.found.take().map(|found| pieces::with_optimizer(found, config, &store));
    begin.found = job.agree(found.transpose())?;
    course.train(job, trainer, begin)
}

type ImageTrainer<'a> = DistTrainer<'a, Model, ImageBatch>;

/// The trainer that the configuration asks for, by the rank alone.
fn trainer<'a>(
    job: &Job,
    checked: &CheckedTraining,
    (net, store): (&'a Model, &'a VarStore),
    seed: u64,
) -> anyhow::Result<ImageTrainer<'a>> {
    let config = &checked.run.config;
    let (optim, train) = (&config.optim, &config.train);
    let (images, test) = (pieces::train_images(checked)?, pieces::test_images(&checked.run)?);
    let placing = Placing::of(config, store.device(), &[&images, &test])?;
    job.tell(placing.told.as_deref());
    let (images, test) = (placing.put(images)?, placing.put(test)?);
    let sampler = pieces::train_sampler(&images, config, job.place(), seed)?;
    let schedule = pieces::schedule(optim)?;
    // Distribuuuu sets the learning rate once an epoch.
    let schedule = move |at: At| schedule.lr(At { epoch: at.epoch.floor(), ..at });
    let mut trainer = DistTrainer::new(&job.group, net, store, images)
        .dev_data(test)
        .loss(CrossEntropy::default())
        .sampler(sampler)
        .train_metric("acc1", Percent::of_top(1))
        .metric("acc1", Percent::of_top(1))
        .callback(LearningRate::by(schedule))
        .batch_size_per_gpu(train.batch_size)
        .dev_batch_size(config.test.batch_size)
        .update_every(train.accumulate)
        .num_workers(train.workers)
        .pin_memory(train.pin_memory);
    trainer =
        Numbers::of(config.run.precision, &config.fp16)
            .with_optimizer(trainer, store, |parameters| Sgd::new(parameters, pieces::sgd_options(optim)))?;
    let k = train.topk.min(config.model.num_classes);
    if k > 1 {
        trainer = trainer.metric(format!("acc{k}"), Percent::of_top(k));
    }
    Ok(trainer)
}
