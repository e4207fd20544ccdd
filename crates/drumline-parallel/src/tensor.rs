//! Tensor and sequence parallelism: each rank of `tp` has a part of every layer.
//!
//! ```text
//!   Sharded<Sequence> ─▶ LayerNorm ─▶ gather ─▶ ColumnLinear ─▶ gelu ─▶ RowLinear ─▶ scatter ─▶ + ─▶ Sharded<Sequence>
//!    1/t of the places               all-gather  1/t of the features    Partial     reduce-scatter   1/t of the places
//! ```
//! That is Megatron's cut. Without sequence parallelism activations between these regions are the same on all ranks
//! (`Invariant`), and the two collectives are an all-reduce. Placements are types ([`TpTensor`]), so that a sum that was
//! forgotten does not compile.
//!
//! ```
//! use drumline_comm::LocalGroup;
//! use drumline_parallel::tensor::{ColumnLinear, LinearShape, RowLinear, TensorParallel, TpTensor};
//! use tch::nn::VarStore;
//! use tch::{Device, Kind, Tensor};
//!
//! LocalGroup::run(2, |group| {
//!     let (tp, store) = (TensorParallel::new(&group), VarStore::new(Device::Cpu));
//!     let fc = ColumnLinear::new(&tp, &(store.root() / "fc"), LinearShape::new(8, 32)).expect("8 × 32 is cut by rows");
//!     let back = RowLinear::new(&tp, &(store.root() / "back"), LinearShape::new(32, 8)).expect("… and by columns");
//!     assert_eq!(store.variables()["fc.weight"].size(), [16, 8]);
//!     let xs = TpTensor::invariant(Tensor::ones([1, 3, 8], (Kind::Float, Device::Cpu)), &tp);
//!     let hidden = fc.forward(&xs.replicate().expect("nothing is sent")).expect("it fits").map(|hidden| hidden.f_gelu("none"));
//!     let ys = back.forward(&hidden.expect("it fits")).expect("both ranks call").into_tensor();
//!     assert_eq!(ys.size(), [1, 3, 8]);
//!     Ok(())
//! })?;
//! # Ok::<(), drumline_comm::CommError>(())
//! ```
//! Not here: which parts other ranks have, norms over parts, saving (`engine::model_parts`).

mod attention;
mod convert;
mod cross_entropy;
mod cut;
mod embedding;
mod layer_norm;
mod linear;
mod ranks;
mod value;
mod variable;
mod within;

pub use attention::{AttentionShape, SelfAttention};
pub use cross_entropy::{VocabLabels, vocab_cross_entropy};
pub use cut::Cut;
pub use embedding::VocabEmbedding;
pub use layer_norm::LayerNorm;
pub use linear::{ColumnLinear, LinearShape, RowLinear};
pub use ranks::TensorParallel;
pub use value::{Dim, Features, Invariant, Partial, Replicated, Sequence, Sharded, TpTensor, Usable};
pub use variable::{Keeps, Variable};
