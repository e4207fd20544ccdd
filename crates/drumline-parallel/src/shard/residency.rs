//! Which units are in which slots, and what to gather when an operation uses a unit. Pure: decides, and gathers nothing.
//!
//! ```text
//!   uses of the step before   a b c │ c b a        a step uses its units in the same order as the step before
//!   this step, 2 slots        a     gathers a, and then b, which comes next
//!                               b   is there; gathers c into the slot of a
//!                                 c is there; the next use is c itself, then b: both are there
//! ```
//! The first step gathers units when they are used. A use that the order does not predict is gathered then, too.

/// A gather that is to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gather {
    pub(super) unit: usize,
    pub(super) slot: usize,
    /// The unit that was in the slot.
    pub(super) evicted: Option<usize>,
}

/// An operation needs more units at once than there are slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooManyUnits {
    pub(super) num_units: usize,
    pub(super) num_slots: usize,
}

/// Whether the unit that comes next is gathered as well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ahead {
    Yes,
    No,
}

/// The units in slots, and the order of uses.
#[derive(Debug)]
pub(super) struct Residency {
    /// For each slot: its unit.
    held: Vec<Option<usize>>,
    /// For each slot: when its unit was last used, as a count of uses.
    last_use: Vec<u64>,
    num_uses: u64,
    /// The changes of unit in the step before, and the place of the last use among them.
    order: Vec<usize>,
    place: Option<usize>,
    /// The changes of unit in this step.
    noted: Vec<usize>,
}

impl Residency {
    pub(super) fn new(num_slots: usize) -> Self {
        Self {
            held: vec![None; num_slots],
            last_use: vec![0; num_slots],
            num_uses: 0,
            order: Vec::new(),
            place: None,
            noted: Vec::new(),
        }
    }

    /// The slot of a unit that is gathered.
    pub(super) fn slot_of(&self, unit: usize) -> Option<usize> {
        self.held.iter().position(|held| *held == Some(unit))
    }

    /// The units in slots.
    pub(super) fn held(&self) -> impl Iterator<Item = (usize, usize)> {
        self.held.iter().enumerate().filter_map(|(slot, held)| Some(((*held)?, slot)))
    }

    /// An operation uses these units. Returns what is to be gathered: first what it needs, then what comes next if it
    /// looks `ahead`.
    pub(super) fn use_units(&mut self, units: &[usize], ahead: Ahead) -> Result<Vec<Gather>, TooManyUnits> {
        let num_slots = self.held.len();
        if units.len() > num_slots {
            return Err(TooManyUnits { num_units: units.len(), num_slots });
        }
        self.num_uses += 1;
        let mut gathers = Vec::new();
        for unit in units {
            let slot = self.slot_of(*unit);
            let slot = slot.unwrap_or_else(|| self.take_slot(*unit, units, &mut gathers));
            self.last_use[slot] = self.num_uses;
            self.note(*unit);
        }
        if let Some(next) = self.next().filter(|next| self.slot_of(*next).is_none())
            && units.len() < num_slots
            && ahead == Ahead::Yes
        {
            let slot = self.take_slot(next, units, &mut gathers);
            self.last_use[slot] = self.num_uses;
        }
        Ok(gathers)
    }

    /// Puts a unit into the slot that was used least recently, except for those of `needed`.
    fn take_slot(&mut self, unit: usize, needed: &[usize], gathers: &mut Vec<Gather>) -> usize {
        let is_needed = |slot: &usize| self.held[*slot].is_some_and(|held| needed.contains(&held));
        let slots = (0..self.held.len()).filter(|slot| !is_needed(slot));
        let slot = slots.min_by_key(|slot| self.last_use[*slot]).unwrap_or(0);
        let evicted = self.held[slot].replace(unit);
        gathers.push(Gather { unit, slot, evicted });
        slot
    }

    fn note(&mut self, unit: usize) {
        if self.noted.last() == Some(&unit) {
            return;
        }
        self.noted.push(unit);
        // The next place at which the step before used it.
        let from = self.place.map_or(0, |place| place + 1);
        let ahead = self.order.iter().skip(from).position(|used| *used == unit);
        self.place = ahead.map(|ahead| from + ahead).or(self.place);
    }

    /// The unit that the step before used next.
    fn next(&self) -> Option<usize> {
        self.order.get(self.place? + 1).copied()
    }

    /// The unit that the step before used after the next one.
    pub(super) fn second_next(&self) -> Option<usize> {
        self.order.get(self.place? + 2).copied()
    }

    /// Parameters change: what is gathered is no longer valid. The next step is expected to use units in the order of
    /// this one, if this one has used any.
    pub(super) fn end_step(&mut self) {
        let order = std::mem::take(&mut self.noted);
        self.forget();
        if !order.is_empty() {
            self.order = order;
        }
    }

    /// The slots are used for something else. The order of uses stays.
    pub(super) fn release(&mut self) {
        self.held.fill(None);
        self.last_use.fill(0);
    }

    /// What is gathered and what was used in this step do not count.
    pub(super) fn forget(&mut self) {
        self.held.fill(None);
        self.last_use.fill(0);
        self.num_uses = 0;
        self.place = None;
        self.noted.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn units_gathered(residency: &mut Residency, uses: &[usize]) -> Vec<Vec<usize>> {
        let gathered = uses.iter().map(|unit| {
            let gathers = residency.use_units(&[*unit], Ahead::Yes).unwrap();
            assert!(residency.slot_of(*unit).is_some());
            gathers.iter().map(|gather| gather.unit).collect()
        });
        gathered.collect()
    }

    #[test]
    fn the_second_step_gathers_ahead() {
        let mut residency = Residency::new(2);
        let step = [0, 0, 1, 2, 2, 3, 3, 2, 1, 1, 0];
        let first = units_gathered(&mut residency, &step);
        assert_eq!(
            first,
            [vec![0], vec![], vec![1], vec![2], vec![], vec![3], vec![], vec![], vec![1], vec![], vec![0]]
        );
        residency.end_step();
        let second = units_gathered(&mut residency, &step);
        assert_eq!(
            second,
            [vec![0, 1], vec![], vec![2], vec![3], vec![], vec![], vec![], vec![1], vec![0], vec![], vec![]]
        );
        residency.end_step();
        assert_eq!(residency.second_next(), None);
        assert_eq!(units_gathered(&mut residency, &step[..4]), second[..4]);
        assert_eq!(residency.second_next(), Some(2));
        assert_eq!(units_gathered(&mut residency, &step[4..]), second[4..]);
    }

    #[test]
    fn a_use_out_of_order_is_gathered_and_the_order_is_found_again() {
        let mut residency = Residency::new(2);
        units_gathered(&mut residency, &[0, 1, 2, 3]);
        residency.end_step();
        assert_eq!(units_gathered(&mut residency, &[0, 2, 3]), [vec![0, 1], vec![2, 3], vec![]]);
        residency.end_step();
        assert_eq!(units_gathered(&mut residency, &[3, 0]), [vec![3], vec![0]], "the end comes first");
    }

    #[test]
    fn an_operation_may_use_as_many_units_as_there_are_slots() {
        let mut residency = Residency::new(2);
        assert_eq!(residency.use_units(&[0, 1], Ahead::Yes).unwrap().len(), 2);
        let gather = residency.use_units(&[1, 2], Ahead::Yes).unwrap();
        assert_eq!(gather, [Gather { unit: 2, slot: residency.slot_of(2).unwrap(), evicted: Some(0) }]);
        let refused = TooManyUnits { num_units: 3, num_slots: 2 };
        assert_eq!(residency.use_units(&[0, 1, 2], Ahead::Yes), Err(refused));
    }
}
