//! Values of expressions: exact fractions where there are, else complex numbers at points.

use std::hash::{DefaultHasher, Hash, Hasher};

use num_bigint::BigInt;
use num_complex::Complex64;
use num_rational::BigRational;
use num_traits::{One, Pow, Signed, ToPrimitive, Zero};

use super::expression::{Expression, Function};

/// How many points two expressions are compared at. Two different expressions that agree at all of
/// them would have to be built for it.
pub(super) const POINTS: u32 = 6;
/// At the first of them all variables are positive, so that identities such as `sqrt(x^2) = x`,
/// which fail for negative `x`, do not hold at all points.
const POSITIVE_POINTS: u32 = 2;

/// Larger exponents, and results with more bits, are computed in floating point.
const MAX_EXPONENT: i32 = 10_000;
const MAX_BITS: u64 = 100_000;
const MAX_FACTORIAL: u32 = 1_000;

/// The value of digits with an optional decimal point, such as `12.50` and `.5`.
pub(crate) fn decimal(text: &str) -> Option<BigRational> {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    if whole.is_empty() && part.is_empty() {
        return None;
    }
    let digits: BigInt = format!("{whole}{part}").parse().ok()?;
    let scale = BigInt::from(10).pow(part.len());
    Some(BigRational::new(digits, scale))
}

/// The exact value of `expression`, if it is a fraction and not too large.
pub(super) fn exact(expression: &Expression) -> Option<BigRational> {
    match expression {
        Expression::Number { value, .. } => Some(value.clone()),
        Expression::Negative(inner) => Some(-exact(inner)?),
        Expression::Sum(terms) => {
            terms.iter().try_fold(BigRational::zero(), |sum, term| Some(sum + exact(term)?))
        }
        Expression::Product(factors) => {
            factors.iter().try_fold(BigRational::one(), |all, factor| Some(all * exact(factor)?))
        }
        Expression::Quotient(above, below) => {
            let below = exact(below)?;
            if below.is_zero() { None } else { Some(exact(above)? / below) }
        }
        Expression::Power(base, exponent) => power(&exact(base)?, &exact(exponent)?),
        Expression::Root(index, inner) => root(&exact(index)?, &exact(inner)?),
        Expression::Percent(inner) => Some(exact(inner)? / BigInt::from(100)),
        Expression::Absolute(inner) => Some(exact(inner)?.abs()),
        Expression::Floor(inner) => Some(exact(inner)?.floor()),
        Expression::Ceiling(inner) => Some(exact(inner)?.ceil()),
        Expression::Factorial(inner) => {
            let n = natural(&exact(inner)?)?;
            Some(BigRational::from((1..=n).map(BigInt::from).product::<BigInt>()))
        }
        Expression::Binomial(n, k) => {
            let (n, k) = (natural(&exact(n)?)?, natural(&exact(k)?)?);
            let choose = |all: BigInt, i: u32| all * (n - i) / (i + 1);
            Some(if k > n {
                BigRational::zero()
            } else {
                BigRational::from((0..k).fold(BigInt::one(), choose))
            })
        }
        Expression::Based { .. } | Expression::Symbol(_) | Expression::Call { .. } => None,
    }
}

fn natural(value: &BigRational) -> Option<u32> {
    let value = if value.is_integer() { value.to_integer().to_u32() } else { None };
    value.filter(|value| *value <= MAX_FACTORIAL)
}

fn power(base: &BigRational, exponent: &BigRational) -> Option<BigRational> {
    if !exponent.is_integer() {
        let whole = power(base, &BigRational::from(exponent.numer().clone()))?;
        return root(&BigRational::from(exponent.denom().clone()), &whole);
    }
    let exponent = exponent.to_integer().to_i32().filter(|e| e.abs() <= MAX_EXPONENT)?;
    let bits = base.numer().bits().max(base.denom().bits()) * u64::from(exponent.unsigned_abs());
    if bits > MAX_BITS || (base.is_zero() && exponent <= 0) {
        return None;
    }
    Some(Pow::pow(base, exponent))
}

/// The real root, if it is a fraction.
fn root(index: &BigRational, value: &BigRational) -> Option<BigRational> {
    let n = natural(index).filter(|n| (1..=64).contains(n))?;
    if value.is_negative() && n % 2 == 0 {
        return None;
    }
    let root = BigRational::new(value.numer().nth_root(n), value.denom().nth_root(n));
    (Pow::pow(&root, n) == *value).then_some(root)
}

/// The value of `expression` at a point: each variable has a value of its own there.
pub(super) fn at(expression: &Expression, point: u32) -> Complex64 {
    let at = |inner: &Expression| at(inner, point);
    let undefined = Complex64::new(f64::NAN, f64::NAN);
    // Large exact values overflow in their parts: 1001!/1000! is 1001.
    if let Some(value) = exact(expression) {
        return value.to_f64().map_or(undefined, Complex64::from);
    }
    match expression {
        Expression::Number { value, .. } => value.to_f64().map_or(undefined, Complex64::from),
        Expression::Based { digits, base } => variable(&format!("{digits}_{base}"), point),
        Expression::Symbol(name) => match name.as_str() {
            r"\pi" => std::f64::consts::PI.into(),
            "e" => std::f64::consts::E.into(),
            "i" => Complex64::i(),
            name => variable(name, point),
        },
        Expression::Negative(inner) => -at(inner),
        Expression::Sum(terms) => terms.iter().map(at).sum(),
        Expression::Product(factors) => factors.iter().map(at).product(),
        Expression::Quotient(above, below) => at(above) / at(below),
        Expression::Power(base, exponent) => match exact(exponent).and_then(|e| e.to_i32_exact()) {
            Some(whole) => at(base).powi(whole),
            None => at(base).powc(at(exponent)),
        },
        Expression::Root(index, inner) => real_root(at(index), at(inner)),
        Expression::Percent(inner) => at(inner) / 100.0,
        Expression::Absolute(inner) => at(inner).norm().into(),
        Expression::Floor(inner) => at(inner).re.floor().into(),
        Expression::Ceiling(inner) => at(inner).re.ceil().into(),
        Expression::Factorial(_) | Expression::Binomial(..) => undefined,
        Expression::Call { function, base, argument } => {
            let x = at(argument);
            match function {
                Function::Sin => x.sin(),
                Function::Cos => x.cos(),
                Function::Tan => x.tan(),
                Function::Cot => x.tan().inv(),
                Function::Sec => x.cos().inv(),
                Function::Csc => x.sin().inv(),
                Function::Arcsin => x.asin(),
                Function::Arccos => x.acos(),
                Function::Arctan => x.atan(),
                Function::Sinh => x.sinh(),
                Function::Cosh => x.cosh(),
                Function::Tanh => x.tanh(),
                Function::Exp => x.exp(),
                Function::Ln => x.ln(),
                // Without a base it is the common logarithm, as in Math-Verify.
                Function::Log => match base {
                    Some(base) => x.ln() / at(base).ln(),
                    None => x.ln() / Complex64::from(10.0).ln(),
                },
            }
        }
    }
}

trait ExactInteger {
    fn to_i32_exact(&self) -> Option<i32>;
}

impl ExactInteger for BigRational {
    fn to_i32_exact(&self) -> Option<i32> {
        if self.is_integer() { self.to_integer().to_i32() } else { None }
    }
}

/// The real root where there is one, else the principal one.
fn real_root(index: Complex64, value: Complex64) -> Complex64 {
    let odd = index.im == 0.0 && index.re % 2.0 == 1.0;
    if value.im == 0.0 && value.re < 0.0 && odd {
        (-(-value.re).powf(index.re.recip())).into()
    } else {
        value.powc(index.inv())
    }
}

/// The value of a variable at a point: a number between 0.5 and 2.5 that depends on both, negative
/// for half of the variables at all but the first points.
fn variable(name: &str, point: u32) -> Complex64 {
    let mut hasher = DefaultHasher::new();
    (name, point).hash(&mut hasher);
    let hash = hasher.finish();
    let size = 0.5 + 2.0 * (hash >> 11) as f64 / (1_u64 << 53) as f64;
    let negative = point >= POSITIVE_POINTS && hash & 1 == 1;
    (if negative { -size } else { size }).into()
}
