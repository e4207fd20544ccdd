//! Batches of sentences without padding.
//!
//! ```text
//!   a b c        unpack            a b c ·
//!   d            ◀─────▶  pack     d · · ·       rows × size, and batch × places × size
//! ```
//! Operations on single words run on rows; only attention needs padded sentences. So only attention spends work on
//! padding.

use drumline_torch::autograd_function;
use tch::{Device, Kind, Tensor};

/// Why the custom function cannot fail: neither closure fails, and one tensor becomes one.
const ONE_OUTPUT: &str = "a tensor of rows becomes another";

/// Which places of a batch are rows.
#[derive(Debug)]
pub(crate) struct Rows {
    batch: i64,
    places: i64,
    /// `None` if all places are rows.
    without_padding: Option<WithoutPadding>,
}

#[derive(Debug)]
struct WithoutPadding {
    /// The place of each row in the flattened batch, ascending.
    places: Tensor,
    /// The row of each place; any row for padding.
    rows: Tensor,
    /// The places of padding.
    padding: Tensor,
}

impl Rows {
    /// Every place is a row.
    pub(crate) fn all(batch: i64, places: i64) -> Self {
        Self { batch, places, without_padding: None }
    }

    /// The places that `hidden` `[batch, places]` does not hide. On a GPU, all places are rows: counting them would
    /// block the host.
    pub(crate) fn seen(hidden: &Tensor) -> Self {
        let size = hidden.size();
        let all = Self::all(size[0], size[1]);
        if hidden.device() != Device::Cpu {
            return all;
        }
        let hidden = hidden.flatten(0, 1);
        all.keeping(hidden.logical_not().nonzero().squeeze_dim(1), &hidden)
    }

    /// The rows at `places` (ascending) of a batch with the shape of `like`. On a GPU, all places are rows.
    pub(crate) fn at(places: &Tensor, like: &Tensor) -> Self {
        let size = like.size();
        let all = Self::all(size[0], size[1]);
        if places.device() != Device::Cpu {
            return all;
        }
        let hidden = Tensor::ones([size[0] * size[1]], (Kind::Bool, Device::Cpu)).index_fill_(0, places, 0);
        all.keeping(places.shallow_clone(), &hidden)
    }

    /// The same rows, for an owner that outlives these.
    pub(crate) fn shared(&self) -> Self {
        let of = |WithoutPadding { places, rows, padding }: &WithoutPadding| WithoutPadding {
            places: places.shallow_clone(),
            rows: rows.shallow_clone(),
            padding: padding.shallow_clone(),
        };
        Self { without_padding: self.without_padding.as_ref().map(of), ..*self }
    }

    /// Selects the rows at `places` from `[rows, size]`, for places that were passed to [`at`](Self::at).
    pub(crate) fn at_places(&self, xs: Tensor, places: &Tensor) -> Tensor {
        match self.without_padding {
            Some(_) => xs,
            None => xs.index_select(0, places),
        }
    }

    fn keeping(self, places: Tensor, hidden: &Tensor) -> Self {
        let count = places.size()[0];
        if count == self.batch * self.places || count == 0 {
            return self;
        }
        // The cumulative number of rows minus one: a word's own row, or the row of an earlier word for padding.
        let rows = hidden.logical_not().cumsum(0, Kind::Int64) - 1;
        let without_padding =
            WithoutPadding { places, rows: rows.clamp_min(0), padding: hidden.nonzero().squeeze_dim(1) };
        Self { without_padding: Some(without_padding), ..self }
    }

    /// `[batch, places, size]` becomes `[rows, size]`.
    pub(crate) fn pack(&self, xs: &Tensor) -> Tensor {
        let flat = xs.flatten(0, 1);
        let Some(WithoutPadding { places, rows, padding }) = &self.without_padding else { return flat };
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

    /// The inverse of `pack`. Padding gets the values of other words.
    pub(crate) fn unpack(&self, xs: &Tensor) -> Tensor {
        let shape = [self.batch, self.places, xs.size()[1]];
        let Some(WithoutPadding { places, rows, .. }) = &self.without_padding else { return xs.view(shape) };
        let (places, rows) = (places.shallow_clone(), rows.shallow_clone());
        let unpacked = autograd_function(
            &[xs],
            |_, inputs| Ok(vec![inputs[0].index_select(0, &rows)]),
            // Padding is never read, so its gradient is zero.
            move |_, grads| Ok(vec![grads[0].as_ref().map(|grad| grad.index_select(0, &places))]),
        );
        unpacked.expect(ONE_OUTPUT).swap_remove(0).view(shape)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_round_trips_words_and_gradients() {
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
