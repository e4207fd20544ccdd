//! Context parallelism: each rank of `cp` has some places of the same texts, so that texts may be longer than the memory of
//! one rank.
//!
//! ```text
//!   tokens [texts, places] ─▶ own places ─▶ layers of each place by itself ─▶ ring_attention ─▶ … ─▶ sum of own losses
//!                             ZigZag         nothing is sent                   keys and values travel
//! ```
//! Only attention needs other places. For everything else, ranks along `cp` are replicas with samples of their own: engines
//! sum their gradients as along `dp`, and losses are summed and counted over both.
//!
//! ```
//! use drumline_comm::LocalGroup;
//! use drumline_parallel::context::{ContextParallel, Heads, Mask, ring_attention};
//! use tch::{Device, Kind, Tensor};
//!
//! LocalGroup::run(2, |group| {
//!     let cp = ContextParallel::new(&group);
//!     // 1 text of 7 places, 2 heads of size 4.
//!     let whole = Tensor::arange(56, (Kind::Float, Device::Cpu)).sin().view([1, 2, 7, 4]);
//!     let own = cp.own(&whole, 2).expect("dim 2 has the places");
//!     let heads = Heads { queries: &own, keys: &own, values: &own };
//!     let seen = ring_attention(&cp, heads, 7, Mask::Causal).expect("both ranks call");
//!     assert_eq!(seen.size(), own.size());
//!     Ok(())
//! })?;
//! # Ok::<(), drumline_comm::CommError>(())
//! ```

mod attention;
mod block;
mod ranks;
mod ring;
mod zigzag;

pub use attention::{Heads, Mask, ring_attention};
pub use ranks::ContextParallel;
pub use zigzag::ZigZag;
