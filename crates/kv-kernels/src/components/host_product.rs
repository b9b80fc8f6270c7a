//! Matrix products on one core of a CPU, over rows of larger matrices.

use gemm::{Parallelism, gemm};

/// Some columns of a row-major matrix.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a> {
    /// From the first element of the first row on.
    pub(crate) elements: &'a [f32],
    /// Elements from one row to the next.
    pub(crate) stride: usize,
}

/// The second factor of a product.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Factor<'a> {
    /// `[k, n]`
    Plain(Rows<'a>),
    /// The transpose of `[n, k]`.
    Transposed(Rows<'a>),
}

/// Writes `scale a b` to `to`, or adds it where `adds` says so: `a` is `[m, k]`, `b` is `[k, n]`,
/// and `to` is `[m, n]` with `stride` elements from one row to the next. `shape` is `[m, n, k]`.
///
/// # Panics
/// If a matrix has fewer elements than `shape` says.
pub(crate) fn product(
    shape: [usize; 3],
    (to, stride): (&mut [f32], usize),
    adds: bool,
    a: Rows<'_>,
    b: Factor<'_>,
    scale: f32,
) {
    let [m, n, k] = shape;
    let holds = |elements: usize, stride: usize, rows: usize, columns: usize| {
        rows == 0 || columns <= stride && (rows - 1) * stride + columns <= elements
    };
    let (rows, b_strides) = match b {
        Factor::Plain(rows) => (holds(rows.elements.len(), rows.stride, k, n), [1, rows.stride]),
        Factor::Transposed(rows) => {
            (holds(rows.elements.len(), rows.stride, n, k), [rows.stride, 1])
        }
    };
    let (Factor::Plain(b) | Factor::Transposed(b)) = b;
    assert!(rows, "the second factor has {} elements for {shape:?}", b.elements.len());
    assert!(holds(a.elements.len(), a.stride, m, k), "a has {} elements", a.elements.len());
    assert!(holds(to.len(), stride, m, n), "the result has {} elements", to.len());
    let beta = scale;
    let alpha = if adds { 1.0 } else { 0.0 };
    // SAFETY: every element that the strides reach is inside its slice, as asserted above.
    unsafe {
        gemm(
            m,
            n,
            k,
            to.as_mut_ptr(),
            1,
            stride as isize,
            adds,
            a.elements.as_ptr(),
            1,
            a.stride as isize,
            b.elements.as_ptr(),
            b_strides[0] as isize,
            b_strides[1] as isize,
            alpha,
            beta,
            false,
            false,
            false,
            Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_parts_agree_with_loops() {
        let [m, n, k, stride] = [5, 7, 11, 13];
        let numbers = |count: usize, seed: usize| -> Vec<f32> {
            (0..count).map(|i| ((i * 37 + seed) % 23) as f32 - 11.0).collect()
        };
        let (a, plain, turned) =
            (numbers(m * stride, 1), numbers(k * stride, 2), numbers(n * stride, 3));
        let rows = |elements| Rows { elements, stride };
        for (b, at) in [
            (
                Factor::Plain(rows(&plain)),
                &(|p: usize, j: usize| plain[p * stride + j]) as &dyn Fn(usize, usize) -> f32,
            ),
            (Factor::Transposed(rows(&turned)), &|p, j| turned[j * stride + p]),
        ] {
            for adds in [false, true] {
                let mut to = vec![1.0; m * stride];
                product([m, n, k], (&mut to, stride), adds, rows(&a), b, 0.5);
                for i in 0..m {
                    for j in 0..stride {
                        let sum: f32 =
                            (0..k).map(|p| a[i * stride + p] * at(p, j.min(n - 1))).sum();
                        let before = if adds { 1.0 } else { 0.0 };
                        let expected = if j < n { before + 0.5 * sum } else { 1.0 };
                        assert_eq!(to[i * stride + j], expected, "{i} {j} {adds}");
                    }
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "the second factor has 12 elements")]
    fn short_factors_are_refused() {
        let rows = |elements| Rows { elements, stride: 4 };
        let b = Factor::Transposed(rows(&[0.0; 12]));
        product([1, 4, 4], (&mut [0.0; 4], 4), false, rows(&[0.0; 4]), b, 1.0);
    }
}
