//! How the processes of a job find each other: the store, the rendezvous, and the worker environment.
//!
//! ```text
//!  worker env ─▶ init ─▶ Member { rank, world_size, store, .. }
//!                 │
//!                 ├─ rank 0 (or the launcher) hosts ─▶ TcpStoreServer ─▶ core (keys, values, waiters)
//!                 └─ every rank connects ─▶ handshake ─▶ TcpStore ─▶ frames ─▲
//! ```
//!
//! Read in this order: [`worker_env`], [`Store`], [`core`], [`handshake`], [`TcpStoreServer`], [`init`], [`events`].
//! Not here: groups and collectives (`drumline-comm`), starting processes (`drumline-launch`).
#![forbid(unsafe_code)]

mod client_note;
pub mod core;
mod derived_port;
pub mod error_file;
pub mod events;
pub mod fault;
pub mod frame;
mod free_port;
pub mod handshake;
mod init;
mod job_key;
mod listen;
pub mod node_list;
mod panic_text;
mod pending;
mod port_claim;
mod port_holder;
mod process_space;
mod readable;
mod reminder;
mod resolve;
mod server;
mod socket;
mod store;
pub mod user_key;
pub mod worker_env;

pub use client_note::{ClientNote, ClientNumber, Line};
pub use derived_port::{derived_port, derived_ports, slurm_job, slurm_number};
pub use free_port::free_port;
pub use handshake::{Cause, HandshakeError, Hello, Refusal, Role};
pub use init::{
    InitError, InitOptions, MeetingFileError, Member, MethodError, from_env, init, world_size_from_env,
};
pub use job_key::{JobKey, KeyError};
pub use panic_text::{PanicReport, panic_text};
pub use pending::{Gate, Host};
pub use port_claim::PortClaim;
pub use port_holder::port_holder;
pub use process_space::ProcessSpace;
pub use server::{ServerOptions, TcpStoreServer};
pub use store::Store;
pub use store::error::{BadFileError, StoreError};
pub use store::file::FileStore;
pub use store::memory::MemoryStore;
pub use store::prefix::PrefixStore;
pub use store::request::{MAX_KEY, MAX_VALUE, Reply, Request};
pub use store::tcp::TcpStore;

// Compiles and runs the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
