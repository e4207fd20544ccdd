//! From what the program asked for to a run that can begin: everything is checked, and the same on all ranks.

use std::collections::BTreeMap;
use std::sync::Arc;

use drumline_comm::{CommError, ProcessGroup, ReduceOp, call_site};
use drumline_observe::bar::Progress;
use drumline_parallel::Ddp;
use drumline_torch::{Adam, AdamOptions, Optimizer, TorchError, parameters};
use serde_json::Value;
use tch::nn::VarStore;

use super::DistTrainer;
use super::batch::Batch;
use super::callbacks::Shown;
use super::data::AnyDataset;
use super::error::TrainerError;
use super::graphs::Graphs;
use super::loss::Loss;
use super::metric::MetricKey;
use super::model::Model;
use super::norms::Norms;
use super::run::{Clock, Place, Run};
use super::settings::{LoadBestModel, Settings};
use super::share::WholeShare;
use super::state::{Start, TrainState};
use super::waits::Waits;
use crate::alike::{Given, check_alike};
use crate::checkpoint::Checkpoints;
use crate::loader::{Cause, Dataset, Loader, LoaderOptions};
use crate::rehearsal::Rehearsal;
use crate::sampler::{DataId, EvalSampler, Sampler, SamplerOptions, SamplerPosition};
use crate::scaling::scaler_for;
use crate::shared_failure::{SharedFailure, Trouble, agree};
use crate::stop_request::StopRequest;

/// fastNLP's learning rate for an optimizer that nobody asked for.
const DEFAULT_LR: f64 = 4e-3;

/// What was asked for, checked by this rank for itself.
struct Parts<'a, B: Batch, O> {
    loss: Box<dyn Loss<B, O> + 'a>,
    key: MetricKey,
    optimizer: Box<dyn Optimizer>,
    train: Loader<AnyDataset<B>>,
    dev: Option<Loader<AnyDataset<B>>>,
    stop: StopRequest,
    /// On rank 0, if steps are shown.
    progress: Option<Progress>,
}

impl<'a, M: Model<B> + ?Sized, B: Batch> DistTrainer<'a, M, B> {
    fn parts(&mut self) -> Result<Parts<'a, B, M::Output>, Cause> {
        self.settings.check()?;
        check_device(self.store, self.device)?;
        let key = MetricKey::parse(self.settings.metric_key.as_deref(), &self.scores.names()?)?;
        self.train_scores.names()?;
        let no_loss = "there is no loss; try .loss(CrossEntropy::default())";
        Ok(Parts {
            loss: self.loss.take().ok_or(no_loss)?,
            key,
            optimizer: self.optimizer.take().map_or_else(|| default_optimizer(self.store), Ok)?,
            train: self.train_loader()?,
            dev: self.dev_loader()?,
            stop: self.stop.take().map_or_else(StopRequest::listen, Ok)?,
            progress: self.progress()?,
        })
    }

    fn progress(&self) -> Result<Option<Progress>, Cause> {
        let Settings { print_every, use_tqdm, log_path, .. } = &self.settings;
        if self.group.rank() > 0 || *print_every == 0 {
            return Ok(None);
        }
        let progress = if *use_tqdm { Progress::new(*print_every) } else { Progress::lines(*print_every) };
        let Some(folder) = log_path else { return Ok(Some(progress)) };
        let logged = progress.log_to(folder);
        Ok(Some(logged.map_err(|cause| format!("cannot write log.txt in {}: {cause}", folder.display()))?))
    }

    fn train_loader(&mut self) -> Result<Loader<AnyDataset<B>>, Cause> {
        let Settings { shuffle, seed, drop_last, batch_size_per_gpu, .. } = self.settings;
        let num_samples = check_len("train_data", &self.train_data)?;
        let options =
            SamplerOptions { shuffle, seed, drop_last, ..SamplerOptions::in_group(num_samples, &self.group) };
        self.has_sampler = self.sampler.is_some();
        let sampler = match self.sampler.take() {
            Some(sampler) => sampler,
            None => Box::new(WholeShare::new(options)?) as Box<dyn Sampler>,
        };
        let options = LoaderOptions { drop_last, ..self.loader_options(batch_size_per_gpu) };
        Ok(Loader::shared(Arc::new(self.train_data.clone()), sampler, options)?)
    }

    fn dev_loader(&mut self) -> Result<Option<Loader<AnyDataset<B>>>, Cause> {
        let Some(data) = &self.dev_data else { return Ok(None) };
        let num_samples = check_len("dev_data", data)?;
        let sampler = match self.dev_sampler.take() {
            Some(sampler) => sampler,
            None => Box::new(EvalSampler::new(num_samples, self.group.size(), self.group.rank())?),
        };
        let batch_size = self.settings.dev_batch_size.unwrap_or(self.settings.batch_size_per_gpu);
        Ok(Some(Loader::shared(Arc::new(data.clone()), sampler, self.loader_options(batch_size))?))
    }

    /// What must be the same on all ranks.
    fn given(&self, config: &BTreeMap<String, Value>, parts: &Parts<'a, B, M::Output>) -> Given {
        // Only rank 0 touches them; folders may have other names on other machines, but all ranks take part where there is one.
        let folders = ["save_path", "log_path", "resume_from"];
        let told = |(name, value): (&String, &Value)| match folders.contains(&name.as_str()) {
            true if !value.is_null() => (name.clone(), "a folder".to_owned()),
            _ => (name.clone(), value.to_string()),
        };
        let mut given: Given = config.iter().map(told).collect();
        let mut add = |name: &str, value: String| given.push((name.to_owned(), value));
        // A sampler of one's own may be there because ranks have data of their own.
        if !self.has_sampler {
            add("the number of train_data's samples", self.train_data.len().to_string());
        }
        let dev = self.dev_data.as_ref().map_or("none".into(), |data| data.len().to_string());
        add("the number of dev_data's samples", dev);
        add("the learning rate", parts.optimizer.lr().to_string());
        add("the optimizer", parts.optimizer.state().kind);
        add("metrics", self.scores.0.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", "));
        add(
            "train metrics",
            self.train_scores.0.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", "),
        );
        add("callbacks", self.hooks.names().join(", "));
        given
    }

    fn loader_options(&self, batch_size: usize) -> LoaderOptions {
        let Settings { num_workers: workers, pin_memory, .. } = self.settings;
        let pin_memory = pin_memory && self.store.device().is_cuda();
        LoaderOptions { batch_size, workers, prefetch: 2, drop_last: false, pin_memory }
    }
}

fn check_len<B: Send>(name: &str, data: &AnyDataset<B>) -> Result<usize, Cause> {
    match data.len() {
        0 => Err(format!("{name} is empty; try looking at where it comes from").into()),
        len => Ok(len),
    }
}

fn check_device(store: &VarStore, wanted: Option<tch::Device>) -> Result<(), Cause> {
    let found = store.device();
    match wanted.filter(|wanted| *wanted != found) {
        None => Ok(()),
        Some(wanted) => {
            Err(format!("the model is on {found:?}, expected {wanted:?}; try VarStore::new({wanted:?})")
                .into())
        }
    }
}

fn default_optimizer(store: &VarStore) -> Result<Box<dyn Optimizer>, Cause> {
    let options = AdamOptions { lr: DEFAULT_LR, ..AdamOptions::default() };
    Ok(Box::new(Adam::new(parameters(store), options)?))
}

impl<'a, M: Model<B> + ?Sized, B: Batch> Run<'a, M, B> {
    /// Makes the run; called by all ranks together.
    pub(super) fn prepare(
        mut asked: DistTrainer<'a, M, B>,
        load_best_model: LoadBestModel,
    ) -> Result<Self, TrainerError> {
        let group = asked.group.clone();
        let parts = asked.parts();
        let parts = agree::<_, TrainerError>(&group, parts.map_err(Trouble::from))?;
        let mut config = asked.settings.to_config();
        check_alike(&group, "trainer", Ok(asked.given(&config, &parts)))?;
        if plans_batches(parts.train.sampler()) {
            config.remove("batch_size_per_gpu");
        }
        config.append(&mut asked.settings.config);
        let data = data_of_all(&group, parts.train.data_id())?;
        let steps_per_epoch = steps_of_epoch(0, &group, &parts.train, &asked.settings)?;
        let waits = Arc::new(Waits::new(asked.tracer.observer().or(asked.ddp_options.observer.take())));
        asked.ddp_options.observer = Some(Arc::clone(&waits) as _);
        let Settings { precision, loss_scale, .. } = asked.settings;
        let scaler = scaler_for(precision, loss_scale, asked.store.device());
        let scaler = agree::<_, TrainerError>(&group, scaler.map_err(Trouble::from))?;
        let norms = Norms::new(asked.ddp_options.sync_group.clone());
        let ddp = Ddp::new(asked.model, asked.store, &group, asked.ddp_options)?;
        let checkpoints = asked.checkpoints.map(|own| logged(own, parts.progress.as_ref()));
        if let Some(progress) = parts.progress.clone() {
            asked.hooks.master.insert(0, Box::new(Shown::new(progress)));
        }
        let mut has_callbacks = [u8::from(!asked.hooks.is_empty())];
        group.all_reduce(&mut has_callbacks, ReduceOp::Max)?;
        let has_callbacks = has_callbacks[0] > 0;
        let graphs = graphs_of(&asked.settings, asked.store)?;
        let rehearsal = Rehearsal::from_env(&group)?;
        let state = TrainState::new(Start {
            device: asked.store.device(),
            optimizer: parts.optimizer,
            config,
            n_epochs: asked.settings.n_epochs,
            max_steps: asked.settings.max_steps,
            steps_per_epoch,
            has_save_path: asked.settings.save_path.is_some(),
            group,
        });
        Ok(Self {
            ddp,
            site: call_site(),
            store: asked.store,
            loss: parts.loss,
            scores: asked.scores,
            train_scores: asked.train_scores,
            loaded: asked.loaded,
            tracer: asked.tracer,
            rehearsal,
            waits,
            has_callbacks,
            is_unsaved: false,
            place_among_best: None,
            evaluated_at: None,
            resumed_from: None,
            key: parts.key,
            place: Place { from: SamplerPosition { data, ..parts.train.sampler().start(0) }, turns: 0 },
            data,
            train: parts.train,
            dev: parts.dev,
            stop: parts.stop,
            checkpoints,
            hooks: asked.hooks,
            settings: asked.settings,
            load_best_model,
            best_weights: None,
            kept_best: Vec::new(),
            norms,
            scaler,
            has_stepped: false,
            clock: Clock::new(),
            worked: Vec::new(),
            progress: parts.progress,
            graphs,
            state,
        })
    }
}

/// What all ranks train on; `None` where ranks have data of their own.
fn data_of_all(group: &ProcessGroup, own: DataId) -> Result<Option<DataId>, CommError> {
    let all = group.all_gather_object(&own)?;
    Ok(all.iter().all(|other| *other == own).then_some(own))
}

/// Checkpoints whose warnings go into the run's log, unless the program has said where they go.
fn logged(checkpoints: Checkpoints, progress: Option<&Progress>) -> Checkpoints {
    match progress {
        Some(progress) if !checkpoints.has_log() => {
            let progress = progress.clone();
            checkpoints.on_warning(move |line| progress.note(line))
        }
        _ => checkpoints,
    }
}

/// Whether batches are of the size that a plan gives them, whatever the settings say.
fn plans_batches(sampler: &dyn Sampler) -> bool {
    sampler.positions_of_batch(2) == 1
}

/// The most steps that any rank has batches for in an epoch.
pub(super) fn steps_of_epoch<B: Batch>(
    epoch: u64,
    group: &ProcessGroup,
    train: &Loader<AnyDataset<B>>,
    settings: &Settings,
) -> Result<u64, TrainerError> {
    let mut steps = [train.num_batches_of(epoch).div_ceil(settings.update_every) as u64];
    group.all_reduce(&mut steps, ReduceOp::Max)?;
    if steps[0] > 0 {
        return Ok(steps[0]);
    }
    let (samples, ranks, batch) = (train.dataset().len(), group.size(), settings.batch_size_per_gpu);
    if !settings.drop_last {
        let told = format!(
            "the sampler gives no rank a batch in epoch {epoch}, of {samples} samples; try a look at its plan"
        );
        return Err(SharedFailure::alike(told).into());
    }
    Err(SharedFailure::alike(format!(
        "train_data of {samples} samples fills no batch of {batch} on each of {ranks} ranks, and drop_last leaves them out; \
         try a smaller batch_size_per_gpu, or drop_last(false)"
    ))
    .into())
}

/// What steps on a GPU are recorded in.
fn graphs_of<B, O>(settings: &Settings, store: &VarStore) -> Result<Option<Graphs<B, O>>, TorchError> {
    let is_wanted = settings.cuda_graphs && store.device().is_cuda();
    is_wanted.then(|| Graphs::new(store.trainable_variables())).transpose()
}
