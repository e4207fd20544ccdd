//! Prepares a run from the program's settings: everything is checked, and is the same on all ranks.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

use drumline_comm::{Mesh, ReduceOp, call_site};
use drumline_observe::bar::Progress;
use drumline_parallel::pipeline::Pipeline;
use drumline_parallel::{Engine, EngineSetup, ReductionObserver};
use drumline_torch::{Adam, AdamOptions, Masks, Optimizer, TorchError, parameters};
use serde_json::Value;
use tch::nn::VarStore;
use tch::{Cuda, Device};

use super::DistTrainer;
use super::batch::Batch;
use super::best::BestModels;
use super::callbacks::ProgressDisplay;
use super::context::{Clock, Context};
use super::data::AnyDataset;
use super::error::TrainerError;
use super::evaluate::Evaluator;
use super::graphs::{Graphs, Watched};
use super::learner::Learner;
use super::loss::Loss;
use super::metric::{MetricKey, Scores};
use super::model::Model;
use super::run::Run;
use super::save::Saver;
use super::settings::{LoadBestModel, Settings};
use super::share::WholeShare;
use super::state::{Start, TrainState};
use super::train_data::TrainData;
use super::waits::Waits;
use crate::checkpoint::Checkpoints;
use crate::comm::alike::{NamedValues, check_alike};
use crate::comm::shared_failure::{LocalFailure, SharedFailure, agree};
use crate::data::loader::{Cause, Dataset, Loader, LoaderOptions};
use crate::data::sampler::{EvalSampler, Sampler, SamplerOptions};
use crate::injected_faults::InjectedFaults;
use crate::launch::stop_request::StopRequest;
use crate::scaling::scaler_for;

/// fastNLP's learning rate for the default optimizer.
const DEFAULT_LR: f64 = 4e-3;

/// The parts of a run, checked by this rank.
struct Parts<'a, B: Batch, O> {
    loss: Box<dyn Loss<B, O> + 'a>,
    key: MetricKey,
    optimizer: Box<dyn Optimizer>,
    train: Loader<AnyDataset<B>>,
    dev: Option<Loader<AnyDataset<B>>>,
    stop: StopRequest,
    /// On rank 0, if progress is shown.
    progress: Option<Progress>,
}

impl<'a, M: Model<B> + ?Sized, B: Batch> DistTrainer<'a, M, B> {
    fn parts(&mut self, mesh: &Mesh) -> Result<Parts<'a, B, M::Output>, Cause> {
        self.settings.check()?;
        check_device(self.train_device())?;
        let key = MetricKey::parse(self.settings.metric_key.as_deref(), &self.scores.names()?)?;
        self.train_scores.names()?;
        let no_loss = "there is no loss; try .loss(CrossEntropy::default())";
        Ok(Parts {
            loss: self.loss.take().ok_or(no_loss)?,
            key,
            optimizer: self.optimizer.take().map_or_else(|| default_optimizer(self.store), Ok)?,
            train: self.train_loader(mesh)?,
            dev: self.dev_loader(mesh)?,
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

    fn train_loader(&mut self, mesh: &Mesh) -> Result<Loader<AnyDataset<B>>, Cause> {
        let Settings { shuffle, seed, drop_last, batch_size_per_gpu, .. } = self.settings;
        let num_samples = check_len("train_data", &self.train_data)?;
        let in_group = SamplerOptions::in_group(num_samples, mesh.samples());
        let options = SamplerOptions { shuffle, seed, drop_last, ..in_group };
        self.has_sampler = self.sampler.is_some();
        let sampler = match self.sampler.take() {
            Some(sampler) => sampler,
            None => Box::new(WholeShare::new(options)?) as Box<dyn Sampler>,
        };
        let options = LoaderOptions { drop_last, ..self.loader_options(batch_size_per_gpu) };
        Ok(Loader::shared(Arc::new(self.train_data.clone()), sampler, options)?)
    }

    fn dev_loader(&mut self, mesh: &Mesh) -> Result<Option<Loader<AnyDataset<B>>>, Cause> {
        let Some(data) = &self.dev_data else { return Ok(None) };
        let num_samples = check_len("dev_data", data)?;
        let sampler = match self.dev_sampler.take() {
            Some(sampler) => sampler,
            None => Box::new(EvalSampler::new(num_samples, mesh.samples().size(), mesh.samples().rank())?),
        };
        let batch_size = self.settings.dev_batch_size.unwrap_or(self.settings.batch_size_per_gpu);
        Ok(Some(Loader::shared(Arc::new(data.clone()), sampler, self.loader_options(batch_size))?))
    }

    /// The values that must be the same on all ranks.
    fn shared_values(
        &self,
        config: &BTreeMap<String, Value>,
        parts: &Parts<'a, B, M::Output>,
    ) -> NamedValues {
        // Only rank 0 uses the folders, which may have other names on other machines. Whether there is one must be the
        // same on all ranks.
        let folders = ["save_path", "log_path", "resume_from"];
        let entry = |(name, value): (&String, &Value)| {
            let is_folder = folders.contains(&name.as_str()) && !value.is_null();
            (name.clone(), if is_folder { "a folder".to_owned() } else { value.to_string() })
        };
        let mut shared_values: NamedValues = config.iter().map(entry).collect();
        let mut add = |name: &str, value: String| shared_values.push((name.to_owned(), value));
        // With a sampler of its own, a program may have different data on each rank.
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
        shared_values
    }

    fn loader_options(&self, batch_size: usize) -> LoaderOptions {
        let Settings { num_workers: workers, pin_memory, .. } = self.settings;
        let pin_memory = pin_memory && self.train_device().is_cuda();
        LoaderOptions { batch_size, workers, prefetch: 2, drop_last: false, pin_memory }
    }
}

fn check_len<B: Send>(name: &str, data: &AnyDataset<B>) -> Result<usize, Cause> {
    match data.len() {
        0 => {
            Err(format!("{name} is empty, expected at least one sample; try checking its path or its filter")
                .into())
        }
        len => Ok(len),
    }
}

fn check_device(device: Device) -> Result<(), Cause> {
    let num_gpus = Cuda::device_count().max(0) as usize;
    match device {
        Device::Cuda(gpu) if gpu >= num_gpus => Err(format!(
            "the device is {device:?}, and {num_gpus} GPUs can be used here; try local_device(&group)"
        )
        .into()),
        _ => Ok(()),
    }
}

fn default_optimizer(store: &VarStore) -> Result<Box<dyn Optimizer>, Cause> {
    let options = AdamOptions { lr: DEFAULT_LR, ..AdamOptions::default() };
    Ok(Box::new(Adam::new(parameters(store), options)?))
}

impl<'a, M: Model<B> + ?Sized, B: Batch> DistTrainer<'a, M, B> {
    /// Prepares the run. All ranks call it together.
    pub(super) fn prepare(mut self, load_best_model: LoadBestModel) -> Result<Run<'a, M, B>, TrainerError> {
        let (group, device) = (self.group.clone(), self.train_device());
        let mesh = self.mesh()?;
        let parts = self.parts(&mesh);
        let parts = agree::<_, TrainerError>(&group, parts.map_err(LocalFailure::from))?;
        let mut config = self.settings.to_config();
        check_alike(&group, "trainer", &Ok(self.shared_values(&config, &parts)))?;
        let data = TrainData::new(parts.train, &self.settings, &mesh)?;
        if data.plans_batches() {
            config.remove("batch_size_per_gpu");
        }
        config.append(&mut self.settings.config);
        let steps_per_epoch = data.num_steps(0, &self.settings, &mesh)?;
        let waits = Arc::new(Waits::new(self.tracer.observer()));
        let scaler = scaler_for(self.settings.precision, self.settings.loss_scale, device);
        let scaler = agree::<_, TrainerError>(&group, scaler.map_err(LocalFailure::from))?;
        let observer: Arc<dyn ReductionObserver> = waits.clone();
        let setup = EngineSetup { device, observer: Some(observer), ..EngineSetup::new(self.store, &mesh) };
        let engine: Rc<dyn Engine> = self.engine.engine(setup)?.into();
        let masks = Masks::new(self.settings.seed, device)?;
        let pipeline = pipeline_of(self.model, &self.scores, &engine)?.map(|pipeline| {
            let autocast = self.settings.precision.autocast();
            Rc::new(pipeline.with_masks(masks.clone()).with_autocast(autocast))
        });
        let mut optimizer = parts.optimizer;
        engine.adopt(&mut *optimizer)?;
        let accumulates = self.settings.update_every > 1;
        // A pipeline accumulates whole gradients.
        let has_choice = accumulates && pipeline.is_none();
        let accumulation_note = has_choice.then(|| engine.accumulation_note()).flatten();
        let offload_note = engine.offload_note();
        let checkpoints = self.checkpoints.map(|own| logged(own, parts.progress.as_ref()));
        if let Some(progress) = parts.progress.clone() {
            self.hooks.master.insert(0, Box::new(ProgressDisplay::new(progress)));
        }
        let may_refuse =
            !(self.hooks.is_empty() && self.schedule.is_none() && self.settings.clips.is_empty());
        let mut may_refuse_step = [u8::from(may_refuse)];
        group.all_reduce(&mut may_refuse_step, ReduceOp::Max)?;
        let graphs = match &pipeline {
            Some(_) => Graphs::off(),
            None => graphs_of(&self.settings, self.store, &*engine, device)?,
        };
        let faults = InjectedFaults::from_env(&group)?;
        let state = TrainState::new(Start {
            mesh: *mesh.shape(),
            device,
            optimizer,
            config,
            n_epochs: self.settings.n_epochs,
            max_steps: self.settings.max_steps,
            steps_per_epoch,
            has_save_path: self.settings.save_path.is_some(),
            accumulation_note,
            offload_note,
            group,
        });
        let site = call_site();
        Ok(Run {
            graphs,
            learner: Learner {
                model: self.model,
                device,
                engine,
                pipeline,
                loss: parts.loss,
                scores: self.train_scores,
                precision: self.settings.precision,
                scaler,
                clips: self.settings.clips.clone(),
                schedule: self.schedule,
                betas: None,
                has_stepped: false,
                masks,
                waits,
                site,
            },
            data,
            evaluator: Evaluator { dev: parts.dev, scores: self.scores },
            saver: Saver::new(checkpoints, BestModels::new(parts.key, load_best_model)),
            load_best_model,
            loaded: self.loaded,
            faults,
            worked: Vec::new(),
            context: Context {
                state,
                hooks: self.hooks,
                may_refuse_step: may_refuse_step[0] > 0,
                settings: self.settings,
                site,
                stop: parts.stop,
                tracer: self.tracer,
                clock: Clock::new(),
                progress: parts.progress,
                is_unsaved: false,
            },
        })
    }

    /// Where the model trains.
    fn train_device(&self) -> Device {
        self.device.unwrap_or_else(|| self.store.device())
    }

    /// The mesh of the engine. An error is the same on all ranks.
    fn mesh(&self) -> Result<Mesh, TrainerError> {
        let shape = self.engine.mesh_shape(self.group.size());
        let shape = shape.map_err(|error| SharedFailure::on_all_ranks(error.to_string()))?;
        let of_stages = self.model.staged().map(|staged| staged.stages().mesh());
        match self.mesh.as_ref().or(of_stages) {
            None => Ok(Mesh::new(&self.group, shape)?),
            Some(mesh) if *mesh.shape() == shape => Ok(mesh.clone()),
            Some(mesh) => Err(SharedFailure::on_all_ranks(format!(
                "the mesh of the model's layers is {}, that of the engine {shape}; try the same sizes for both",
                mesh.shape()
            ))
            .into()),
        }
    }
}

/// What runs a model that is cut into stages. All ranks call it.
fn pipeline_of<M: Model<B> + ?Sized, B: Batch>(
    model: &M,
    scores: &Scores<'_, B, M::Output>,
    engine: &Rc<dyn Engine>,
) -> Result<Option<Pipeline>, TrainerError> {
    let Some(staged) = model.staged() else { return Ok(None) };
    if let Some(name) = scores.that_uses_model() {
        let text = format!(
            "the metric `{name}` runs the model by itself, which is cut into stages; try without it, or without a pipeline"
        );
        return Err(SharedFailure::on_all_ranks(text).into());
    }
    Ok(Some(Pipeline::on(Rc::clone(staged.stages()), Rc::clone(engine))?))
}

/// Sends the warnings of checkpoints to the run's log, unless the program has set a function for them.
fn logged(checkpoints: Checkpoints, progress: Option<&Progress>) -> Checkpoints {
    match progress {
        Some(progress) if !checkpoints.has_log() => {
            let progress = progress.clone();
            checkpoints.on_warning(move |line| progress.note(line))
        }
        _ => checkpoints,
    }
}

/// The CUDA graphs of the training, if they are enabled.
fn graphs_of<B: Batch, O>(
    settings: &Settings,
    store: &VarStore,
    engine: &dyn Engine,
    device: Device,
) -> Result<Graphs<B, O>, TorchError> {
    if settings.cuda_graphs && device.is_cuda() {
        let held = engine.state().into_iter().map(|placed| placed.tensor).collect();
        Graphs::of(Watched { variables: store.trainable_variables(), held })
    } else {
        Ok(Graphs::off())
    }
}
