//! A part of a rank's time, and arrows from one to another: a message, for example, from the computation that sends it to the one
//! of another rank that uses it.

use std::time::Instant;

use serde_json::Value;

use super::Track;

/// A part of a rank's time.
#[derive(Debug, Clone)]
pub struct Span {
    pub(super) name: String,
    pub(super) track: Track,
    pub(super) begin: Instant,
    pub(super) end: Instant,
    pub(super) args: Vec<(String, Value)>,
    pub(super) arrows: Vec<(ArrowEnd, Arrow)>,
}

/// An arrow between two spans, of one rank or of two. Both ends have the same name and id, which no other arrow has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrow {
    /// What the viewer calls it.
    pub name: String,
    /// Joins its ends.
    pub id: u64,
}

/// Which end of an arrow a span has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ArrowEnd {
    /// It begins where the span ends.
    Tail,
    /// It ends where the span begins.
    Head,
}

impl Span {
    /// A span without args and arrows. One that ends before it begins lasts no time.
    pub fn new(name: impl Into<String>, track: Track, [begin, end]: [Instant; 2]) -> Self {
        let end = end.max(begin);
        Self { name: name.into(), track, begin, end, args: Vec::new(), arrows: Vec::new() }
    }

    /// Adds something that the viewer shows of it.
    #[must_use]
    pub fn arg(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.args.push((name.to_owned(), value.into()));
        self
    }

    /// Adds an arrow that leads from this span to another, which has it as [`arrow_in`](Self::arrow_in).
    #[must_use]
    pub fn arrow_out(mut self, arrow: Arrow) -> Self {
        self.arrows.push((ArrowEnd::Tail, arrow));
        self
    }

    /// Adds an arrow that leads to this span from another, which has it as [`arrow_out`](Self::arrow_out).
    #[must_use]
    pub fn arrow_in(mut self, arrow: Arrow) -> Self {
        self.arrows.push((ArrowEnd::Head, arrow));
        self
    }
}
