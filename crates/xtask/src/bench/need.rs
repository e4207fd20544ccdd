//! What a goal asks of a figure, and the word that says whether it was reached.

/// What a goal asks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Need {
    AtLeast(f64),
    AtMost(f64),
    Below(f64),
    /// Nothing: the figure is only shown.
    Shown,
}

impl Need {
    /// `PASS`, `MISS`, `none` for a figure that was not measured, or nothing where nothing is asked.
    pub(crate) fn word(self, figure: Option<f64>) -> &'static str {
        let Some(figure) = figure else { return "none" };
        let is_reached = match self {
            Self::AtLeast(limit) => figure >= limit,
            Self::AtMost(limit) => figure <= limit,
            Self::Below(limit) => figure < limit,
            Self::Shown => return "",
        };
        if is_reached { "PASS" } else { "MISS" }
    }

    /// `>= 1.2x`, for the column of goals.
    pub(crate) fn shown(self, unit: &str) -> String {
        match self {
            Self::AtLeast(limit) => format!(">= {limit}{unit}"),
            Self::AtMost(limit) => format!("<= {limit}{unit}"),
            Self::Below(limit) => format!("< {limit}{unit}"),
            Self::Shown => "shown".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goal_is_reached_missed_not_measured_or_only_shown() {
        let words = |need: Need| [Some(1.0), Some(2.0), Some(3.0), None].map(|figure| need.word(figure));
        assert_eq!(words(Need::AtLeast(2.0)), ["MISS", "PASS", "PASS", "none"]);
        assert_eq!(words(Need::AtMost(2.0)), ["PASS", "PASS", "MISS", "none"]);
        assert_eq!(words(Need::Below(2.0)), ["PASS", "MISS", "MISS", "none"]);
        assert_eq!(words(Need::Shown), ["", "", "", "none"]);
        assert_eq!(Need::AtLeast(f64::INFINITY).word(Some(f64::NAN)), "MISS");
    }
}
