//! What contenders gave that took turns, and what failed.
//!
//! A *unit* is who did what, as `(contender, batch)`; a turn is one unit in one block.

use super::spread::Spread;

/// One turn.
#[derive(Debug)]
pub(crate) struct Turn<U, F> {
    pub(crate) unit: U,
    pub(crate) block: usize,
    pub(crate) figures: F,
    /// The machine was quiet when it began.
    pub(crate) steady: bool,
}

/// All turns that count.
#[derive(Debug)]
pub(crate) struct Turns<U, F> {
    turns: Vec<Turn<U, F>>,
    failures: Vec<String>,
}

impl<U, F> Default for Turns<U, F> {
    fn default() -> Self {
        Self { turns: Vec::new(), failures: Vec::new() }
    }
}

impl<U: Copy + PartialEq, F> Turns<U, F> {
    pub(crate) fn add(&mut self, turn: Turn<U, F>) {
        self.turns.push(turn);
    }

    pub(crate) fn fail(&mut self, failure: String) {
        eprintln!("failed: {failure}");
        self.failures.push(failure);
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Turn<U, F>> {
        self.turns.iter()
    }

    /// Figures of a unit, block by block.
    pub(crate) fn of(&self, unit: U) -> impl Iterator<Item = (usize, &F)> {
        self.all().filter(move |turn| turn.unit == unit).map(|turn| (turn.block, &turn.figures))
    }

    /// The spread of one figure of a unit; `None` where no turn has it.
    pub(crate) fn spread(&self, unit: U, figure: impl Fn(&F) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.of(unit).filter_map(|(_, figures)| figure(figures)).collect())
    }

    /// The spread of what two units compare to, block by block: the machine may have changed from one to the next.
    pub(crate) fn ratio(&self, ours: U, other: U, ratio: impl Fn(&F, &F) -> Option<f64>) -> Option<Spread> {
        let pair = |(block, ours): (usize, &F)| {
            let (_, other) = self.of(other).find(|(of_block, _)| *of_block == block)?;
            ratio(ours, other)
        };
        Spread::of(self.of(ours).filter_map(pair).collect())
    }

    /// `3 of 35 turns`, for the report.
    pub(crate) fn unsteady(&self) -> String {
        format!("{} of {} turns", self.all().filter(|turn| !turn.steady).count(), self.turns.len())
    }

    /// A line of Markdown for each failure: what failed, and the first thing that it said.
    pub(crate) fn failures(&self) -> String {
        let line = |failure: &String| {
            format!("- failed: {}\n", failure.lines().take(2).collect::<Vec<_>>().join(": "))
        };
        self.failures.iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_compared_within_a_block() {
        let mut turns = Turns::default();
        for (unit, block, figures) in
            [("ours", 0, 1.0), ("other", 1, 30.0), ("other", 0, 2.0), ("ours", 1, 10.0)]
        {
            turns.add(Turn { unit, block, figures, steady: block == 0 });
        }
        turns.add(Turn { unit: "ours", block: 2, figures: 1.0, steady: true });
        let ratio = turns.ratio("ours", "other", |ours, other| Some(other / ours));
        assert_eq!(ratio, Some(Spread { median: 2.5, least: 2.0, most: 3.0 }));
        assert_eq!(turns.ratio("ours", "nobody", |_, _| Some(1.0)), None);
        assert_eq!(turns.spread("other", |figure| Some(*figure)).map(|spread| spread.most), Some(30.0));
        assert_eq!(turns.unsteady(), "2 of 5 turns");
    }

    #[test]
    fn a_failure_is_told_in_one_line() {
        let mut turns = Turns::<(), ()>::default();
        turns.fail("ours: exit status: 3\nwhy\nand more".to_owned());
        assert_eq!(turns.failures(), "- failed: ours: exit status: 3: why\n");
    }
}
