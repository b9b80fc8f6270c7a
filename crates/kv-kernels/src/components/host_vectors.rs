//! Arithmetic on slices of f32 by the processor's vector instructions, for the CPU paths of ops.
//! The functions are compiled into their callers, which [`pulp::Arch`] dispatches once for many of
//! them.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use pulp::Simd;

/// Rows that [`add_four`] adds together, so that the sum is read and written once.
pub(crate) const ROWS_TOGETHER: usize = 4;

/// A floating-point number in memory.
pub(crate) trait HostFloat: Copy + Send + Sync {
    /// The numbers in f32: themselves, or converted in `room`, which has as many.
    fn widened<'a>(numbers: &'a [Self], room: &'a mut [f32]) -> &'a [f32];
}

impl HostFloat for f32 {
    #[inline(always)]
    fn widened<'a>(numbers: &'a [Self], _room: &'a mut [f32]) -> &'a [f32] {
        numbers
    }
}

impl HostFloat for f16 {
    #[inline(always)]
    fn widened<'a>(numbers: &'a [Self], room: &'a mut [f32]) -> &'a [f32] {
        numbers.convert_to_f32_slice(room);
        room
    }
}

impl HostFloat for bf16 {
    #[inline(always)]
    fn widened<'a>(numbers: &'a [Self], room: &'a mut [f32]) -> &'a [f32] {
        numbers.convert_to_f32_slice(room);
        room
    }
}

/// `a · b`, in f32.
#[inline(always)]
pub(crate) fn dot<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (S::as_simd_f32s(a), S::as_simd_f32s(b));
    // Several sums hide the latency of additions.
    let mut sums = [simd.splat_f32s(0.0); 4];
    let (a_fours, b_fours) = (a.chunks_exact(4), b.chunks_exact(4));
    for (a, b) in a_fours.remainder().iter().zip(b_fours.remainder()) {
        sums[0] = simd.mul_add_e_f32s(*a, *b, sums[0]);
    }
    for (a, b) in a_fours.zip(b_fours) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum = simd.mul_add_e_f32s(*a, *b, *sum);
        }
    }
    let [first, second, third, fourth] = sums;
    let sums = simd.add_f32s(simd.add_f32s(first, second), simd.add_f32s(third, fourth));
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    simd.reduce_sum_f32s(sums) + rest
}

/// Adds a weighted row to `to`.
#[inline(always)]
pub(crate) fn add_one<S: Simd>(simd: S, row: &[f32], weight: f32, to: &mut [f32]) {
    let ((row, row_rest), (to, to_rest)) = (S::as_simd_f32s(row), S::as_mut_simd_f32s(to));
    let weights = simd.splat_f32s(weight);
    for (to, row) in to.iter_mut().zip(row) {
        *to = simd.mul_add_e_f32s(*row, weights, *to);
    }
    for (to, row) in to_rest.iter_mut().zip(row_rest) {
        *to += row * weight;
    }
}

/// Adds four weighted rows to `to`.
#[inline(always)]
pub(crate) fn add_four<S: Simd>(
    simd: S,
    rows: [&[f32]; ROWS_TOGETHER],
    weights: [f32; ROWS_TOGETHER],
    to: &mut [f32],
) {
    let splat = weights.map(|weight| simd.splat_f32s(weight));
    let [a, b, c, d] = rows.map(S::as_simd_f32s);
    let (to, to_rest) = S::as_mut_simd_f32s(to);
    let whole = a.0.iter().zip(b.0).zip(c.0.iter().zip(d.0));
    for (to, ((a, b), (c, d))) in to.iter_mut().zip(whole) {
        let first = simd.mul_add_e_f32s(*a, splat[0], *to);
        let second = simd.mul_f32s(*c, splat[2]);
        let first = simd.mul_add_e_f32s(*b, splat[1], first);
        let second = simd.mul_add_e_f32s(*d, splat[3], second);
        *to = simd.add_f32s(first, second);
    }
    let rest = [a.1, b.1, c.1, d.1];
    for (i, to) in to_rest.iter_mut().enumerate() {
        *to += rest.iter().zip(&weights).map(|(row, weight)| row[i] * weight).sum::<f32>();
    }
}

/// The largest number, or −∞ of none. With NaN among the numbers it is any of them, or NaN.
#[inline(always)]
pub(crate) fn maximum<S: Simd>(simd: S, numbers: &[f32]) -> f32 {
    let (vectors, rest) = S::as_simd_f32s(numbers);
    let lowest = simd.splat_f32s(f32::NEG_INFINITY);
    let largest = vectors.iter().fold(lowest, |largest, own| simd.max_f32s(largest, *own));
    rest.iter().copied().fold(simd.reduce_max_f32s(largest), f32::max)
}

/// The sum of the numbers.
#[inline(always)]
pub(crate) fn sum<S: Simd>(simd: S, numbers: &[f32]) -> f32 {
    let (vectors, rest) = S::as_simd_f32s(numbers);
    let zero = simd.splat_f32s(0.0);
    let total = vectors.iter().fold(zero, |total, own| simd.add_f32s(total, *own));
    simd.reduce_sum_f32s(total) + rest.iter().sum::<f32>()
}

/// `exp(x − top)` in place of each number `x`. −∞ becomes 0, also for a top of −∞, and NaN stays.
/// The relative error is at most 3e-7. For differences below −87.3, where the result is no normal
/// number, it is 0; for differences above 88 it is infinite.
#[inline(always)]
pub(crate) fn exponentials<S: Simd>(simd: S, numbers: &mut [f32], top: f32) {
    // −∞ less −∞ is NaN.
    let top = if top == f32::NEG_INFINITY { 0.0 } else { top };
    let tops = simd.splat_f32s(top);
    let (vectors, rest) = S::as_mut_simd_f32s(numbers);
    for own in vectors {
        *own = exponential(simd, simd.sub_f32s(*own, tops));
    }
    for own in rest {
        let vector = exponential(simd, simd.splat_f32s(*own - top));
        *own = bytemuck::cast_slice(std::slice::from_ref(&vector))[0];
    }
}

/// `exp(x) = 2^n e^r`, where `n` is `x / ln 2` rounded and `|r| <= ln 2 / 2`, and
/// `e^r` is the polynomial of the Cephes library (`expf`).
#[inline(always)]
fn exponential<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    // Added to a number below 2^22, it leaves the number rounded in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts: the first has few digits, so that its multiples are exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    const POLYNOMIAL: [f32; 6] =
        [1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5];
    // Between them, 2^n is a normal number.
    const LOWEST: f32 = -87.336_54;
    const HIGHEST: f32 = 88.0;
    let splat = |number: f32| simd.splat_f32s(number);
    let one = splat(1.0);
    let shifted = simd.mul_add_e_f32s(x, splat(std::f32::consts::LOG2_E), splat(ROUND));
    let n = simd.sub_f32s(shifted, splat(ROUND));
    let r = simd.mul_add_e_f32s(n, splat(-LN_2[0]), x);
    let r = simd.mul_add_e_f32s(n, splat(-LN_2[1]), r);
    let [first, others @ ..] = POLYNOMIAL;
    let series = others.iter().fold(splat(first), |y, own| simd.mul_add_e_f32s(y, r, splat(*own)));
    let series = simd.mul_add_e_f32s(series, simd.mul_f32s(r, r), simd.add_f32s(r, one));
    // 2^n: the exponent's bits are n + 127.
    let bias = simd.splat_u32s(127u32.wrapping_sub(ROUND.to_bits()));
    let exponent = simd.add_u32s(simd.transmute_u32s_f32s(shifted), bias);
    let power = simd.transmute_f32s_u32s(simd.wrapping_dyn_shl_u32s(exponent, simd.splat_u32s(23)));
    let result = simd.mul_f32s(series, power);
    let low = simd.less_than_f32s(x, splat(LOWEST));
    let result = simd.select_f32s(low, splat(0.0), result);
    let high = simd.greater_than_f32s(x, splat(HIGHEST));
    simd.select_f32s(high, splat(f32::INFINITY), result)
}

#[cfg(test)]
mod tests {
    use pulp::{Arch, WithSimd};

    use super::*;

    struct Exponentials<'a>(&'a mut [f32], f32);

    impl WithSimd for Exponentials<'_> {
        type Output = [f32; 2];

        fn with_simd<S: Simd>(self, simd: S) -> [f32; 2] {
            let top = maximum(simd, self.0);
            exponentials(simd, self.0, self.1);
            [top, sum(simd, self.0)]
        }
    }

    #[test]
    fn exponentials_agree_with_f64() {
        for count in [1, 7, 64, 1001] {
            for top in [0.0f32, 3.5, -20.0] {
                let xs: Vec<f32> =
                    (0..count).map(|i| top - 87.0 * i as f32 / count as f32).collect();
                let mut own = xs.clone();
                let [largest, total] = Arch::new().dispatch(Exponentials(&mut own, top));
                assert_eq!(largest, top);
                let exact = xs.iter().map(|x| f64::from(x - top).exp());
                for (x, (own, exact)) in xs.iter().zip(own.iter().zip(exact.clone())) {
                    let error = (f64::from(*own) / exact - 1.0).abs();
                    assert!(error < 3e-7, "exp({x} - {top}) is {own}, expected {exact}");
                }
                let exact: f64 = exact.sum();
                assert!((f64::from(total) / exact - 1.0).abs() < 1e-6, "{total} {exact}");
            }
        }
    }

    #[test]
    fn exponentials_of_infinities_are_zero_and_nan_stays() {
        let mut own = vec![f32::NEG_INFINITY; 40];
        (own[3], own[39]) = (f32::NAN, -1e30);
        Arch::new().dispatch(Exponentials(&mut own, 0.0));
        assert!(own[3].is_nan());
        assert!(own.iter().enumerate().all(|(i, x)| i == 3 || *x == 0.0), "{own:?}");
        let mut own = vec![f32::NEG_INFINITY; 40];
        let [top, total] = Arch::new().dispatch(Exponentials(&mut own, f32::NEG_INFINITY));
        assert_eq!([top, total], [f32::NEG_INFINITY, 0.0]);
        let mut own = [80.0, 89.0];
        Arch::new().dispatch(Exponentials(&mut own, 0.0));
        assert!((f64::from(own[0]) / 80f64.exp() - 1.0).abs() < 3e-7 && own[1] == f32::INFINITY);
    }
}
