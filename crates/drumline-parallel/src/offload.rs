//! State that is not where the model trains, between the steps of an optimizer: in host memory beside a GPU (`beside`), or
//! in files.
//!
//! ```text
//!   disk     [ unit 0 | unit 1 | unit 2 | … ]                      each unit: what the optimizer keeps for its parameters
//!               │ read ahead        ▲ written behind               (moments, f32 master weights)
//!   memory      └▶ buffer 0 / buffer 1 ─ step of one unit ┘        two buffers, as large as the two largest units
//! ```
//! The optimizer steps one unit after the other: only the gradients of that unit are there when it is called. So it need
//! not know that its state moves, and its steps have the same bits as without offload. While unit k is stepped, a
//! thread writes unit k-1 back and reads unit k+1.
//!
//! A step begins when the norm of all gradients is known, so that clipping and skipped steps are exact. Nothing is
//! speculated, and the step waits for its last write.
//!
//! Between steps the tensors of the state are at home: pages of the file, which are mapped. A checkpoint, or a program,
//! reads them as any tensor, and the kernel can take the memory back.
//!
//! - `options`: what a program chooses; `unit`: the tensors of a unit; `mover`: the thread and its buffers
//! - `reservation`: which units go where, decided by `drumline-plan`, and the space for them
//! - `beside`, `twins`, `host_memory`: units that the CPU steps, and their memory; `copier`, `completion`: the copies between a
//!   GPU and them, and when gradients are complete
//!
//! Parameters in stage 3 are gathered from the file of a rank's rows as from its memory (`shard/weights.rs`): the kernel
//! reads the rows of the unit that comes after the next one.
//!
//! Not here: which parameters make a unit, which the engine says; tensors and files, which `drumline-torch` moves.

mod beside;
mod completion;
mod copier;
mod host_memory;
mod mover;
mod options;
mod reservation;
mod twins;
mod unit;

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use drumline_comm::ProcessGroup;
use drumline_torch::{Named, Optimizer, Pages, SwapFile, grad};
use tch::Tensor;

use crate::error::{NotRecordable, ParallelError};
use crate::saved_grads::SavedGrads;
use beside::Beside;
use mover::{Mover, in_turns};
pub use options::{Offload, Place};
use reservation::Reservation;
pub(crate) use reservation::Units;
use unit::StateUnit;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// Where an engine's optimizer has its state: decided when the engine adopts the optimizer.
#[derive(Default)]
pub(crate) struct StatePlace {
    note: Option<String>,
    offloaded: Option<Elsewhere>,
}

/// Where state lies that is not where the model trains.
enum Elsewhere {
    Host(Beside),
    Disk(Offloaded),
}

impl StatePlace {
    /// Decides, and reserves space for the state of an optimizer that has not made a step. All ranks of the group call it,
    /// and get the same error if one of them cannot.
    pub(crate) fn adopt(
        &mut self,
        offload: &Offload,
        units: &Units,
        optimizer: &mut dyn Optimizer,
        group: &ProcessGroup,
    ) -> Result {
        let is_beside = offload.is_beside(units.device);
        if offload.optimizer.is_device() && !is_beside {
            return Ok(());
        }
        if self.note.is_some() {
            let expected = "1; try one optimizer with several parameter groups";
            return Err(ParallelError::value("optimizers of a model whose state is offloaded", 2, expected));
        }
        if is_beside {
            let beside = Beside::new(offload, units, optimizer, group)?;
            self.note = Some(beside.note.clone());
            self.offloaded = Some(beside).filter(Beside::has_units).map(Elsewhere::Host);
            return Ok(());
        }
        let Reservation { disk, note } = Reservation::new(offload, units, optimizer, group)?;
        let offloaded =
            disk.map(|(units, file)| agree(group, Offloaded::new(units, file, optimizer.parameters())));
        (self.note, self.offloaded) = (Some(note), offloaded.transpose()?.map(Elsewhere::Disk));
        Ok(())
    }

    /// What was decided, as a table.
    pub(crate) fn note(&self) -> Option<String> {
        self.note.clone()
    }

    /// The names of parameters whose state is in memory at the same time; none if all of it is.
    pub(crate) fn groups(&self) -> Vec<Vec<String>> {
        match &self.offloaded {
            Some(Elsewhere::Host(beside)) => beside.groups(),
            Some(Elsewhere::Disk(offloaded)) => offloaded.groups(),
            None => Vec::new(),
        }
    }

    /// Whether a step can be recorded in a CUDA graph.
    pub(crate) fn is_recordable(&self) -> std::result::Result<(), NotRecordable> {
        if self.offloaded.is_some() { Err(NotRecordable::OffloadedState) } else { Ok(()) }
    }

    /// Makes the optimizer's step.
    pub(crate) fn step(&mut self, optimizer: &mut dyn Optimizer) -> Result {
        match &mut self.offloaded {
            Some(Elsewhere::Host(beside)) => beside.step(optimizer),
            Some(Elsewhere::Disk(offloaded)) => {
                offloaded.unless_failed(|offloaded| offloaded.step(optimizer))
            }
            None => Ok(optimizer.step()?),
        }
    }

    /// Runs the last backward of a step, and makes the step, of units in host memory as soon as they can.
    pub(crate) fn backward_and_step(
        &mut self,
        optimizer: &mut dyn Optimizer,
        backward: &mut dyn FnMut() -> Result,
    ) -> Result {
        match &mut self.offloaded {
            Some(Elsewhere::Host(beside)) => beside.step_in_backward(optimizer, backward),
            _ => backward().and_then(|()| self.step(optimizer)),
        }
    }

    /// The program may have written to any parameter.
    pub(crate) fn note_change(&mut self) {
        if let Some(Elsewhere::Host(beside)) = &mut self.offloaded {
            beside.note_change();
        }
    }

    /// Moves state that the optimizer has loaded to where it belongs.
    pub(crate) fn settle(&mut self, optimizer: &dyn Optimizer) -> Result {
        match &mut self.offloaded {
            Some(Elsewhere::Disk(offloaded)) => {
                offloaded.unless_failed(|offloaded| offloaded.settle(optimizer))
            }
            // The optimizer has loaded it to where the twins are.
            Some(Elsewhere::Host(_)) | None => Ok(()),
        }
    }
}

/// The state of an optimizer that lies on disk.
struct Offloaded {
    /// All that the optimizer steps.
    parameters: Vec<Named>,
    units: Vec<StateUnit>,
    file: Arc<SwapFile>,
    mover: Mover,
    /// Why its steps have ended.
    failure: Option<String>,
}

impl Offloaded {
    fn new(units: Vec<StateUnit>, file: SwapFile, parameters: Vec<Named>) -> Result<Self> {
        let file = Arc::new(file);
        let mover = Mover::new(&file, &sizes(&units))?;
        Ok(Self { parameters, units, file, mover, failure: None })
    }

    /// The names of the parameters of each unit, and of all that are not in one.
    fn groups(&self) -> Vec<Vec<String>> {
        let names = |unit: &StateUnit| unit.names().map(str::to_owned).collect();
        let resident = self.resident().into_iter().map(|place| self.parameters[place].name.clone());
        self.units.iter().map(names).chain([resident.collect()]).collect()
    }

    /// Runs it unless an earlier one has failed, after which the files are not those of the last step.
    fn unless_failed(&mut self, body: impl FnOnce(&mut Self) -> Result) -> Result {
        if let Some(cause) = &self.failure {
            return Err(ParallelError::OffloadEnded { cause: cause.clone() });
        }
        let outcome = body(self);
        if let Err(error) = &outcome {
            self.mover.wait_for_all();
            self.failure = Some(error.to_string());
        }
        outcome
    }

    fn settle(&mut self, optimizer: &dyn Optimizer) -> Result {
        let state = StateTensors::of(optimizer);
        let order = self.order(|unit| self.has_strays(unit, &state));
        self.visit(&order, &mut || Ok(()), &mut |_, unit, buffer| unit.take_in(&state, buffer))
    }

    fn step(&mut self, optimizer: &mut dyn Optimizer) -> Result {
        // Later they could be in a buffer already.
        optimizer.refresh_master_weights()?;
        let state = StateTensors::of(optimizer);
        let strays: Vec<bool> = (0..self.units.len()).map(|unit| self.has_strays(unit, &state)).collect();
        let (parameters, resident) = (self.parameters.clone(), self.resident());
        let grads = SavedGrads::of(&parameters);
        let has_grads = |places: &[usize]| places.iter().any(|place| grads.is_some(*place));
        let order =
            self.order(|unit| strays[unit] || has_grads(&self.units[unit].places().collect::<Vec<_>>()));
        let optimizer = RefCell::new(optimizer);
        let mut step_resident = || {
            if has_grads(&resident) {
                grads.with(&resident, || Ok::<_, ParallelError>(optimizer.borrow_mut().step()?))?;
            }
            Ok(())
        };
        self.visit(&order, &mut step_resident, &mut |index, unit, buffer| {
            if strays[index] {
                unit.take_in(&state, buffer)?;
            }
            let places: Vec<usize> = unit.places().collect();
            let mut optimizer = optimizer.borrow_mut();
            grads.with(&places, || Ok::<_, ParallelError>(optimizer.step()?))?;
            let has_made = unit.note_step(|place| grads.is_some(place));
            if has_made { unit.take_in(&StateTensors::of(&**optimizer), buffer) } else { Ok(()) }
        })
    }

    /// The places of parameters whose state stays in memory.
    fn resident(&self) -> Vec<usize> {
        let offloaded: HashSet<usize> = self.units.iter().flat_map(StateUnit::places).collect();
        (0..self.parameters.len()).filter(|place| !offloaded.contains(place)).collect()
    }

    /// The order in which some units are visited.
    fn order(&self, is_visited: impl Fn(usize) -> bool) -> Vec<usize> {
        in_turns((0..self.units.len()).filter(|unit| is_visited(*unit)).collect(), &sizes(&self.units))
    }

    /// Whether some of a unit's tensors are not at home: the optimizer has loaded or made them.
    fn has_strays(&self, unit: usize, state: &StateTensors) -> bool {
        !self.units[unit].is_home(state, self.file.pages())
    }

    /// Visits units, each in a buffer. Something else is done first, while the first units are read.
    fn visit(
        &mut self,
        order: &[usize],
        first: &mut dyn FnMut() -> Result,
        body: &mut dyn FnMut(usize, &mut StateUnit, &Pages) -> Result,
    ) -> Result {
        let transfers: Vec<_> = order.iter().map(|unit| self.units[*unit].transfer()).collect();
        // A checkpoint may have read the file as memory.
        self.file.forget(0..self.file.pages().num_bytes());
        self.mover.begin(&transfers);
        first()?;
        for (turn, index) in order.iter().enumerate() {
            let buffer = self.mover.wait_for(turn)?;
            let unit = &mut self.units[*index];
            unit.move_to_buffer(&buffer)?;
            let visited = body(*index, unit, &buffer);
            unit.move_home(self.file.pages())?;
            visited?;
            self.mover.write(turn, unit.region.clone(), transfers.get(turn + mover::NUM_BUFFERS));
        }
        self.mover.finish()
    }
}

fn sizes(units: &[StateUnit]) -> Vec<usize> {
    units.iter().map(|unit| unit.region.len()).collect()
}

/// The tensors of an optimizer's state by their parameters.
pub(crate) struct StateTensors(HashMap<String, Vec<Tensor>>);

impl StateTensors {
    fn of(optimizer: &dyn Optimizer) -> Self {
        let mut all: HashMap<String, Vec<Tensor>> = HashMap::new();
        for Named { name, tensor } in optimizer.state().tensors {
            let parameter = name.rsplit_once('.').map_or(name.as_str(), |(parameter, _)| parameter);
            match all.get_mut(parameter) {
                Some(tensors) => tensors.push(tensor),
                None => drop(all.insert(parameter.to_owned(), vec![tensor])),
            }
        }
        Self(all)
    }

    fn of_parameter(&self, name: &str) -> &[Tensor] {
        self.0.get(name).map_or(&[], Vec::as_slice)
    }
}

/// The bytes of these parameters' gradients that are allocated already.
pub(crate) fn held_gradients(parameters: &[Named]) -> Result<u64> {
    let bytes = |named: &Named| -> Result<u64> {
        let held = grad(&named.tensor)?.filter(|gradient| !gradient.is_sparse());
        Ok(held.map_or(0, |gradient| (gradient.numel() * gradient.kind().elt_size_in_bytes()) as u64))
    };
    parameters.iter().map(bytes).sum()
}

/// The same error on all ranks, if one has failed.
pub(crate) fn agree<T>(group: &ProcessGroup, outcome: Result<T>) -> Result<T> {
    let causes = group.all_gather_object(&outcome.as_ref().err().map(ToString::to_string))?;
    match causes.into_iter().enumerate().find_map(|(rank, cause)| Some((rank, cause?))) {
        Some((rank, cause)) => Err(ParallelError::OffloadOnRank { rank, cause }),
        None => outcome,
    }
}

#[cfg(test)]
mod tests {
    use drumline_torch::set_grad;
    use tch::{Device, Kind};

    use super::*;

    #[test]
    fn gradients_that_are_there_are_counted() {
        let leaf = |name: &str| {
            let tensor = Tensor::ones([5], (Kind::Float, Device::Cpu)).set_requires_grad(true);
            Named { name: name.to_owned(), tensor }
        };
        let leaves = [leaf("with"), leaf("without")];
        assert_eq!(held_gradients(&leaves).unwrap(), 0);
        set_grad(&leaves[0].tensor, Some(&leaves[0].tensor.ones_like())).unwrap();
        assert_eq!(held_gradients(&leaves).unwrap(), 20);
    }
}
