//! Groups tested from outside: as threads, as processes, over both transports, and when things go wrong.
#![allow(clippy::unwrap_used)]

#[path = "it/any_moment.rs"]
mod any_moment;
#[path = "it/async_calls.rs"]
mod async_calls;
#[path = "it/bits.rs"]
mod bits;
#[path = "it/corners.rs"]
mod corners;
#[path = "it/cycles.rs"]
mod cycles;
#[path = "it/death.rs"]
mod death;
#[path = "it/faults.rs"]
mod faults;
#[path = "it/forked.rs"]
mod forked;
#[path = "it/frozen.rs"]
mod frozen;
#[path = "it/frozen_host.rs"]
mod frozen_host;
#[path = "it/grid.rs"]
mod grid;
#[path = "it/heap.rs"]
mod heap;
#[path = "it/leaving.rs"]
mod leaving;
#[path = "it/limits.rs"]
mod limits;
#[path = "it/mail.rs"]
mod mail;
#[path = "it/mesh.rs"]
mod mesh;
#[path = "it/mismatch.rs"]
mod mismatch;
#[path = "it/numbers.rs"]
mod numbers;
#[path = "it/objects.rs"]
mod objects;
#[path = "it/one_core.rs"]
mod one_core;
#[path = "it/p2p_deadlines.rs"]
mod p2p_deadlines;
#[path = "it/p2p_notes.rs"]
mod p2p_notes;
#[path = "it/relay.rs"]
mod relay;
#[path = "it/relay_host.rs"]
mod relay_host;
#[path = "it/strangers.rs"]
mod strangers;
#[path = "it/subgroups.rs"]
mod subgroups;
#[path = "it/threads.rs"]
mod threads;
#[path = "it/timeouts.rs"]
mod timeouts;
#[path = "it/two_hosts.rs"]
mod two_hosts;
#[path = "it/under_way.rs"]
mod under_way;
