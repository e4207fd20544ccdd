//! The trainer that a translation's configuration asks for.

use std::rc::Rc;

use drumline::trainer::{
    CallbackResult, Checkpoint, DistTrainer, EarlyStop, EventFile, Every, GradientClip, MasterCallback,
    MovingAverage, RankFiles, TensorBoard, TrainState,
};
use drumline::{Exchange, Perplexity};
use tch::nn::VarStore;

use super::Checked;
use crate::config::table;
use crate::models::transformer::Transformer;
use crate::nmt::config::MovingAverageMethod;
use crate::nmt::{
    Bitext, Bleu, Due, NmtConfig, NmtTrainer, TranslationLoss, Validation, Words, optimizer_keys,
    with_learning_rate,
};
use crate::optimizer::with_optimizer;
use crate::program::job::Job;
use crate::program::translate::CONFIG;

/// By the rank alone.
pub(super) fn trainer<'a>(
    job: &Job,
    checked: &Checked,
    net: &'a Transformer,
    store: &'a VarStore,
) -> anyhow::Result<NmtTrainer<'a>> {
    let config = &checked.config;
    let (training, run) = (&config.training, &config.run);
    let sampler = checked.train.train_sampler(config, &job.group).map_err(anyhow::Error::from_boxed)?;
    let trainer = DistTrainer::new(&job.group, net, store, checked.train.clone())
        .loss(TranslationLoss::new(config))
        .sampler(sampler)
        .train_metric("words", Words::default())
        .stop_request(job.stop.clone())
        .update_every(training.update_cycle)
        .n_epochs(training.max_epochs)
        .validate_every(Every::Never)
        .num_workers(run.workers)
        .seed(training.seed)
        .print_every(training.disp_freq)
        .accept_new_data(run.accept_new_data)
        .log_path(&run.log_path)
        .config(table::to_json(config).chain([checked.print()?]));
    let trainer = with_optimizer(trainer, optimizer_keys(config), store)?;
    // Callbacks come in this order: gradients are clipped, then the rate of the step is set.
    let trainer = match config.optimizer.grad_clip {
        most if most > 0.0 => trainer.callback(GradientClip::norm(most)),
        _ => trainer,
    };
    let trainer = with_learning_rate(trainer, config)?;
    let trainer = with_average(trainer, config);
    let trainer = match &checked.valid {
        Some(valid) => with_validation(trainer, checked, valid, ValidationParts { job, net })?,
        None => trainer,
    };
    let checkpoint = Checkpoint::every(Every::Steps(training.save_freq))
        .keep_last(training.num_kept_checkpoints)
        .keep_best(training.num_kept_best_model);
    let trainer = trainer.callback(checkpoint);
    Ok(observed(
        match training.max_steps {
            Some(most) => trainer.max_steps(most),
            None => trainer,
        },
        config,
    ))
}

fn with_average<'a>(trainer: NmtTrainer<'a>, config: &NmtConfig) -> NmtTrainer<'a> {
    let training = &config.training;
    let average = match training.moving_average_method {
        None => return trainer,
        Some(MovingAverageMethod::Sma) => MovingAverage::sma(),
        Some(MovingAverageMethod::Ema) => MovingAverage::ema(training.moving_average_alpha),
    };
    trainer.callback(average.from_epoch(training.moving_average_start_epoch))
}

struct ValidationParts<'a, 'j> {
    job: &'j Job,
    net: &'a Transformer,
}

/// By loss, perplexity and BLEU; the best has the best BLEU.
fn with_validation<'a>(
    trainer: NmtTrainer<'a>,
    checked: &Checked,
    valid: &Bitext,
    parts: ValidationParts<'a, '_>,
) -> anyhow::Result<NmtTrainer<'a>> {
    let Checked { config, codecs, .. } = checked;
    let ValidationParts { job, net } = parts;
    let bleu = Bleu::new(net, config, valid, codecs)?;
    let bleu = if job.is_first() { bleu.counting_left_out()? } else { bleu };
    let validation = Validation {
        due: Due::new(config),
        max_steps: config.training.max_steps,
        round: Rc::clone(&bleu.round),
        exchange: Exchange::by(config.run.shared_dir.as_deref()),
        folder: config.run.valid_path.clone(),
        lines: valid.corpus().left_out().of,
        last: None,
    };
    let sampler = valid.valid_sampler(config, &job.group).map_err(anyhow::Error::from_boxed)?;
    Ok(trainer
        .dev_data(valid.clone())
        .dev_sampler(sampler)
        .metric("ppl", Perplexity::default())
        .metric("bleu", bleu)
        .metric_key("bleu")
        .callback(validation)
        .callback(EarlyStop::patience(config.training.early_stop_patience)))
}

/// With those that write what happens.
fn observed<'a>(trainer: NmtTrainer<'a>, config: &NmtConfig) -> NmtTrainer<'a> {
    let run = &config.run;
    trainer
        .callback(RankFiles::in_folder(&run.log_path))
        .master_callback(SaveConfig(config.clone()))
        .master_callback(EventFile::in_folder(&run.log_path))
        .master_callback(TensorBoard::in_folder(run.log_path.join("tensorboard")))
}

/// Writes the resolved configuration and the vocabularies beside the checkpoints, once nothing stands against the run.
struct SaveConfig(NmtConfig);

impl MasterCallback for SaveConfig {
    fn on_train_begin(&mut self, _: &TrainState) -> CallbackResult {
        let folder = &self.0.run.saveto;
        let (config, copies) = self.0.kept_in(folder);
        for (from, to) in copies.iter().filter(|(from, to)| from != to) {
            let beside = to.with_added_extension("part");
            std::fs::copy(from, &beside)?;
            std::fs::rename(beside, to)?;
        }
        Ok(std::fs::write(folder.join(CONFIG), config.to_yaml())?)
    }
}
