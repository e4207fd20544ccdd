//! The contents of a checkpoint's files, as a plan of the tensors that they make up.
//!
//! In: the pickles of all files. Out: for each tensor the stretches of files that hold it. Everything is checked here, so
//! that nothing is wrong once the first byte is written.

use std::collections::BTreeSet;
use std::path::PathBuf;

use drumline_pickle::{TensorInfo, TorchFile};

use super::error::DeepSpeedError;
use super::fields::Field;
use super::folder::Folder;
use super::moments::{Moments, read_moments};
use super::partition::{Cut, Param, Piece, of_each, of_groups};
use super::stretches::{Planned, Stretch};

type Result<T = ()> = std::result::Result<T, DeepSpeedError>;

/// Opened files: those of models first, then those of optimizers.
pub(super) struct Opened {
    pub(super) folder: Folder,
    pub(super) files: Vec<TorchFile>,
    /// Each storage that is used, once.
    used: std::cell::RefCell<Vec<(usize, TensorInfo)>>,
}

/// What a checkpoint's files say.
pub(super) struct States {
    pub(super) stage: u64,
    pub(super) num_ranks: usize,
    /// Steps, the skipped ones among them.
    pub(super) global_steps: u64,
    pub(super) skipped_steps: u64,
    pub(super) model: Vec<Planned>,
    /// Tied parameters once more, under their second names.
    pub(super) tied: Vec<Planned>,
    pub(super) moments: std::result::Result<Moments, DeepSpeedError>,
}

/// The flat tensors of all ranks.
pub(super) struct Flat {
    /// By ranks, then by groups.
    pub(super) tensors: Vec<Vec<TensorInfo>>,
}

impl Flat {
    fn lens(&self) -> Vec<Vec<u64>> {
        self.tensors.iter().map(|groups| groups.iter().map(TensorInfo::numel).collect()).collect()
    }
}

impl Opened {
    pub(super) fn new(folder: Folder) -> Result<Self> {
        let paths = folder.model.iter().chain(&folder.optimizer);
        let files = paths.map(|path| TorchFile::open(path)).collect::<std::result::Result<_, _>>()?;
        Ok(Self { folder, files, used: Default::default() })
    }

    pub(super) fn paths(&self) -> Vec<PathBuf> {
        self.files.iter().map(|file| file.path().to_owned()).collect()
    }

    fn model(&self, rank: usize) -> Field<'_> {
        Field::root(&self.files[rank])
    }

    /// The optimizer's file of a rank among all files.
    pub(super) fn optimizer_file(&self, rank: usize) -> usize {
        self.folder.model.len() + rank
    }

    /// `optimizer_state_dict` of a rank.
    pub(super) fn optimizer(&self, rank: usize) -> Field<'_> {
        Field::root(&self.files[self.optimizer_file(rank)]).get("optimizer_state_dict")
    }

    /// The settings that the training had.
    pub(super) fn config(&self) -> Field<'_> {
        Field::root(&self.files[self.optimizer_file(0)]).get("ds_config")
    }

    fn note(&self, file: usize, tensor: &TensorInfo) {
        let mut used = self.used.borrow_mut();
        let is_known = |(known, other): &(usize, TensorInfo)| *known == file && other.shares_storage(tensor);
        if !used.iter().rev().take(RECENT).any(is_known) {
            used.push((file, tensor.clone()));
        }
    }

    /// Compares the checksums of all elements that are used.
    pub(super) fn check(&self) -> Result {
        let used = self.used.borrow();
        used.iter().try_for_each(|(file, tensor)| Ok(self.files[*file].check(tensor)?))
    }

    pub(super) fn layout_error(&self, what: &dyn ToString) -> DeepSpeedError {
        DeepSpeedError::Layout { dir: self.folder.path.clone(), what: what.to_string() }
    }

    /// A tensor of a file.
    fn whole(&self, name: String, file: usize, field: &Field<'_>) -> Result<Planned> {
        let tensor = field.tensor()?;
        self.note(file, tensor);
        Planned::whole(name, file, tensor, &self.files[file])
    }

    /// The stretches that pieces of flat tensors name.
    pub(super) fn stretches(&self, flat: &Flat, pieces: &[Piece]) -> Result<Vec<Stretch>> {
        let stretch = |piece: &Piece| {
            let (tensor, file) = (&flat.tensors[piece.rank][piece.group], self.optimizer_file(piece.rank));
            self.note(file, tensor);
            Stretch::of(file, tensor, &self.files[file], piece.first..piece.first + piece.len)
        };
        pieces.iter().map(stretch).collect()
    }
}

/// Tensors of one storage are used one after the other.
const RECENT: usize = 4;

/// Reads all files.
pub(super) fn read(opened: &Opened) -> Result<States> {
    let model = opened.model(0);
    refuse_tensor_parallel(opened, &model)?;
    let counts = |name| model.find(name).map_or(Ok(0), |field| field.count());
    let (global_steps, skipped_steps) = (counts("global_steps")?, counts("skipped_steps")?);
    if opened.folder.optimizer.is_empty() {
        let all = model.get("module").entries()?;
        let whole = all.into_iter().map(|(name, field)| opened.whole(name, 0, &field));
        let moments = Err(opened.layout_error(&"without ZeRO there are no files of optimizers"));
        let model = whole.collect::<Result<_>>()?;
        return Ok(States {
            stage: 0,
            num_ranks: 1,
            global_steps,
            skipped_steps,
            model,
            tied: Vec::new(),
            moments,
        });
    }
    let stage = stage_of(&opened.optimizer(0))?;
    let num_ranks = check_ranks(opened, stage)?;
    let flat = flat_tensors(opened, stage)?;
    let cuts = cuts(opened, stage, &flat)?;
    let mut tensors = buffers(opened)?;
    tensors.extend(frozen(opened, stage)?);
    for Cut { param, pieces } in &cuts {
        let stretches = opened.stretches(&flat, pieces)?;
        tensors.push(Planned::joined(param.name.clone(), param.shape.clone(), stretches));
    }
    let tied = tied(&model, &tensors)?;
    check_names(opened, &tensors)?;
    let moments = read_moments(opened, stage, &flat, &cuts);
    Ok(States { stage, num_ranks, global_steps, skipped_steps, model: tensors, tied, moments })
}

fn refuse_tensor_parallel(opened: &Opened, model: &Field<'_>) -> Result {
    let size = model.find("mp_world_size").map_or(Ok(1), |size| size.count())?;
    if size <= 1 {
        return Ok(());
    }
    Err(DeepSpeedError::Unsupported {
        path: opened.folder.path.clone(),
        what: format!("it is of a tensor parallel training on {size} ranks"),
        advice: "DeepSpeed's ds_to_universal.py to merge it first",
    })
}

/// The stage. The optimizer for bf16 without ZeRO-2 and 3 divides like stage 1, and does not say so.
fn stage_of(optimizer: &Field<'_>) -> Result<u64> {
    let Some(stage) = optimizer.find("zero_stage") else {
        return optimizer.get(flat_key(1)).items().map(|_| 1);
    };
    match stage.count()? {
        found @ 1..=3 => Ok(found),
        _ => Err(stage.error("stage 1, 2 or 3")),
    }
}

fn flat_key(stage: u64) -> &'static str {
    if stage == 3 { "fp32_flat_groups" } else { "single_partition_of_fp32_groups" }
}

/// The number of ranks, all of whose files must be there.
fn check_ranks(opened: &Opened, stage: u64) -> Result<usize> {
    let partitions = opened.optimizer(0).get("partition_count");
    // One number for each group, where experts have fewer ranks.
    let counts = match partitions.items() {
        Ok(items) => items.iter().map(Field::count).collect::<Result<Vec<_>>>()?,
        Err(_) => vec![partitions.count()?],
    };
    let expected = counts.into_iter().max().unwrap_or(0) as usize;
    let Folder { path, model, optimizer, .. } = &opened.folder;
    let found = if stage == 3 { model.len().min(optimizer.len()) } else { optimizer.len() };
    if found != expected || optimizer.len() != expected {
        return Err(DeepSpeedError::Incomplete { dir: path.clone(), found, expected });
    }
    Ok(expected)
}

fn flat_tensors(opened: &Opened, stage: u64) -> Result<Flat> {
    let of_rank = |rank: usize| {
        let groups = opened.optimizer(rank).get(flat_key(stage)).items()?;
        groups.iter().map(flat_tensor).collect::<Result<Vec<_>>>()
    };
    let tensors = (0..opened.folder.optimizer.len()).map(of_rank).collect::<Result<_>>()?;
    Ok(Flat { tensors })
}

/// A tensor whose elements lie one after the other.
pub(super) fn flat_tensor(field: &Field<'_>) -> Result<TensorInfo> {
    let tensor = field.tensor()?;
    if tensor.span() != tensor.numel() || tensor.shape.len() != 1 {
        return Err(field.error("a flat tensor"));
    }
    Ok(tensor.clone())
}

/// The pieces of each trained parameter.
fn cuts(opened: &Opened, stage: u64, flat: &Flat) -> Result<Vec<Cut>> {
    let shapes = opened.model(0).get("param_shapes");
    // One dict for each group; older files have a single dict.
    let groups = shapes
        .items()
        .or_else(|error| if shapes.entries().is_ok() { Ok(vec![shapes]) } else { Err(error) })?;
    let params = |group: &Field<'_>| {
        let entries = group.entries()?.into_iter();
        entries.map(|(name, shape)| Ok(Param { name, shape: shape.shape()? })).collect::<Result<Vec<_>>>()
    };
    let groups = groups.iter().map(params).collect::<Result<Vec<_>>>()?;
    let cuts =
        if stage == 3 { of_each(&groups.concat(), &flat.lens()) } else { of_groups(&groups, &flat.lens()) };
    cuts.map_err(|misfit| opened.layout_error(&misfit))
}

/// Buffers, which all ranks have.
fn buffers(opened: &Opened) -> Result<Vec<Planned>> {
    let model = opened.model(0);
    let names = model.get("buffer_names").items()?;
    let names = names.iter().map(Field::text).collect::<Result<BTreeSet<_>>>()?;
    let all = model.get("module").entries()?.into_iter();
    let own = all.filter(|(name, _)| names.contains(name.as_str()));
    own.map(|(name, field)| opened.whole(name, 0, &field)).collect()
}

/// Parameters that were not trained: whole up to stage 2, an equal part of each rank in stage 3.
fn frozen(opened: &Opened, stage: u64) -> Result<Vec<Planned>> {
    let Some(shapes) = opened.model(0).find("frozen_param_shapes") else { return Ok(Vec::new()) };
    let of_param = |(name, shape): (String, Field<'_>)| {
        let fragment = |rank: usize| opened.model(rank).get("frozen_param_fragments").get(&name);
        if stage < 3 {
            return opened.whole(name.clone(), 0, &fragment(0));
        }
        let shape = shape.shape()?;
        let (mut left, mut stretches) = (shape.iter().product::<u64>(), Vec::new());
        for rank in 0..opened.folder.model.len() {
            let tensor = flat_tensor(&fragment(rank))?;
            let len = tensor.numel().min(left);
            if len > 0 {
                opened.note(rank, &tensor);
                stretches.push(Stretch::of(rank, &tensor, &opened.files[rank], 0..len)?);
            }
            left -= len;
        }
        if left > 0 {
            return Err(opened.layout_error(&format!("{left} elements of the frozen `{name}` are missing")));
        }
        Ok(Planned::joined(name, shape, stretches))
    };
    shapes.entries()?.into_iter().map(of_param).collect()
}

/// Tied parameters under their second names.
fn tied(model: &Field<'_>, tensors: &[Planned]) -> Result<Vec<Planned>> {
    let Some(shared) = model.find("shared_params") else { return Ok(Vec::new()) };
    let mut tied = Vec::new();
    for (name, of) in shared.entries()? {
        let named = |wanted: &str| tensors.iter().find(|tensor| tensor.name == wanted);
        if let (None, Some(first)) = (named(&name), named(of.text()?)) {
            tied.push(first.renamed(name));
        }
    }
    Ok(tied)
}

fn check_names(opened: &Opened, tensors: &[Planned]) -> Result {
    let mut names = BTreeSet::new();
    match tensors.iter().find(|tensor| !names.insert(&tensor.name)) {
        Some(twice) => Err(opened.layout_error(&format!("`{}` is there twice", twice.name))),
        None => Ok(()),
    }
}
