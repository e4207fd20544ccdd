//! Sentences without their padding.
//!
//! ```text
//!   a b c        unpack            a b c ·
//!   d            ◀─────▶  pack     d · · ·       rows × size, and batch × places × size
//! ```
//! All that a layer does to a word by itself is done to rows; only attention needs sentences side by side. So nothing is spent on padding but there.

use drumline_torch::autograd_function;
use tch::{Device, Kind, Tensor};

/// Why a function of these closures can be made: neither fails, and one tensor becomes one.
const ONE_OUTPUT: &str = "a tensor of rows becomes another";

/// Which places of a batch are rows.
#[derive(Debug)]
pub(crate) struct Rows {
    batch: i64,
    places: i64,
    /// `None`: all.
    kept: Option<Kept>,
}

#[derive(Debug)]
struct Kept {
    /// The place of each row in the flattened batch, in rising order.
    places: Tensor,
    /// The row of each place; that of padding is any.
    rows: Tensor,
    /// The places of padding.
    padding: Tensor,
}

impl Rows {
    /// Every place is a row.
    pub(crate) fn all(batch: i64, places: i64) -> Self {
        Self { batch, places, kept: None }
    }

    /// The places that `hidden`, batch × places, does not hide. On a GPU it would have to be waited for, and all places are rows.
    pub(crate) fn seen(hidden: &Tensor) -> Self {
        let size = hidden.size();
        let all = Self::all(size[0], size[1]);
        if hidden.device() != Device::Cpu {
            return all;
        }
        let hidden = hidden.flatten(0, 1);
        all.keeping(hidden.logical_not().nonzero().squeeze_dim(1), &hidden)
    }

    /// Those at `places`, in rising order, of a batch of `like`'s shape; on a GPU all.
    pub(crate) fn at(places: &Tensor, like: &Tensor) -> Self {
        let size = like.size();
        let all = Self::all(size[0], size[1]);
        if places.device() != Device::Cpu {
            return all;
        }
        let hidden = Tensor::ones([size[0] * size[1]], (Kind::Bool, Device::Cpu)).index_fill_(0, places, 0);
        all.keeping(places.shallow_clone(), &hidden)
    }

    /// Of rows × size those at `places`, which [`at`](Self::at) was given.
    pub(crate) fn at_places(&self, xs: Tensor, places: &Tensor) -> Tensor {
        match self.kept {
            Some(_) => xs,
            None => xs.index_select(0, places),
        }
    }

    fn keeping(self, places: Tensor, hidden: &Tensor) -> Self {
        let count = places.size()[0];
        if count == self.batch * self.places || count == 0 {
            return self;
        }
        // How many rows begin before the end of a place, less one: its own row, or for padding that of a word before it.
        let rows = hidden.logical_not().cumsum(0, Kind::Int64) - 1;
        let kept = Kept { places, rows: rows.clamp_min(0), padding: hidden.nonzero().squeeze_dim(1) };
        Self { kept: Some(kept), ..self }
    }

    /// batch × places × size becomes rows × size.
    pub(crate) fn pack(&self, xs: &Tensor) -> Tensor {
        let flat = xs.flatten(0, 1);
        let Some(Kept { places, rows, padding }) = &self.kept else { return flat };
        let (places, rows, padding) = (places.shallow_clone(), rows.shallow_clone(), padding.shallow_clone());
        let packed = autograd_function(
            &[&flat],
            |_, inputs| Ok(vec![inputs[0].index_select(0, &places)]),
            move |_, grads| {
                let spread = |grad: &Tensor| grad.index_select(0, &rows).index_fill_(0, &padding, 0.0);
                Ok(vec![grads[0].as_ref().map(spread)])
            },
        );
        packed.expect(ONE_OUTPUT).swap_remove(0)
    }

    /// The way back. What stands at padding is another word's.
    pub(crate) fn unpack(&self, xs: &Tensor) -> Tensor {
        let shape = [self.batch, self.places, xs.size()[1]];
        let Some(Kept { places, rows, .. }) = &self.kept else { return xs.view(shape) };
        let (places, rows) = (places.shallow_clone(), rows.shallow_clone());
        let unpacked = autograd_function(
            &[xs],
            |_, inputs| Ok(vec![inputs[0].index_select(0, &rows)]),
            // Nobody sees padding, so its gradient is zero.
            move |_, grads| Ok(vec![grads[0].as_ref().map(|grad| grad.index_select(0, &places))]),
        );
        unpacked.expect(ONE_OUTPUT).swap_remove(0).view(shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_go_there_and_back_with_their_gradients() {
        let hidden = Tensor::from_slice(&[false, false, true, false, true, true]).view([2, 3]);
        let places = Tensor::from_slice(&[0i64, 1, 3]);
        for rows in [Rows::seen(&hidden), Rows::at(&places, &hidden)] {
            let xs = Tensor::arange(12, (Kind::Float, Device::Cpu)).view([2, 3, 2]).set_requires_grad(true);
            let packed = rows.pack(&xs);
            assert_eq!(packed, Tensor::from_slice2(&[[0f32, 1.0], [2.0, 3.0], [6.0, 7.0]]));
            let back = rows.unpack(&packed);
            assert_eq!(back.size(), [2, 3, 2]);
            assert_eq!(rows.pack(&back), packed);
            (rows.pack(&back) * &packed).sum(Kind::Float).backward();
            let there = hidden.logical_not().unsqueeze(2).to_kind(Kind::Float);
            assert_eq!(xs.grad(), xs.detach() * there * 2.0);
        }
    }

    #[test]
    fn without_padding_nothing_is_copied() {
        let xs = Tensor::zeros([2, 3, 4], (Kind::Float, Device::Cpu));
        let rows = Rows::seen(&Tensor::zeros([2, 3], (Kind::Bool, Device::Cpu)));
        let packed = rows.pack(&xs);
        assert_eq!((packed.size(), packed.data_ptr()), (vec![6, 4], xs.data_ptr()));
        assert_eq!(rows.unpack(&packed).data_ptr(), xs.data_ptr());
    }
}
