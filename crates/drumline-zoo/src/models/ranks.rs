//! The ranks among which a model's layers and the places of its texts are cut.
//!
//! ```text
//!   12 places    cp 2 (zig-zag)    rank 0: 0 1 2 · · · · · · 9 10 11      tp 2, of these     rank 0: 0 1 2
//!                                  rank 1: · · · 3 4 5 6 7 8 · · ·                           rank 1: 9 10 11
//! ```
//! Between the regions in which layers are cut, ranks along `tp` have a part of the places that their rank of `cp` has.

use std::ops::Range;

use drumline::comm::Mesh;
use drumline::engine::context::ContextParallel;
use drumline::engine::tensor::{TensorParallel, Variable};
use drumline_torch::{PartOf, dropout_part};
use tch::nn::{Init, Path, init};
use tch::{Device, Tensor};

use super::draw::drawn;
use super::dropout::dropout;
use crate::error::ZooError;
use crate::first_weights::FirstWeights;

/// The ranks that have parts of one model, along `tp`, and those that have parts of the same texts, along `cp`. By default
/// a rank has all of both. Clones are the same.
///
/// ```
/// use drumline::comm::{Axis, LocalGroup, Mesh};
/// use drumline_zoo::models::ModelRanks;
/// use drumline_zoo::models::gpt::{Gpt, GptOptions};
/// use tch::{Device, nn::VarStore};
///
/// LocalGroup::run(2, |group| {
///     let ranks = ModelRanks::on(&Mesh::along(&group, Axis::Tp)?);
///     let store = VarStore::new(Device::Cpu);
///     let small = GptOptions { n_layer: 1, n_head: 2, n_embd: 8, n_positions: 8, vocab_size: 30, ..Default::default() };
///     let _model = Gpt::on(&ranks, &store.root(), &small).expect("2 ranks divide 2 heads");
///     assert_eq!(store.variables()["h.0.attn.c_attn.weight"].size(), [8, 12]);
///     assert_eq!(ranks.tp.parts().len(), 1 + 2 + 1 + 2 + 1);
///     Ok(())
/// })?;
/// # Ok::<(), drumline::comm::CommError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct ModelRanks {
    /// Those that have parts of each layer.
    pub tp: TensorParallel,
    /// Those that have parts of each text.
    pub cp: ContextParallel,
}

impl ModelRanks {
    /// Those of a mesh.
    pub fn on(mesh: &Mesh) -> Self {
        Self { tp: TensorParallel::on(mesh), cp: ContextParallel::on(mesh) }
    }

    /// Whether a rank has less than all of the layers or texts.
    pub fn is_cut(&self) -> bool {
        self.tp.is_cut() || self.cp.is_cut()
    }

    /// Returns an error if texts are cut, for a model that cannot do so.
    pub(super) fn check_no_cp(&self) -> Result<(), ZooError> {
        if !self.cp.is_cut() {
            return Ok(());
        }
        let what = format!("texts are cut among {} ranks, which only a GPT's can be", self.cp.size());
        Err(ZooError::Unsuitable { what, fix: "cp 1, and tp".to_owned() })
    }

    /// The places of texts of this length that this rank has between the regions in which layers are cut.
    pub(super) fn places(&self, len: i64) -> Vec<Range<i64>> {
        let chunks =
            if self.cp.is_cut() { self.cp.cut(len).chunks(self.cp.rank()).to_vec() } else { vec![0..len] };
        let of_rank: i64 = chunks.iter().map(|chunk| chunk.end - chunk.start).sum();
        within(&chunks, self.tp.cut(of_rank).range(self.tp.rank()))
    }

    /// Creates this rank's part of a variable, with the values of the whole model.
    pub(super) fn drawn(
        &self,
        path: &Path<'_>,
        variable: Variable<'_>,
        how: Init,
    ) -> Result<Tensor, ZooError> {
        if !self.tp.is_cut() {
            return Ok(drawn(path, variable.name, variable.size, how));
        }
        if !FirstWeights::of_this_build().have_values() {
            return Ok(self.tp.variable_without_values(path, variable)?);
        }
        Ok(self.tp.variable_of(path, variable, || Ok(init(how, variable.size, Device::Cpu)))?)
    }

    /// The same with zeros, which are not drawn.
    pub(super) fn zeros(&self, path: &Path<'_>, variable: Variable<'_>) -> Result<Tensor, ZooError> {
        if !self.tp.is_cut() {
            return Ok(path.zeros(variable.name, variable.size));
        }
        Ok(self.tp.variable(path, variable, Init::Const(0.0))?)
    }

    /// Dropout of this rank's part of a tensor that has `whole` elements along dim 1: heads `[texts, heads, …]`, or features
    /// `[rows, features]`.
    pub(super) fn dropout(&self, xs: &Tensor, whole: i64, p: f64) -> Tensor {
        if !self.tp.is_cut() {
            return dropout(xs, p);
        }
        let part = PartOf { dim: 1, whole, places: vec![self.tp.cut(whole).range(self.tp.rank())] };
        dropout_part(xs, p, &part).unwrap_or_else(|error| panic!("{error}"))
    }
}

/// The ranges of `chunks`, one after the other, in which the elements of `range` lie.
fn within(chunks: &[Range<i64>], range: Range<i64>) -> Vec<Range<i64>> {
    let mut before = 0;
    let mut found = Vec::new();
    for chunk in chunks {
        let len = chunk.end - chunk.start;
        let (start, end) = ((range.start - before).clamp(0, len), (range.end - before).clamp(0, len));
        if start < end {
            found.push(chunk.start + start..chunk.start + end);
        }
        before += len;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_two_chunks_lies_in_both() {
        let chunks = [2..5, 9..13];
        assert_eq!(within(&chunks, 0..7), [2..5, 9..13]);
        assert_eq!(within(&chunks, 1..4), [3..5, 9..10]);
        assert_eq!(within(&chunks, 3..7), [9..13]);
        assert_eq!(within(&chunks, 2..2), []);
        assert_eq!(ModelRanks::default().places(7), [0..7]);
    }
}
