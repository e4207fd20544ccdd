//! What the turns of a contest gave, and what failed.

use super::spread::Spread;

/// One unit in one block.
#[derive(Debug)]
pub(crate) struct Turn<U, F> {
    pub(crate) unit: U,
    pub(crate) block: usize,
    pub(crate) figures: F,
    /// The machine did nothing else.
    pub(crate) steady: bool,
}

#[derive(Debug)]
struct Failure {
    place: String,
    text: String,
}

/// All turns that count.
#[derive(Debug)]
pub(crate) struct Tally<U, F> {
    turns: Vec<Turn<U, F>>,
    failures: Vec<Failure>,
}

impl<U, F> Default for Tally<U, F> {
    fn default() -> Self {
        Self { turns: Vec::new(), failures: Vec::new() }
    }
}

impl<U: Copy + PartialEq, F> Tally<U, F> {
    pub(crate) fn add(&mut self, turn: Turn<U, F>) {
        self.turns.push(turn);
    }

    /// Shows and keeps what failed, and where.
    pub(crate) fn fail(&mut self, place: String, text: String) {
        eprintln!("\nfailed: {text}");
        self.failures.push(Failure { place, text });
    }

    pub(crate) fn failures_at(&self, place: &str) -> usize {
        self.failures.iter().filter(|failure| failure.place == place).count()
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Turn<U, F>> {
        self.turns.iter()
    }

    /// Figures of a unit, block by block.
    fn of(&self, unit: U) -> impl Iterator<Item = (usize, &F)> {
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

    /// A line of Markdown for each failure, and no line twice: what failed, and the first thing that it said.
    pub(crate) fn failures(&self) -> String {
        let mut lines: Vec<String> = Vec::new();
        for Failure { text, .. } in &self.failures {
            let line = format!("- failed: {}\n", text.lines().take(2).collect::<Vec<_>>().join(": "));
            if !lines.contains(&line) {
                lines.push(line);
            }
        }
        lines.concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_compared_within_a_block() {
        let mut tally = Tally::default();
        for (unit, block, figures) in
            [("ours", 0, 1.0), ("other", 1, 30.0), ("other", 0, 2.0), ("ours", 1, 10.0)]
        {
            tally.add(Turn { unit, block, figures, steady: block == 0 });
        }
        tally.add(Turn { unit: "ours", block: 2, figures: 1.0, steady: true });
        let ratio = tally.ratio("ours", "other", |ours, other| Some(other / ours));
        assert_eq!(ratio, Some(Spread { median: 2.5, least: 2.0, most: 3.0 }));
        assert_eq!(tally.ratio("ours", "nobody", |_, _| Some(1.0)), None);
        assert_eq!(tally.spread("other", |figure| Some(*figure)).map(|spread| spread.most), Some(30.0));
        assert_eq!(tally.unsteady(), "2 of 5 turns");
    }

    #[test]
    fn a_failure_is_reported_in_one_line_and_once() {
        let mut tally = Tally::<(), ()>::default();
        for _ in 0..2 {
            tally.fail("ours".to_owned(), "ours: exit status: 3\nwhy\nand more".to_owned());
        }
        assert_eq!(tally.failures(), "- failed: ours: exit status: 3: why\n");
        assert_eq!((tally.failures_at("ours"), tally.failures_at("theirs")), (2, 0));
    }
}
