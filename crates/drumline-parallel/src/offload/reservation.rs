//! Which units go to disk, and the space for them: decided and reserved before training begins.

use std::collections::HashMap;
use std::fmt::Write;
use std::path::Path;

use drumline_comm::{ProcessGroup, ReduceOp, available_memory};
use drumline_plan::{OffloadPlan, Room, Tier};
use drumline_torch::{Named, Optimizer, PAGE, Rates, SwapFile};
use tch::Device;

use super::options::{Offload, Place};
use super::unit::{LINE, Member, StateUnit};
use super::{Result, agree};
use crate::error::ParallelError;

/// The most tensors that an optimizer keeps for a parameter; each may begin at a line.
const MOST_SLOTS: usize = 8;
/// With [`Place::Auto`], one part in so many of the free memory is left for activations.
const PART_FOR_ACTIVATIONS: u64 = 4;

/// The units of a model, and what a rank needs besides the optimizer's state.
#[derive(Debug, Clone)]
pub(crate) struct Units {
    /// Where the model trains.
    pub(crate) device: Device,
    /// The names of each unit's parameters.
    pub(crate) names: Vec<Vec<String>>,
    /// The bytes of gradients, which are allocated later.
    pub(crate) gradients: u64,
}

/// A unit before its place is known: the parameters, each with the bytes of its state.
#[derive(Debug, Default)]
struct Sized {
    members: Vec<(usize, String, usize)>,
}

impl Sized {
    fn num_bytes(&self) -> usize {
        self.members.iter().map(|(_, _, room)| room).sum::<usize>().next_multiple_of(PAGE)
    }

    /// With its pages from `start` on.
    fn at(self, start: usize) -> StateUnit {
        let end = start + self.num_bytes();
        let mut begin = 0;
        let member = |(place, name, room): (usize, String, usize)| {
            let room = begin..begin + room;
            begin = room.end;
            Member::new(place, name, room)
        };
        StateUnit::new(self.members.into_iter().map(member).collect(), start..end)
    }
}

/// What was decided.
pub(super) struct Reservation {
    /// The units on disk, and the file for them.
    pub(super) disk: Option<(Vec<StateUnit>, SwapFile)>,
    /// The decision as a table.
    pub(super) note: String,
}

impl Reservation {
    /// Decides and reserves. All ranks call it; one that fails returns its error, and others wait for nothing.
    pub(super) fn new(
        offload: &Offload,
        units: &Units,
        optimizer: &dyn Optimizer,
        group: &ProcessGroup,
    ) -> Result<Self> {
        let sized = agree(group, sizes(units, optimizer))?;
        let bytes: Vec<u64> = sized.iter().map(|unit| unit.num_bytes() as u64).collect();
        let (plan, folder) = match &offload.optimizer {
            Place::Device | Place::Host => (OffloadPlan::by_ratio(&bytes, 0.0, Tier::Disk), None),
            Place::Disk(folder) => (OffloadPlan::by_ratio(&bytes, offload.ratio, Tier::Disk), Some(folder)),
            Place::Auto(folder) => {
                let room = room(folder, units, group)?;
                (agree(group, OffloadPlan::as_fits(&bytes, room).map_err(Into::into))?, Some(folder))
            }
        };
        let needed = plan.bytes(Tier::Disk);
        let folder = folder.filter(|_| needed > 0);
        let file = folder.map(|folder| agree(group, SwapFile::new(folder, needed).map_err(Into::into)));
        let file = file.transpose()?;
        let rates = file.as_ref().map(|file| agree(group, file.measure().map_err(Into::into))).transpose()?;
        let note = note(&plan, folder.map(|folder| folder.as_path()).zip(rates));
        let mut end = 0;
        let on_disk = sized.into_iter().zip(plan.tiers()).filter(|(_, tier)| **tier == Tier::Disk);
        let placed = on_disk.map(|(unit, _)| {
            let unit = unit.at(end);
            end = unit.region.end;
            unit
        });
        let units = placed.collect();
        Ok(Self { disk: file.map(|file| (units, file)), note })
    }
}

/// A parameter that an optimizer steps.
pub(super) struct Stepped {
    /// Its place among all of them.
    pub(super) place: usize,
    pub(super) named: Named,
    /// The bytes of its state.
    pub(super) bytes: usize,
}

/// The parameters of each unit on this rank, without those whose state is small: that stays where the model trains.
pub(super) fn stepped_by_unit(units: &Units, optimizer: &dyn Optimizer) -> Result<Vec<Vec<Stepped>>> {
    let unit_of: HashMap<&str, usize> = units
        .names
        .iter()
        .enumerate()
        .flat_map(|(unit, names)| names.iter().map(move |name| (name.as_str(), unit)))
        .collect();
    // Parameters that the engine does not know are a unit of their own.
    let mut stepped: Vec<Vec<Stepped>> = (0..=units.names.len()).map(|_| Vec::new()).collect();
    for (place, named) in optimizer.parameters().into_iter().enumerate() {
        let Some(bytes) = optimizer.state_bytes(&named) else {
            return Err(ParallelError::NotOffloadable { optimizer: optimizer.state().kind });
        };
        if bytes > LINE {
            let unit = unit_of.get(named.name.as_str()).copied().unwrap_or(units.names.len());
            stepped[unit].push(Stepped { place, named, bytes });
        }
    }
    stepped.retain(|unit| !unit.is_empty());
    Ok(stepped)
}

/// The bytes of each unit's state on this rank.
fn sizes(units: &Units, optimizer: &dyn Optimizer) -> Result<Vec<Sized>> {
    let sized = |Stepped { place, named, bytes }| {
        (place, named.name, usize::next_multiple_of(bytes, LINE) + MOST_SLOTS * LINE)
    };
    let stepped = stepped_by_unit(units, optimizer)?;
    Ok(stepped.into_iter().map(|unit| Sized { members: unit.into_iter().map(sized).collect() }).collect())
}

/// What is free for each rank, the same on all.
fn room(folder: &Path, units: &Units, group: &ProcessGroup) -> Result<Room> {
    let num_ranks = group.ranks_on_node().len() as u64;
    let free = available_memory().map_or(u64::MAX, |free| free / num_ranks);
    let device = (free - free / PART_FOR_ACTIVATIONS).saturating_sub(units.gradients);
    let disk = agree(group, SwapFile::free(folder).map_err(Into::into))? / num_ranks;
    let mut least = [device, disk];
    group.all_reduce(&mut least, ReduceOp::Min)?;
    let [device, disk] = least;
    Ok(Room { device, host: 0, disk })
}

fn note(plan: &OffloadPlan, disk: Option<(&Path, Rates)>) -> String {
    let mb = |bytes: u64| bytes as f64 / 1e6;
    let row = |tier| (tier, plan.num_units(tier), mb(plan.bytes(tier)));
    let mut text = "where each rank's optimizer state lies:".to_owned();
    let (_, num_units, bytes) = row(Tier::Device);
    // Writing to a string does not fail.
    let _ = write!(text, "\n  memory  {num_units:4} units  {bytes:9.1} MB");
    if let Some((folder, Rates { read, write })) = disk {
        let (_, num_units, bytes) = row(Tier::Disk);
        let _ = write!(
            text,
            ", and {:.1} MB for two buffers\n  disk    {num_units:4} units  {bytes:9.1} MB in {}, \
             read at {:.2} GB/s and written at {:.2} GB/s: at least {:.2} s a step",
            mb(plan.buffers()),
            folder.display(),
            read / 1e9,
            write / 1e9,
            plan.seconds_of_disk(read, write),
        );
    }
    text
}
