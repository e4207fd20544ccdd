//! What travels between stages: tensors with their shapes, and the samples that they belong to.
//!
//! ```text
//!   header, 32 words    length │ samples: first, stride, count │ tensors │ each: type, flags, dims, sizes      then each tensor
//! ```
//! A header that needs more words is followed by a second message with the rest. Shapes travel with the tensors, so that
//! micro-batches may have different sizes.

use drumline_comm::{ProcessGroup, Source};
use drumline_torch::{StepSamples, TensorCollectives};
use tch::{Device, Kind, Tensor};

use crate::error::ParallelError;
use crate::kinds::{kind_number, kind_numbered};

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// Words of the first message.
const FIRST: usize = 32;
/// Words before those of the tensors.
const FIXED: usize = 5;
/// The most dims of a tensor, and tensors of a parcel: more can only be a damaged header.
const MOST: usize = 1 << 10;

/// Flags of a tensor.
const IS_THERE: u64 = 1;
const NEEDS_GRAD: u64 = 2;
const CHANNELS_LAST: u64 = 4;

/// The tensors of a message, and what the receiver must know of them.
#[derive(Debug)]
pub struct Parcel {
    /// The samples of the micro-batch.
    pub samples: StepSamples,
    /// The tensors; `None` for a gradient that is zero or not needed.
    pub tensors: Vec<Option<Tensor>>,
    /// Whether the sender needs the gradient of each.
    pub needs_grad: Vec<bool>,
}

/// What a header says of a tensor.
struct Described {
    kind: Kind,
    flags: u64,
    size: Vec<i64>,
}

impl Parcel {
    /// Sends it to the other rank of a group of two.
    pub(super) fn send(&self, group: &ProcessGroup, to: usize, tag: u64) -> Result {
        let mut words = self.header()?;
        words.resize(words.len().max(FIRST), 0);
        group.send(&words[..FIRST], to, tag)?;
        if words.len() > FIRST {
            group.send(&words[FIRST..], to, tag)?;
        }
        for tensor in self.tensors.iter().flatten().filter(|tensor| tensor.numel() > 0) {
            // In the order of memory, so that nothing is copied.
            if is_channels_last(tensor) {
                group.send_tensor(&tensor.f_permute([0, 2, 3, 1])?, to, tag)?;
            } else {
                group.send_tensor(tensor, to, tag)?;
            }
        }
        Ok(())
    }

    /// Receives one, with its tensors on `device`.
    pub(super) fn receive(group: &ProcessGroup, from: usize, tag: u64, device: Device) -> Result<Self> {
        let mut words = vec![0u64; FIRST];
        group.recv(&mut words, Source::Rank(from), tag)?;
        let len = words[0] as usize;
        if len > FIXED + MOST * (MOST + 1) {
            return Err(damaged());
        }
        if len > FIRST {
            words.resize(len, 0);
            group.recv(&mut words[FIRST..], Source::Rank(from), tag)?;
        }
        let samples = StepSamples { first: words[1], stride: words[2], count: words[3] };
        let described = described(&words).ok_or_else(damaged)?;
        let (mut tensors, mut needs_grad) = (Vec::new(), Vec::new());
        for Described { kind, flags, size } in described {
            needs_grad.push(flags & NEEDS_GRAD != 0);
            let is_there = flags & IS_THERE != 0;
            tensors.push(is_there.then(|| room(&size, kind, device, flags)).transpose()?);
            let Some(tensor) =
                tensors.last_mut().and_then(Option::as_mut).filter(|tensor| tensor.numel() > 0)
            else {
                continue;
            };
            if flags & CHANNELS_LAST != 0 {
                group.recv_tensor(&mut tensor.f_permute([0, 2, 3, 1])?, Source::Rank(from), tag)?;
            } else {
                group.recv_tensor(tensor, Source::Rank(from), tag)?;
            }
        }
        Ok(Self { samples, tensors, needs_grad })
    }

    fn header(&self) -> Result<Vec<u64>> {
        let StepSamples { first, stride, count } = self.samples;
        let mut words = vec![0, first, stride, count, self.tensors.len() as u64];
        for (tensor, needs_grad) in self.tensors.iter().zip(&self.needs_grad) {
            let mut flags = if *needs_grad { NEEDS_GRAD } else { 0 };
            let Some(tensor) = tensor else {
                words.extend([flags << 8, 0]);
                continue;
            };
            let kind = tensor.f_kind()?;
            let number = kind_number(kind).ok_or_else(|| {
                let what = "the type of a tensor between two stages";
                ParallelError::value(
                    what,
                    format!("{kind:?}"),
                    "one of f32, f64, f16, bf16, i64, i32, u8 and bool",
                )
            })?;
            flags |= IS_THERE | if is_channels_last(tensor) { CHANNELS_LAST } else { 0 };
            let size = tensor.size();
            words.extend([u64::from(number) | flags << 8, size.len() as u64]);
            words.extend(size.iter().map(|size| *size as u64));
        }
        words[0] = words.len() as u64;
        Ok(words)
    }
}

/// What the words of a header say of the tensors; `None` if they make no sense.
fn described(words: &[u64]) -> Option<Vec<Described>> {
    let mut rest = words.get(FIXED..)?.iter().copied();
    let count = usize::try_from(words[4]).ok().filter(|count| *count <= MOST)?;
    let one = |_| {
        let (what, dims) = (rest.next()?, rest.next()?);
        let dims = usize::try_from(dims).ok().filter(|dims| *dims <= MOST)?;
        let size: Vec<i64> = rest.by_ref().take(dims).map(|size| size as i64).collect();
        let is_whole = size.len() == dims && size.iter().all(|size| *size >= 0);
        is_whole.then_some(Described { kind: kind_numbered(what as u8)?, flags: what >> 8, size })
    };
    (0..count).map(one).collect()
}

fn damaged() -> ParallelError {
    ParallelError::Internal { what: "a message between two stages has a damaged header" }
}

/// Memory for a tensor that is received.
fn room(size: &[i64], kind: Kind, device: Device, flags: u64) -> Result<Tensor> {
    let options = (kind, device);
    if flags & CHANNELS_LAST == 0 {
        return Ok(Tensor::f_zeros(size, options)?);
    }
    let &[images, channels, height, width] = size else { return Err(damaged()) };
    Ok(Tensor::f_zeros([images, height, width, channels], options)?.f_permute([0, 3, 1, 2])?)
}

/// Whether a batch of images has its channels last in memory, and in no other order.
fn is_channels_last(tensor: &Tensor) -> bool {
    tensor.dim() == 4
        && !tensor.is_contiguous()
        && tensor.f_permute([0, 2, 3, 1]).is_ok_and(|permuted| permuted.is_contiguous())
}

#[cfg(test)]
mod tests {
    use drumline_comm::LocalGroup;

    use super::*;

    fn sent(tensors: impl Fn() -> Vec<Option<Tensor>> + Sync) -> Parcel {
        let made = LocalGroup::run(2, |group| {
            let tensors = tensors();
            let samples = StepSamples { first: 3, stride: 2, count: 5 };
            let needs_grad = (0..tensors.len()).map(|place| place % 2 == 0).collect();
            let outcome = match group.rank() {
                0 => Parcel { samples, tensors, needs_grad }.send(&group, 1, 7).map(|()| None),
                _ => Parcel::receive(&group, 0, 7, Device::Cpu).map(Some),
            };
            Ok(outcome.map_err(|error| error.to_string()))
        });
        made.unwrap().into_iter().find_map(|outcome| outcome.unwrap()).unwrap()
    }

    #[test]
    fn tensors_arrive_with_types_and_shapes() {
        let made = || {
            let numbers = Tensor::arange(24, (Kind::Float, Device::Cpu));
            vec![
                Some(numbers.view([2, 3, 4])),
                None,
                Some(numbers.to_kind(Kind::BFloat16).view([4, 6]).transpose(0, 1)),
                Some(Tensor::from_slice(&[true, false])),
                Some(Tensor::zeros([3, 0, 2], (Kind::Double, Device::Cpu))),
                Some(Tensor::from(7i64)),
                Some(numbers.view([1, 3, 4, 2]).permute([0, 3, 1, 2])),
            ]
        };
        let parcel = sent(made);
        assert_eq!(parcel.samples, StepSamples { first: 3, stride: 2, count: 5 });
        assert_eq!(parcel.needs_grad, [true, false, true, false, true, false, true]);
        for (got, expected) in parcel.tensors.iter().zip(made()) {
            assert_eq!(got.as_ref().map(Tensor::kind), expected.as_ref().map(Tensor::kind));
            assert_eq!(*got, expected);
        }
        assert!(is_channels_last(parcel.tensors[6].as_ref().unwrap()));
    }

    #[test]
    fn a_long_header_has_a_second_message() {
        let many = sent(|| (0..40).map(|value| Some(Tensor::from(value))).collect());
        assert_eq!(many.tensors.len(), 40);
        assert_eq!(many.tensors[39], Some(Tensor::from(39)));
        assert!(sent(Vec::new).tensors.is_empty());
    }

    #[test]
    fn a_damaged_header_is_noticed() {
        let header = |tail: &[u64]| [&[0, 0, 0, 0, 1], tail].concat();
        assert!(described(&header(&[0, 1, 5])).is_some());
        for tail in [&[0u64, 2, 5][..], &[99, 0], &[0], &[0, u64::MAX], &[0, 1, u64::MAX]] {
            assert!(described(&header(tail)).is_none(), "{tail:?}");
        }
    }
}
