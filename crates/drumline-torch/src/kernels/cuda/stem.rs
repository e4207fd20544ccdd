//! The first convolution of a ResNet: 7 × 7 pixels with stride 2 on three channels, which is too few channels for
//! tensor cores. It is folded to a convolution of 4 × 4 pixels on twelve channels, which computes the same.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use super::place::{Element, Source, launch};
use crate::autocast::autocast_kind;
use crate::convolution::{Conv2d, gradients};
use crate::cuda::{Argument, Grid};
use crate::error::TorchError;
use crate::function::autograd_function;

static SOURCE: Source = Source::new(&[include_str!("stem.cu")]);

const THREADS: u32 = 256;
/// Channels of the folded convolution, as in the source.
const FOLDED: i64 = 16;
const EDGE: i64 = 4;
const MOST_NUMEL: i64 = 1 << 30;

/// The convolution of `images` with `weight` (outputs × 3 × 7 × 7), with stride 2 and padding 3. Returns `None` if the
/// kernels do not support the tensors, so that libtorch is the fallback: tensors that are not in 16 bits on a GPU,
/// images of odd sizes, images that require gradients.
pub fn conv_stem_cuda(images: &Tensor, weight: &Tensor) -> Result<Option<Tensor>, TorchError> {
    let Some(stem) = Stem::of(images, weight)? else { return Ok(None) };
    let outputs = autograd_function(
        &[weight],
        |cx, inputs| {
            let (images, weight) = (stem.folded(images)?, stem.folded_weight(inputs[0])?);
            let made = Conv2d::default().forward(&images, &weight)?;
            for saved in [&images, &weight, inputs[0]] {
                cx.save(saved);
            }
            Ok(vec![made])
        },
        move |cx, grads| {
            let Some(grad) = &grads[0] else { return Ok(vec![None]) };
            let [images, folded, weight] = cx.saved() else { return Ok(vec![None]) };
            let [_, of_folded] = gradients(grad, images, folded, Conv2d::default(), [false, true])?;
            let of_folded = of_folded.map(|grad| stem.unfolded(&grad, weight)).transpose()?;
            Ok(vec![of_folded])
        },
    )?;
    Ok(outputs.into_iter().next())
}

/// What the kernels need to know.
#[derive(Debug, Clone, Copy)]
struct Stem {
    device: usize,
    /// The type in which the convolution is computed.
    kind: Kind,
    element: Element,
}

impl Stem {
    fn of(images: &Tensor, weight: &Tensor) -> Result<Option<Self>, TorchError> {
        let Device::Cuda(device) = images.device() else { return Ok(None) };
        let kind = autocast_kind(images.device())?.unwrap_or(weight.kind());
        let (size, of_weight) = (images.size(), weight.size());
        let is_known = |other: Kind| other == kind || other == Kind::Float;
        let fits = matches!(kind, Kind::BFloat16 | Kind::Half)
            && is_known(images.kind())
            && is_known(weight.kind())
            && size.len() == 4
            && size[2] % 2 == 0
            && size[3] % 2 == 0
            && weight.device() == images.device()
            && of_weight.len() == 4
            && of_weight[0] % 8 == 0
            && of_weight[1..] == [3, 7, 7]
            && size[1] == 3
            && size[0] > 0
            && images.numel() as i64 * 2 <= MOST_NUMEL
            && !images.requires_grad();
        let element = Element::on(device, kind).filter(|_| fits);
        Ok(element.map(|element| Self { device, kind, element }))
    }

    /// Folds images to half the size, with padding.
    fn folded(&self, images: &Tensor) -> Result<Tensor, TorchError> {
        let size = images.size();
        let [count, height, width] = [size[0], size[2], size[3]];
        let (rows, columns) = (height / 2 + 3, width / 2 + 3);
        let to = self.channels_last([count, FOLDED, rows, columns])?;
        let sizes = [count, height, width].map(|extent| Argument::from(extent as i32));
        let arguments = [&[images.into(), (&to).into()], &strides(images)[..], &sizes].concat();
        self.launch(&self.name("fold", images), count * rows * columns, &arguments)?;
        Ok(to)
    }

    fn folded_weight(&self, weight: &Tensor) -> Result<Tensor, TorchError> {
        let outputs = weight.size()[0];
        let to = self.channels_last([outputs, FOLDED, EDGE, EDGE])?;
        let arguments =
            [&[weight.into(), (&to).into()], &strides(weight)[..], &[(outputs as i32).into()]].concat();
        self.launch(&self.name("fold_weight", weight), outputs * FOLDED * EDGE * EDGE, &arguments)?;
        Ok(to)
    }

    /// The gradient of the weight, with the weight's layout.
    fn unfolded(&self, grad: &Tensor, weight: &Tensor) -> Result<Tensor, TorchError> {
        let (outputs, to) = (weight.size()[0], weight.f_empty_like()?);
        let grad = crate::memory_format::channels_last(grad)?;
        let arguments =
            [&[(&grad).into(), (&to).into()], &strides(&to)[..], &[(outputs as i32).into()]].concat();
        self.launch(&self.name("unfold_weight", weight), weight.numel() as i64, &arguments)?;
        Ok(to)
    }

    fn channels_last(&self, size: [i64; 4]) -> Result<Tensor, TorchError> {
        let [count, channels, height, width] = size;
        let place = (self.kind, Device::Cuda(self.device));
        Ok(Tensor::f_empty([count, height, width, channels], place)?.f_permute([0, 3, 1, 2])?)
    }

    /// The name of the kernel for a tensor in 16 bits, or in f32.
    fn name(&self, name: &str, tensor: &Tensor) -> String {
        format!("{name}_{}", if tensor.kind() == self.kind { "same" } else { "float" })
    }

    fn launch(&self, name: &str, threads: i64, arguments: &[Argument]) -> Result<(), TorchError> {
        let kernels = SOURCE.on(self.device, self.element)?;
        let blocks = (threads as u64).div_ceil(u64::from(THREADS)) as u32;
        let grid = Grid { blocks: (blocks, 1), threads: THREADS, shared: 0 };
        // SAFETY: each caller lists the arguments as in the source, for tensors of the sizes that it expects.
        unsafe { launch(&kernels, name, self.device, grid, arguments) }
    }
}

/// The strides of a tensor, in elements.
fn strides(tensor: &Tensor) -> Vec<Argument> {
    tensor.stride().iter().map(|stride| Argument::from(*stride as i32)).collect()
}
