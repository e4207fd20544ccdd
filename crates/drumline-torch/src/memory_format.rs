//! PyTorch's `channels_last` memory format, which convolutions on tensor cores and in oneDNN need. Sizes do not change.
//!
//! ```text
//!   contiguous      [N, C, H, W], strides [C·H·W, H·W, W, 1]
//!   channels last   [N, C, H, W], strides [H·W·C, 1, W·C, C]
//! ```

use tch::{Tensor, no_grad};

use crate::error::TorchError;
use crate::named::Named;

/// The same values with channels last. Returns the tensor itself if it has that layout or is not four-dimensional.
///
/// ```
/// use drumline_torch::channels_last;
/// use tch::{Device, Kind, Tensor};
///
/// let images = Tensor::rand([2, 3, 4, 5], (Kind::Float, Device::Cpu));
/// let last = channels_last(&images)?;
/// assert_eq!(last.stride(), [60, 1, 15, 3]);
/// assert_eq!(last, images);
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
pub fn channels_last(tensor: &Tensor) -> Result<Tensor, TorchError> {
    if tensor.dim() != 4 {
        return Ok(tensor.shallow_clone());
    }
    Ok(tensor.f_permute([0, 2, 3, 1])?.f_contiguous()?.f_permute([0, 3, 1, 2])?)
}

/// Changes four-dimensional weights, which are those of convolutions, to channels last, in place. Call it before
/// optimizers and replicas are made.
pub fn weights_channels_last(parameters: &[Named]) -> Result<(), TorchError> {
    parameters.iter().try_for_each(|Named { tensor, .. }| {
        let laid = no_grad(|| channels_last(&tensor.f_detach()?))?;
        Ok(tensor.shallow_clone().f_set_data(&laid)?)
    })
}

/// Casts weights of two or more dimensions to `kind`, in place. Biases and norms keep their kind: they are small and
/// need the precision. Call it before optimizers and replicas are made. [`MasterWeights`](crate::MasterWeights) trains
/// f32 copies.
pub fn weights_in(parameters: &[Named], kind: tch::Kind) -> Result<(), TorchError> {
    parameters.iter().filter(|named| is_weight(&named.tensor)).try_for_each(|Named { tensor, .. }| {
        let cast = no_grad(|| tensor.f_detach()?.f_to_kind(kind))?;
        Ok(tensor.shallow_clone().f_set_data(&cast)?)
    })
}

/// Whether [`weights_in`] casts this parameter.
pub fn is_weight(parameter: &Tensor) -> bool {
    parameter.dim() >= 2 && parameter.is_floating_point()
}

/// Whether a tensor is channels last without gaps.
pub(crate) fn is_channels_last(tensor: &Tensor) -> bool {
    let (size, stride) = (tensor.size(), tensor.stride());
    let [_, channels, height, width] = size[..] else { return false };
    let expected = [height * width * channels, 1, width * channels, channels];
    // The stride of a dim of size 1 does not matter.
    size.iter()
        .zip(&stride)
        .zip(expected)
        .all(|((extent, stride), expected)| *extent == 1 || *stride == expected)
}

/// Whether two tensors of the same size have the same memory layout. The stride of a dim of size 1 does not matter.
pub(crate) fn has_layout_of(tensor: &Tensor, like: &Tensor) -> bool {
    let strides = tensor.stride().into_iter().zip(like.stride());
    strides.zip(tensor.size()).all(|((a, b), extent)| a == b || extent == 1)
}

/// The same values with the memory layout and kind of `like`. Returns the tensor itself if it has them.
pub(crate) fn with_layout_of(tensor: &Tensor, like: &Tensor) -> Result<Tensor, TorchError> {
    if tensor.kind() == like.kind() && has_layout_of(tensor, like) {
        return Ok(tensor.shallow_clone());
    }
    let mut copy = no_grad(|| like.f_empty_like())?;
    no_grad(|| copy.f_copy_(tensor))?;
    Ok(copy)
}

#[cfg(test)]
mod tests {
    use tch::nn::{self, Module};
    use tch::{Device, Kind};

    use super::*;
    use crate::named::parameters;
    use crate::optim::{Optimizer, Sgd, SgdOptions};

    /// Values that do not depend on the random number generator.
    fn waves(sizes: &[i64], speed: f64) -> Tensor {
        let numel: i64 = sizes.iter().product();
        (Tensor::arange(numel, (Kind::Float, Device::Cpu)) * speed).sin().view(sizes)
    }

    /// The weights after some steps.
    fn trained(lay: impl Fn(&[Named]), images: fn(&Tensor) -> Tensor) -> Vec<Tensor> {
        let vs = nn::VarStore::new(Device::Cpu);
        let conv = nn::conv2d(vs.root() / "conv", 3, 8, 3, Default::default());
        let norm = nn::batch_norm2d(vs.root() / "norm", 8, Default::default());
        for Named { tensor, .. } in parameters(&vs) {
            no_grad(|| tensor.shallow_clone().copy_(&waves(&tensor.size(), 0.7)));
        }
        lay(&parameters(&vs));
        let options = SgdOptions { lr: 0.1, momentum: 0.9, ..SgdOptions::default() };
        let mut sgd = Sgd::new(parameters(&vs), options).unwrap();
        for step in 0..5 {
            let x = images(&waves(&[4, 3, 6, 6], 0.3 + f64::from(step)));
            let y = nn::ModuleT::forward_t(&norm, &conv.forward(&x), true).relu();
            sgd.zero_grad().unwrap();
            y.square().mean(Kind::Float).backward();
            sgd.step().unwrap();
        }
        parameters(&vs).iter().map(|named| named.tensor.detach().copy()).collect()
    }

    #[test]
    fn channels_last_does_not_change_the_training() {
        let plain = trained(|_| (), Tensor::shallow_clone);
        let lay = |parameters: &[Named]| {
            weights_channels_last(parameters).unwrap();
            let conv = parameters.iter().find(|named| named.name == "conv.weight").unwrap();
            assert_eq!(conv.tensor.stride(), [27, 1, 9, 3]);
            assert!(conv.tensor.requires_grad() && conv.tensor.is_leaf());
        };
        let last = trained(lay, |images| channels_last(images).unwrap());
        for (a, b) in plain.iter().zip(&last) {
            assert!(a.allclose(b, 1e-4, 1e-6, false));
        }
    }

    #[test]
    fn layers_see_weights_in_their_new_kind() {
        let vs = nn::VarStore::new(Device::Cpu);
        let linear = nn::linear(vs.root(), 3, 2, Default::default());
        weights_in(&parameters(&vs), Kind::BFloat16).unwrap();
        assert_eq!((linear.ws.kind(), linear.bs.as_ref().unwrap().kind()), (Kind::BFloat16, Kind::Float));
        let x = Tensor::ones([1, 3], (Kind::Float, Device::Cpu));
        let y = crate::autocast(Device::Cpu, Kind::BFloat16, || linear.forward(&x)).unwrap();
        y.sum(Kind::Float).backward();
        assert_eq!(linear.ws.grad().kind(), Kind::BFloat16);
    }
}
