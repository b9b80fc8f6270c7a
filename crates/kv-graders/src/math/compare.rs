//! Equality of answers' trees.

use num_bigint::BigInt;
use num_complex::Complex64;
use num_rational::BigRational;

use super::expression::{Expression, Item, Relation, Sign};
use super::value::{POINTS, at, exact};

/// Values that agree to this share of the larger, or to `SMALL`, are equal. Sums of a few terms of
/// f64 lose some 1e-15.
const RELATIVE: f64 = 1e-9;
const SMALL: f64 = 1e-12;

/// Whether an answer is equal to the reference.
pub(super) fn equal(answer: &Item, reference: &Item) -> bool {
    match (answer, reference) {
        (Item::Relation(answer), Item::Relation(reference)) => relations(answer, reference),
        // `x = a` for the reference `a`; a chain of equations says its last side.
        (Item::Relation(answer), _) => {
            said(answer, false).is_some_and(|said| equal(said, reference))
                || interval(answer).is_some_and(|(_, interval)| equal(&interval, reference))
        }
        (_, Item::Relation(reference)) => {
            said(reference, true).is_some_and(|said| equal(answer, said))
                || interval(reference).is_some_and(|(_, interval)| equal(answer, &interval))
        }
        (Item::Value(answer), Item::Value(reference)) => values(answer, reference),
        (
            Item::Sequence { open, close, items },
            Item::Sequence { open: other_open, close: other_close, items: others },
        ) => {
            open == other_open
                && close == other_close
                && items.len() == others.len()
                && items.iter().zip(others).all(|(item, other)| equal(item, other))
        }
        (Item::Set(items), Item::Set(others)) | (Item::Union(items), Item::Union(others)) => {
            in_any_order(items, others)
        }
        (Item::Set(items), other) | (other, Item::Set(items)) => {
            !items.is_empty() && items.iter().all(|item| equal(item, other))
        }
        (Item::Matrix(rows), Item::Matrix(others)) => {
            let same_row = |(row, other): (&Vec<Expression>, &Vec<Expression>)| {
                row.len() == other.len() && row.iter().zip(other).all(|(a, b)| values(a, b))
            };
            rows.len() == others.len() && rows.iter().zip(others).all(same_row)
        }
        _ => false,
    }
}

/// Each element of one has an equal in the other.
fn in_any_order(items: &[Item], others: &[Item]) -> bool {
    items.iter().all(|item| others.iter().any(|other| equal(item, other)))
        && others.iter().all(|other| items.iter().any(|item| equal(item, other)))
}

fn values(a: &Expression, b: &Expression) -> bool {
    match (a, b) {
        (
            Expression::Based { digits, base },
            Expression::Based { digits: other_digits, base: other_base },
        ) => return digits == other_digits && base == other_base,
        // The problem says the base, so an answer may leave it out.
        (Expression::Based { digits, .. }, Expression::Number { value, .. })
        | (Expression::Number { value, .. }, Expression::Based { digits, .. }) => {
            return digits
                .parse::<BigInt>()
                .is_ok_and(|digits| BigRational::from(digits) == *value);
        }
        _ => {}
    }
    let point = has_point(a) || has_point(b);
    match (exact(a), exact(b)) {
        (Some(a), Some(b)) if point => six_decimals(&a) == six_decimals(&b),
        (Some(a), Some(b)) => a == b,
        _ => {
            let rounding = if point { 0.5e-6 } else { 0.0 };
            let pairs = (0..POINTS).map(|point| (at(a, point), at(b, point)));
            let mut defined = pairs.filter(|(a, b)| a.is_finite() && b.is_finite()).peekable();
            defined.peek().is_some() && defined.all(|(a, b)| close(a, b, rounding))
        }
    }
}

fn close(a: Complex64, b: Complex64, rounding: f64) -> bool {
    (a - b).norm() <= (RELATIVE * a.norm().max(b.norm())).max(SMALL).max(rounding)
}

fn six_decimals(value: &BigRational) -> BigInt {
    (value * BigInt::from(1_000_000)).round().to_integer()
}

fn has_point(expression: &Expression) -> bool {
    match expression {
        Expression::Number { point, .. } => *point,
        Expression::Based { .. } | Expression::Symbol(_) => false,
        Expression::Negative(inner)
        | Expression::Percent(inner)
        | Expression::Absolute(inner)
        | Expression::Floor(inner)
        | Expression::Ceiling(inner)
        | Expression::Factorial(inner) => has_point(inner),
        Expression::Sum(inner) | Expression::Product(inner) => inner.iter().any(has_point),
        Expression::Quotient(a, b)
        | Expression::Power(a, b)
        | Expression::Root(a, b)
        | Expression::Binomial(a, b) => has_point(a) || has_point(b),
        Expression::Call { base, argument, .. } => {
            has_point(argument) || base.as_deref().is_some_and(has_point)
        }
    }
}

/// The last side of `x = ... = a`. Where `named`, the first side must be just a name.
fn said(relation: &Relation, named: bool) -> Option<&Item> {
    let equations = relation.signs.iter().all(|sign| *sign == Sign::Equal);
    relation.sides.last().filter(|_| equations && (relation.name.is_some() || !named))
}

fn relations(answer: &Relation, reference: &Relation) -> bool {
    if let (Some(value), Some(other)) = (said(answer, true), said(reference, true)) {
        let same_name = answer.name == reference.name;
        return same_name && equal(value, other) || proportional(answer, reference);
    }
    if let (Some((name, items)), Some((other_name, others))) =
        (interval(answer), interval(reference))
        && name == other_name
        && equal(&items, &others)
    {
        return true;
    }
    let same = |flipped: &Relation| {
        flipped.signs == reference.signs
            && flipped.sides.len() == reference.sides.len()
            && flipped.sides.iter().zip(&reference.sides).all(|(a, b)| equal(a, b))
    };
    same(answer) || same(&flipped(answer)) || proportional(answer, reference)
}

/// The same relation, read from right to left.
fn flipped(relation: &Relation) -> Relation {
    Relation {
        name: None,
        signs: relation.signs.iter().rev().map(|sign| sign.flipped()).collect(),
        sides: relation.sides.iter().rev().cloned().collect(),
    }
}

/// Whether `l - r` of one relation of two sides is a constant times that of the other. A negative
/// constant turns an inequality round.
fn proportional(answer: &Relation, reference: &Relation) -> bool {
    let ([sign], [Item::Value(left), Item::Value(right)]) = (&answer.signs[..], &answer.sides[..])
    else {
        return false;
    };
    let ([other_sign], [Item::Value(other_left), Item::Value(other_right)]) =
        (&reference.signs[..], &reference.sides[..])
    else {
        return false;
    };
    let ratio = |point| {
        (at(left, point) - at(right, point)) / (at(other_left, point) - at(other_right, point))
    };
    let first = ratio(0);
    let sign = if first.re < 0.0 { sign.flipped() } else { *sign };
    sign == *other_sign
        && first.is_finite()
        && first.norm() > SMALL
        && (1..POINTS).all(|point| close(ratio(point), first, 0.0))
}

/// The variable of an inequality or of `x in S`, with the interval or set that it says.
fn interval(relation: &Relation) -> Option<(&str, Item)> {
    match (&relation.signs[..], &relation.sides[..]) {
        ([Sign::In], [name, set]) => Some((symbol(name)?, set.clone())),
        ([sign], [left, right]) => match symbol(left) {
            Some(name) => Some((name, half_line(*sign, right)?)),
            None => Some((symbol(right)?, half_line(sign.flipped(), left)?)),
        },
        ([first, second], [left, name, right]) => {
            let name = symbol(name)?;
            let (lower, upper, low, high) = if first.is_rising() && second.is_rising() {
                (left, right, first, second)
            } else if first.flipped().is_rising() && second.flipped().is_rising() {
                (right, left, second, first)
            } else {
                return None;
            };
            Some((name, sequence(low.is_closed(), high.is_closed(), lower, upper)))
        }
        _ => None,
    }
}

fn symbol(item: &Item) -> Option<&str> {
    match item {
        Item::Value(Expression::Symbol(name)) => Some(name),
        _ => None,
    }
}

/// The interval that `x sign bound` says.
fn half_line(sign: Sign, bound: &Item) -> Option<Item> {
    let infinity = Expression::Symbol(r"\infty".to_owned());
    let lowest = Item::Value(Expression::Negative(Box::new(infinity.clone())));
    let highest = Item::Value(infinity);
    if sign.is_rising() {
        Some(sequence(false, sign.is_closed(), &lowest, bound))
    } else if sign.flipped().is_rising() {
        Some(sequence(sign.is_closed(), false, bound, &highest))
    } else {
        None
    }
}

fn sequence(closed_low: bool, closed_high: bool, low: &Item, high: &Item) -> Item {
    Item::Sequence {
        open: if closed_low { '[' } else { '(' },
        close: if closed_high { ']' } else { ')' },
        items: vec![low.clone(), high.clone()],
    }
}
