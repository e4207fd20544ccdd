//! Makes the columns of a matrix orthonormal.

use drumline_torch::TorchError;
use tch::{Kind, Tensor};

/// Makes the columns orthonormal in place: with a QR decomposition for at least three columns, where it is faster,
/// otherwise with the Gram-Schmidt process.
///
/// A column of zeros stays zero. `epsilon` is added to the lengths before columns are divided by them.
pub(super) fn orthogonalize(matrix: &Tensor, epsilon: f64) -> Result<(), TorchError> {
    let is_narrow = matches!(matrix.kind(), Kind::Half | Kind::BFloat16);
    if matrix.size()[1] <= 2 || is_narrow {
        return gram_schmidt(matrix, epsilon);
    }
    let (columns, _) = Tensor::f_linalg_qr(matrix, "reduced")?;
    matrix.shallow_clone().f_copy_(&columns)?;
    Ok(())
}

fn gram_schmidt(matrix: &Tensor, epsilon: f64) -> Result<(), TorchError> {
    let num_columns = matrix.size()[1];
    for index in 0..num_columns {
        let column = matrix.f_narrow(1, index, 1)?;
        normalize(&column, epsilon)?;
        if index > 0 {
            orthogonalize_again(&column, &matrix.f_narrow(1, 0, index)?)?;
        }
        if index + 1 < num_columns {
            remove(&column, &matrix.f_narrow(1, index + 1, num_columns - index - 1)?)?;
        }
    }
    Ok(())
}

/// If a column depends on earlier ones, only rounding errors remain, which need not be orthogonal to them. One more
/// pass is enough (Kahan's "twice is enough"). If that removes most of it again, the column is linearly dependent and
/// becomes zero.
fn orthogonalize_again(column: &Tensor, earlier: &Tensor) -> Result<(), TorchError> {
    remove(earlier, column)?;
    if length(column)? < 0.5 {
        let _ = column.shallow_clone().f_zero_()?;
    }
    normalize(column, 0.0)
}

/// Subtracts from `others` their projections on the columns of `basis`.
fn remove(basis: &Tensor, others: &Tensor) -> Result<(), TorchError> {
    let parts = basis.f_mm(&basis.f_tr()?.f_mm(others)?)?;
    let _ = others.shallow_clone().f_sub_(&parts)?;
    Ok(())
}

fn normalize(column: &Tensor, epsilon: f64) -> Result<(), TorchError> {
    let length = length(column)?;
    if length > 0.0 {
        let _ = column.shallow_clone().f_div_scalar_(length + epsilon)?;
    }
    Ok(())
}

/// The length, computed in `f32`, because squares of halves overflow.
fn length(column: &Tensor) -> Result<f64, TorchError> {
    Ok(column.f_to_kind(wide(column.kind()))?.f_norm()?.f_double_value(&[])?)
}

pub(super) fn wide(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Device;

    fn waves(rows: i64, columns: i64) -> Tensor {
        let numel = Tensor::arange(rows * columns, (Kind::Float, Device::Cpu));
        (numel * 1.7 + 0.4).sin().view([rows, columns])
    }

    fn assert_orthonormal(matrix: &Tensor, tolerance: f64) {
        let products = matrix.tr().mm(matrix).to_kind(Kind::Float);
        let eye = Tensor::eye(matrix.size()[1], (Kind::Float, Device::Cpu));
        let difference = (products - eye).abs().max().double_value(&[]);
        assert!(difference < tolerance, "{difference:e}: {matrix:?}");
    }

    #[test]
    fn columns_become_orthonormal() {
        for (rows, columns) in [(1, 1), (9, 1), (9, 2), (2, 2), (9, 4), (4, 4)] {
            let matrix = waves(rows, columns);
            orthogonalize(&matrix, 0.0).unwrap();
            assert_orthonormal(&matrix, 1e-5);
        }
        let halves = waves(9, 4).to_kind(Kind::BFloat16);
        orthogonalize(&halves, 0.0).unwrap();
        assert_orthonormal(&halves, 0.05);
    }

    #[test]
    fn linearly_dependent_columns_are_harmless() {
        let one = waves(9, 1);
        let matrix = Tensor::cat(&[&one, &(&one * 3.1)], 1);
        orthogonalize(&matrix, 0.0).unwrap();
        // The projection of the first column is itself, whatever the second became.
        let projected = matrix.mm(&matrix.tr().mm(&one));
        assert!((projected - one).abs().max().double_value(&[]) < 1e-5);
        let zeros = Tensor::zeros([9, 2], (Kind::Float, Device::Cpu));
        orthogonalize(&zeros, 0.0).unwrap();
        assert_eq!(zeros.abs().max().double_value(&[]), 0.0);
    }
}
