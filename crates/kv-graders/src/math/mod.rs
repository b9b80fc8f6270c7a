//! Equivalence of answers to problems of mathematics.

mod clean;
mod compare;
mod expression;
mod strip;
mod value;

pub use strip::math_is_equiv;
pub(crate) use value::decimal;

/// Whether two answers to a problem of mathematics, in LaTeX or in plain text, are equivalent.
///
/// They are if one of these holds:
///
/// - [`math_is_equiv`] holds, MATH's own rule;
/// - their texts are equal in lower case, without markup and spaces: `\text{Even}` and `even`;
/// - a reading of one is equal to a reading of the other. A text with `%` is read as `x` and as
///   `x / 100`, a text such as `1,234` as one number and as two. Units at the end are not read.
///
/// Equal readings are:
///
/// - numbers without variables, roots and the like, if they are equal as fractions; if one has a
///   decimal point, if they are equal after rounding to six decimals: `1/3` and `0.333333`;
/// - other expressions, if their values at six points agree to a relative 1e-9: `(x+1)^2` and
///   `x^2+2x+1`, `\sqrt{8}` and `2\sqrt{2}`;
/// - tuples, intervals and matrices, if they have the same brackets and equal elements in order;
/// - sets, lists without brackets, and unions, if they have equal elements in any order. `a \pm b`
///   is the list of its two values;
/// - equations, if their sides' differences are proportional; inequalities, if they say the same
///   interval: `1 < x \le 2`, `x \in (1, 2]` and `(1, 2]`;
/// - `x = a` and `a`; numbers in another base, also where only one says the base: `10_2` and `10`.
///
/// `\log` without a base is the logarithm to base 10, `i` the imaginary unit and `e` Euler's number.
/// The six decimals, these readings and the last rule are Math-Verify's. Texts of more than 1,000
/// bytes, or with more than 20 brackets open at once, have no readings.
///
/// ```
/// use kv_graders::equivalent;
///
/// assert!(equivalent(r"\frac{\sqrt{3}}{3}", r"1/\sqrt{3}"));
/// assert!(equivalent("(x - 1)(x + 1)", "x^2 - 1"));
/// assert!(!equivalent("(1, 2)", "[1, 2]"));
/// ```
pub fn equivalent(answer: &str, reference: &str) -> bool {
    if math_is_equiv(answer, reference) {
        return true;
    }
    let (text, other) = (clean::plain_text(answer), clean::plain_text(reference));
    if !text.is_empty() && text == other {
        return true;
    }
    let readings = |text: &str| -> Vec<_> {
        clean::readings(text).iter().filter_map(|text| expression::parse(text)).collect()
    };
    let (answers, references) = (readings(answer), readings(reference));
    references
        .iter()
        .any(|reference| answers.iter().any(|answer| compare::equal(answer, reference)))
}
