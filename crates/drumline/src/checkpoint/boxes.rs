//! The boxes of a tensor that a rank holds: one for most, several for weights that are stacked.
//!
//! ```text
//!   queries, keys and values [6, 4], cut by heads on 2 ranks      held by rank 1 [3, 4]
//!     rows 0 1 │ 2 3 │ 4 5                                          row 0 = row 1 of the whole
//!     rank 0 1 │ 0 1 │ 0 1                                          row 1 = row 3, row 2 = row 5
//! ```
//! PyTorch's form has one box for each name in a file, so that the nth boxes of all tensors are in a rank's nth file.
//!
//! Not here: which rank saves a tensor (`layout`), and the names of files (`section`).

use drumline_parallel::{Placed, PlacedBox};
use drumline_torch::{Named, TorchError};
use tch::Tensor;

use super::error::CheckpointError;
use super::region::{NoSuchRegion, Region};
use super::shard_writer::TensorPart;

/// The boxes of one tensor, which together are all of what a rank holds of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Boxes {
    /// The shape of what is held.
    shape: Vec<usize>,
    /// At least one.
    boxes: Vec<Boxed>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Boxed {
    /// Its first element in what is held.
    at: Vec<usize>,
    /// Its place in the whole tensor.
    region: Region,
}

impl Boxes {
    /// One box.
    pub(super) fn one(region: Region) -> Self {
        let shape = region.shape().to_vec();
        Self { boxes: vec![Boxed { at: vec![0; shape.len()], region }], shape }
    }

    /// All of a tensor.
    pub(super) fn whole(shape: &[usize]) -> Self {
        Self::one(Region::whole(shape))
    }

    /// Those of what an engine holds.
    pub(super) fn of(placed: &Placed) -> Result<Self, NoSuchRegion> {
        let whole = to_usize(&placed.whole);
        let boxed = |PlacedBox { at, offsets, size }: PlacedBox| {
            let region = Region::new(&to_usize(&offsets), &to_usize(&size), &whole)?;
            Ok(Boxed { at: to_usize(&at), region })
        };
        let boxes = placed.boxes().into_iter().map(boxed).collect::<Result<_, _>>()?;
        Ok(Self { shape: to_usize(&placed.tensor.size()), boxes })
    }

    /// The shape of what is held.
    pub(super) fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Whether it has the first element of the whole tensor, which only one rank of those that divide it has.
    pub(super) fn is_first(&self) -> bool {
        self.boxes.iter().any(|boxed| boxed.region.offsets().iter().all(|offset| *offset == 0))
    }

    /// The same rows of a tensor of this shape, which has a row for each row of the whole. `None` if they are no rows, but
    /// are cut along another dim.
    pub(super) fn rows(&self, whole: &[usize], shape: &[usize]) -> Option<Self> {
        let mut boxes = Vec::with_capacity(self.boxes.len());
        for Boxed { at, region } in &self.boxes {
            if region.shape().get(1..) != whole.get(1..) {
                return None;
            }
            let first = |first: usize| std::iter::once(first).chain(vec![0; shape.len() - 1]).collect();
            let offsets: Vec<usize> = first(*region.offsets().first()?);
            let sizes = [&region.shape()[..1], &shape[1..]].concat();
            boxes.push(Boxed { at: first(at[0]), region: Region::new(&offsets, &sizes, shape).ok()? });
        }
        Some(Self { shape: [&self.shape[..1], &shape[1..]].concat(), boxes })
    }

    /// What is held, as parts of a tensor of this shape.
    pub(super) fn parts(&self, held: &Named, global: &[usize]) -> Result<Vec<TensorPart>, CheckpointError> {
        let part = |Boxed { at, region }: &Boxed| {
            let is_all = region.shape() == self.shape;
            let tensor =
                if is_all { held.tensor.shallow_clone() } else { narrowed(&held.tensor, at, region)? };
            let (name, global_shape) = (held.name.clone(), global.to_vec());
            Ok(TensorPart { name, global_shape, offsets: region.offsets().to_vec(), tensor })
        };
        self.boxes.iter().map(part).collect()
    }

    /// What is held of a whole tensor.
    pub(super) fn of_whole(&self, whole: &Tensor) -> Result<Tensor, CheckpointError> {
        self.joined(|region| Ok(narrowed(whole, region.offsets(), region)?))
    }

    /// What is held, of boxes that `read` returns.
    pub(super) fn joined(
        &self,
        mut read: impl FnMut(&Region) -> Result<Tensor, CheckpointError>,
    ) -> Result<Tensor, CheckpointError> {
        if let [Boxed { region, .. }] = &self.boxes[..] {
            return read(region);
        }
        let size: Vec<i64> = self.shape.iter().map(|size| *size as i64).collect();
        let mut held: Option<Tensor> = None;
        for Boxed { at, region } in &self.boxes {
            let part = read(region)?;
            let held = match &held {
                Some(held) => held,
                None => {
                    let empty =
                        Tensor::f_empty(&size, (part.kind(), part.device())).map_err(TorchError::from)?;
                    held.insert(empty)
                }
            };
            let copy = || Ok::<_, TorchError>(narrowed(held, at, region)?.f_copy_(&part)?);
            tch::no_grad(copy)?;
        }
        Ok(held.unwrap_or_default())
    }
}

/// The box of a tensor that begins at `at` and has the shape of `region`.
fn narrowed(tensor: &Tensor, at: &[usize], region: &Region) -> Result<Tensor, TorchError> {
    let mut dims = at.iter().zip(region.shape()).enumerate();
    Ok(dims.try_fold(tensor.shallow_clone(), |tensor, (dim, (at, size))| {
        tensor.f_narrow(dim as i64, *at as i64, *size as i64)
    })?)
}

pub(super) fn to_usize(sizes: &[i64]) -> Vec<usize> {
    sizes.iter().map(|size| *size as usize).collect()
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    /// What rank 1 of 2 holds of three stacked tensors of 4 rows each.
    fn stacked() -> (Tensor, Placed) {
        let whole = Tensor::arange(24, (Kind::Float, Device::Cpu)).view([12, 2]);
        let boxed =
            |nth: i64| PlacedBox { at: vec![2 * nth, 0], offsets: vec![4 * nth + 2, 0], size: vec![2, 2] };
        let rows: Vec<_> = (0..3).map(|nth| whole.narrow(0, 4 * nth + 2, 2)).collect();
        let placed = Placed {
            name: "w".into(),
            tensor: Tensor::cat(&rows, 0),
            whole: vec![12, 2],
            offsets: vec![2, 0],
            is_saved_here: true,
            boxes: (0..3).map(boxed).collect(),
        };
        (whole, placed)
    }

    #[test]
    fn boxes_are_cut_and_joined() {
        let (whole, placed) = stacked();
        let boxes = Boxes::of(&placed).unwrap();
        assert_eq!(boxes.of_whole(&whole).unwrap(), placed.tensor);
        let parts = boxes.parts(&Named { name: "w".into(), tensor: placed.tensor }, &[12, 2]).unwrap();
        assert_eq!(parts.iter().map(|part| part.offsets[0]).collect::<Vec<_>>(), [2, 6, 10]);
        for part in parts {
            assert_eq!(part.tensor, whole.narrow(0, part.offsets[0] as i64, 2));
        }
        assert!(!boxes.is_first() && Boxes::whole(&[3]).is_first());
    }

    #[test]
    fn rows_of_another_tensor_follow_unless_other_dims_are_cut() {
        let (_, placed) = stacked();
        let boxes = Boxes::of(&placed).unwrap();
        let rows = boxes.rows(&[12, 2], &[12, 1]).unwrap();
        let whole = Tensor::arange(12, (Kind::Float, Device::Cpu)).view([12, 1]);
        assert_eq!(rows.shape(), [6, 1]);
        assert_eq!(
            rows.of_whole(&whole).unwrap(),
            Tensor::from_slice(&[2f32, 3., 6., 7., 10., 11.]).view([6, 1])
        );
        let column = Boxes::one(Region::new(&[0, 1], &[12, 1], &[12, 2]).unwrap());
        assert_eq!(column.rows(&[12, 2], &[12, 1]), None);
    }
}
