//! f32 weights in two halves, as tensors: our kernels on a CPU, operations of libtorch on a GPU. Both have the same bits.
//!
//! `kernels::halves` defines the halves.

use tch::{Device, Kind, Tensor, no_grad};

use crate::error::TorchError;
use crate::kernels::floats::{elements, elements_mut};
use crate::kernels::{join_all, split_all};

/// What a quiet NaN has in its high half.
const QUIET: i64 = 0x40;

/// The f32 weights of two halves, as a new tensor.
pub(super) fn join(high: &Tensor, low: &Tensor) -> Result<Tensor, TorchError> {
    let (size, stride, place) = (high.size(), high.stride(), (Kind::Float, high.device()));
    let mut whole = no_grad(|| high.f_new_empty_strided(size, stride, place))?;
    if high.device() == Device::Cpu {
        join_all(elements(high)?, elements(low)?, elements_mut(&mut whole)?);
        return Ok(whole);
    }
    let bits = high.f_detach()?.f_to_kind(Kind::Float)?.f_view_dtype(Kind::Int)?;
    let low = low.f_to_kind(Kind::Int)?;
    let without_sign = low.f_bitwise_and(0xffff)?;
    let rest = without_sign.f_where_self(&high.f_detach()?.f_isnan()?, &low)?;
    let joined = bits.f_add(&rest)?.f_view_dtype(Kind::Float)?;
    no_grad(|| whole.f_copy_(&joined))?;
    Ok(whole)
}

/// Splits weights into halves.
pub(super) fn write_halves(weights: &Tensor, high: &mut Tensor, low: &mut Tensor) -> Result<(), TorchError> {
    let [new_high, new_low] = halves(weights)?;
    no_grad(|| high.f_copy_(&new_high))?;
    low.f_copy_(&new_low)?;
    Ok(())
}

/// Splits loaded master weights for the bf16 weights `high`. Where a weight is not its master rounded in either way, the
/// program has changed it, and its low half becomes zero.
pub(super) fn split(masters: &Tensor, high: &mut Tensor, low: &mut Tensor) -> Result<(), TorchError> {
    if high.device() == Device::Cpu {
        split_all(elements(masters)?, elements_mut(high)?, elements_mut(low)?);
        return Ok(());
    }
    let [new_high, new_low] = halves(masters)?;
    let bits = |tensor: &Tensor| tensor.f_view_dtype(Kind::Int16);
    let nearest = bits(&masters.f_to_kind(Kind::BFloat16)?)?;
    let now = bits(high)?;
    let is_own = now.f_eq_tensor(&bits(&new_high)?)?.f_logical_or(&now.f_eq_tensor(&nearest)?)?;
    let new_low = new_low.f_where_self(&is_own, &new_low.f_zeros_like()?)?;
    let new_high = new_high.f_where_self(&is_own, high)?;
    no_grad(|| high.f_copy_(&new_high))?;
    low.f_copy_(&new_low)?;
    Ok(())
}

/// The halves of f32 weights, by operations of libtorch.
fn halves(weights: &Tensor) -> Result<[Tensor; 2], TorchError> {
    let weights = weights.f_detach()?;
    let bits = weights.f_view_dtype(Kind::Int)?;
    let rounded = bits.f_add_scalar(0x8000)?.f_bitwise_right_shift_tensor_scalar(16)?;
    let quiet = bits.f_bitwise_right_shift_tensor_scalar(16)?.f_bitwise_or(QUIET)?;
    let high = quiet.f_where_self(&weights.f_isnan()?, &rounded)?;
    let high = high.f_to_kind(Kind::Int16)?.f_view_dtype(Kind::BFloat16)?;
    Ok([high, bits.f_to_kind(Kind::Int16)?])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of all kinds.
    fn numbers() -> Tensor {
        let bits: Vec<i32> = (0..=u32::MAX)
            .step_by(65_521)
            .chain([0x7f80_0001, 0xffff_ffff])
            .map(|bits| bits as i32)
            .collect();
        Tensor::from_slice(&bits).view_dtype(Kind::Float)
    }

    #[test]
    fn operations_have_the_halves_of_the_kernels() {
        let weights = numbers();
        let mut high = weights.to_kind(Kind::BFloat16);
        let mut low = Tensor::zeros(weights.size(), (Kind::Int16, Device::Cpu));
        split(&weights, &mut high, &mut low).unwrap();
        let bits = |tensor: &Tensor| tensor.view_dtype(Kind::Int16);
        let is_number = weights.isnan().logical_not();
        let [found_high, found_low] = halves(&weights).unwrap();
        for (found, expected) in [(bits(&found_high), bits(&high)), (found_low, low.shallow_clone())] {
            let differs = found.not_equal_tensor(&expected).logical_and(&is_number);
            // Where the master is in the middle, `split` keeps the weight that was rounded to even.
            let is_middle = weights.view_dtype(Kind::Int).bitwise_and(0xffff).eq(0x8000);
            assert!(!bool::try_from(differs.logical_and(&is_middle.logical_not()).any()).unwrap());
        }
        assert!(!bool::try_from(found_high.isfinite().logical_and(&is_number.logical_not()).any()).unwrap());
        write_halves(&weights, &mut high, &mut low).unwrap();
        let joined = join(&high, &low).unwrap();
        let only_numbers = |tensor: &Tensor| tensor.where_self(&is_number, &tensor.zeros_like());
        assert_eq!(only_numbers(&joined), only_numbers(&weights));
        assert_eq!(joined.isnan(), weights.isnan());
    }
}
