//! Groups tested from outside: as threads, as processes, over both transports, and when things go wrong.

#[path = "it/grid.rs"]
mod grid;
