//! Matrices whose columns are made orthogonal to each other, of length 1.

use drumline_torch::TorchError;
use tch::{Kind, Tensor};

/// Makes the columns orthonormal, where they are: QR from three columns on, as it is faster then, else Gram and Schmidt's way.
///
/// A column of zeros stays one. `epsilon` is added to lengths before columns are divided by them.
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
            again(&column, &matrix.f_narrow(1, 0, index)?)?;
        }
        if index + 1 < num_columns {
            remove(&column, &matrix.f_narrow(1, index + 1, num_columns - index - 1)?)?;
        }
    }
    Ok(())
}

/// What is left of a column that depends on earlier ones is rounding errors, and need not be orthogonal to them. Once more is enough, says
/// Kahan; if most of it goes again, the column says nothing new.
fn again(column: &Tensor, earlier: &Tensor) -> Result<(), TorchError> {
    remove(earlier, column)?;
    if length(column)? < 0.5 {
        let _ = column.shallow_clone().f_zero_()?;
    }
    normalize(column, 0.0)
}

/// Takes from `others` their parts along the columns of `basis`.
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

/// In `f32`, as squares of halves overflow.
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
    fn columns_that_depend_on_others_do_no_harm() {
        let one = waves(9, 1);
        let matrix = Tensor::cat(&[&one, &(&one * 3.1)], 1);
        orthogonalize(&matrix, 0.0).unwrap();
        // The projection of the first column is itself, whatever became of the second.
        let projected = matrix.mm(&matrix.tr().mm(&one));
        assert!((projected - one).abs().max().double_value(&[]) < 1e-5);
        let zeros = Tensor::zeros([9, 2], (Kind::Float, Device::Cpu));
        orthogonalize(&zeros, 0.0).unwrap();
        assert_eq!(zeros.abs().max().double_value(&[]), 0.0);
    }
}
