//! Answers as trees, from the grammar in `grammar.pest`.

use std::sync::LazyLock;

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{One, Pow};
use pest::Parser as _;
use pest::iterators::Pair;
use regex::Regex;

use super::value::decimal;
use crate::text;

#[derive(pest_derive::Parser)]
#[grammar = "math/grammar.pest"]
struct Grammar;

// `x`, `x_1`, `f(x, y)`, `(x, y)`, `AB` and `|AB|`.
static NAME: LazyLock<Regex> = LazyLock::new(|| {
    text::pattern(concat!(
        r"\A(?:(?:\\[A-Za-z]+|[A-Za-z])(?:_\w|_\{\w+\})?",
        r"\s*(?:\(\s*[A-Za-z](?:,\s*[A-Za-z])*\s*\))?",
        r"|\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])*\s*\)|\|?[A-Z]{2,}\|?)\z"
    ))
});

/// A number or a formula.
#[derive(Clone, Debug)]
pub(super) enum Expression {
    /// A number; `point` if it was written with a decimal point.
    Number {
        value: BigRational,
        point: bool,
    },
    /// Digits in another base.
    Based {
        digits: String,
        base: String,
    },
    Symbol(String),
    Negative(Box<Expression>),
    Sum(Vec<Expression>),
    Product(Vec<Expression>),
    Quotient(Box<Expression>, Box<Expression>),
    Power(Box<Expression>, Box<Expression>),
    /// Index, radicand.
    Root(Box<Expression>, Box<Expression>),
    Percent(Box<Expression>),
    Absolute(Box<Expression>),
    Floor(Box<Expression>),
    Ceiling(Box<Expression>),
    Factorial(Box<Expression>),
    Binomial(Box<Expression>, Box<Expression>),
    Call {
        function: Function,
        base: Option<Box<Expression>>,
        argument: Box<Expression>,
    },
}

#[derive(Clone, Copy, Debug, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
pub(super) enum Function {
    Sin,
    Cos,
    Tan,
    Cot,
    Sec,
    Csc,
    Arcsin,
    Arccos,
    Arctan,
    Sinh,
    Cosh,
    Tanh,
    Exp,
    Ln,
    Log,
}

/// What an answer, or an element of one, is.
#[derive(Clone, Debug)]
pub(super) enum Item {
    Value(Expression),
    /// Elements in order, with their brackets.
    Sequence {
        open: char,
        close: char,
        items: Vec<Item>,
    },
    /// Elements in any order.
    Set(Vec<Item>),
    Union(Vec<Item>),
    Matrix(Vec<Vec<Expression>>),
    Relation(Relation),
}

/// Sides with a sign between each two. `name` is the first side's text if it is just a name.
#[derive(Clone, Debug)]
pub(super) struct Relation {
    pub(super) name: Option<String>,
    pub(super) signs: Vec<Sign>,
    pub(super) sides: Vec<Item>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sign {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
}

impl Sign {
    /// The sign between the same sides in the other order.
    pub(super) fn flipped(self) -> Self {
        match self {
            Self::Less => Self::Greater,
            Self::LessOrEqual => Self::GreaterOrEqual,
            Self::Greater => Self::Less,
            Self::GreaterOrEqual => Self::LessOrEqual,
            other => other,
        }
    }

    pub(super) fn is_rising(self) -> bool {
        matches!(self, Self::Less | Self::LessOrEqual)
    }

    /// Whether equal sides satisfy it.
    pub(super) fn is_closed(self) -> bool {
        matches!(self, Self::LessOrEqual | Self::GreaterOrEqual)
    }
}

/// The answer that `text` states: its only item, or the set of its items. None if the grammar does
/// not cover it.
pub(super) fn parse(text: &str) -> Option<Item> {
    let list = Grammar::parse(Rule::answer, text).ok()?.next()?;
    let mut items = Reader { upper: true }.list(list.clone())?;
    if text.contains(r"\pm") || text.contains(r"\mp") {
        items.extend(Reader { upper: false }.list(list)?);
    }
    Some(if items.len() == 1 { items.remove(0) } else { Item::Set(items) })
}

/// Builds trees. `\pm` is plus if `upper`, else minus.
struct Reader {
    upper: bool,
}

impl Reader {
    fn list(&self, pair: Pair<'_, Rule>) -> Option<Vec<Item>> {
        pair.into_inner().map(|relation| self.relation(relation)).collect()
    }

    fn relation(&self, pair: Pair<'_, Rule>) -> Option<Item> {
        let (mut name, mut signs, mut sides) = (None, Vec::new(), Vec::new());
        for part in pair.into_inner() {
            if part.as_rule() == Rule::relation_sign {
                signs.push(sign(part.as_str()));
                continue;
            }
            let text = text::strip(part.as_str());
            if sides.is_empty() && NAME.is_match(text) {
                name = Some(text.to_owned());
            }
            // `f(x, y)` is a name and not an expression.
            let unread = name.as_ref().filter(|_| sides.is_empty());
            let unread = unread.map(|name| Item::Value(Expression::Symbol(name.clone())));
            sides.push(self.union(part).or(unread)?);
        }
        Some(if signs.is_empty() {
            sides.remove(0)
        } else {
            Item::Relation(Relation { name, signs, sides })
        })
    }

    fn union(&self, pair: Pair<'_, Rule>) -> Option<Item> {
        let mut parts = Vec::new();
        for sum in pair.into_inner() {
            match self.item(sum)? {
                Item::Union(inner) => parts.extend(inner),
                other => parts.push(other),
            }
        }
        Some(if parts.len() == 1 { parts.remove(0) } else { Item::Union(parts) })
    }

    /// A sum that may be one bracket or one matrix.
    fn item(&self, sum: Pair<'_, Rule>) -> Option<Item> {
        let mut only = sum.clone();
        while matches!(only.as_rule(), Rule::sum | Rule::product | Rule::factor) {
            let mut inner = only.into_inner();
            let (first, second) = (inner.next()?, inner.next());
            if second.is_some() {
                return self.sum(sum).map(Item::Value);
            }
            only = first;
        }
        match only.as_rule() {
            Rule::bracket => self.bracket(only),
            Rule::braces => {
                let mut items = self.list(only.into_inner().next()?)?;
                Some(if items.len() == 1 { items.remove(0) } else { Item::Set(items) })
            }
            Rule::empty => Some(Item::Set(Vec::new())),
            Rule::matrix => {
                let row = |row: Pair<'_, Rule>| row.into_inner().map(|sum| self.sum(sum)).collect();
                only.into_inner().map(row).collect::<Option<_>>().map(Item::Matrix)
            }
            _ => self.sum(sum).map(Item::Value),
        }
    }

    fn bracket(&self, pair: Pair<'_, Rule>) -> Option<Item> {
        let (mut open, mut close, mut items) = ('(', ')', Vec::new());
        for part in pair.into_inner() {
            match (part.as_rule(), part.as_str()) {
                (Rule::open, "[") => open = '[',
                (Rule::open, r"\{" | r"\lbrace") => open = '{',
                (Rule::close, "]") => close = ']',
                (Rule::close, r"\}" | r"\rbrace") => close = '}',
                (Rule::list, _) => items = self.list(part)?,
                _ => {}
            }
        }
        match (open, close, items.len()) {
            ('{', '}', _) => Some(Item::Set(items)),
            ('(', ')', 1) | ('[', ']', 1) => Some(items.remove(0)),
            ('{', ..) | (_, '}', _) | (_, _, 0 | 1) => None,
            _ => Some(Item::Sequence { open, close, items }),
        }
    }

    /// The value of `sum`, `product`, `factor` and what they consist of.
    fn sum(&self, pair: Pair<'_, Rule>) -> Option<Expression> {
        let mut terms = Vec::new();
        let mut negative = false;
        for part in pair.into_inner() {
            if part.as_rule() == Rule::sum_sign {
                negative = self.is_minus(&part);
            } else {
                terms.push(signed(negative, self.product(part)?));
            }
        }
        Some(if terms.len() == 1 { terms.remove(0) } else { Expression::Sum(terms) })
    }

    fn is_minus(&self, sign: &Pair<'_, Rule>) -> bool {
        match sign.as_str() {
            "-" => true,
            r"\pm" => !self.upper,
            r"\mp" => self.upper,
            _ => false,
        }
    }

    fn product(&self, pair: Pair<'_, Rule>) -> Option<Expression> {
        let mut product: Option<Expression> = None;
        let (mut divide, mut negative) = (false, false);
        let mut ends_in_digit = false;
        for part in pair.into_inner() {
            let text = text::strip(part.as_str());
            // Two numbers beside each other are not a product.
            if ends_in_digit && text.starts_with(|c: char| c.is_ascii_digit() || c == '.') {
                return None;
            }
            ends_in_digit = text.ends_with(|c: char| c.is_ascii_digit());
            match part.as_rule() {
                Rule::product_sign => divide = matches!(text, "/" | r"\div"),
                Rule::sum_sign => negative = self.is_minus(&part),
                _ => {
                    let factor = signed(negative, self.factor(part)?);
                    product = Some(match product {
                        None => factor,
                        Some(left) if divide => {
                            Expression::Quotient(Box::new(left), Box::new(factor))
                        }
                        Some(Expression::Product(mut factors)) => {
                            factors.push(factor);
                            Expression::Product(factors)
                        }
                        Some(left) => Expression::Product(vec![left, factor]),
                    });
                    (divide, negative) = (false, false);
                }
            }
        }
        product
    }

    fn factor(&self, pair: Pair<'_, Rule>) -> Option<Expression> {
        let mut parts = pair.into_inner();
        let mut value = self.primary(parts.next()?)?;
        for suffix in parts {
            value = match suffix.as_rule() {
                Rule::power => Expression::Power(Box::new(value), Box::new(self.power(suffix)?)),
                Rule::factorial => Expression::Factorial(Box::new(value)),
                _ => Expression::Percent(Box::new(value)),
            };
        }
        Some(value)
    }

    fn power(&self, pair: Pair<'_, Rule>) -> Option<Expression> {
        let exponent = pair.into_inner().next()?;
        let mut negative = false;
        let mut value = None;
        for part in exponent.into_inner() {
            if part.as_rule() == Rule::sum_sign {
                negative = self.is_minus(&part);
            } else {
                value = Some(self.primary(part)?);
            }
        }
        value.map(|value| signed(negative, value))
    }

    fn primary(&self, pair: Pair<'_, Rule>) -> Option<Expression> {
        let text = pair.as_str();
        match pair.as_rule() {
            Rule::number => {
                Some(Expression::Number { value: decimal(text)?, point: text.contains('.') })
            }
            Rule::digit => Some(whole(decimal(text)?)),
            Rule::symbol | Rule::letter => Some(Expression::Symbol(symbol(text))),
            Rule::round => self.sum(pair.into_inner().next()?),
            Rule::braces => {
                let mut items = self.list(pair.into_inner().next()?)?;
                if items.len() == 1 { value(items.remove(0)) } else { None }
            }
            Rule::bracket => self.bracket(pair).and_then(value),
            Rule::argument => self.primary(pair.into_inner().next()?),
            Rule::mixed => {
                let mut parts = pair.into_inner().filter(|part| part.as_rule() != Rule::frac);
                let mut next = || parts.next().and_then(|part| decimal(part.as_str())).map(whole);
                let (whole, above, below) = (next()?, next()?, next()?);
                let part = Expression::Quotient(Box::new(above), Box::new(below));
                Some(Expression::Sum(vec![whole, part]))
            }
            Rule::repeating => repeating(text),
            Rule::based => {
                let (digits, base) = text.split_once('_')?;
                let base = base.trim_matches(['{', '}']).to_owned();
                Some(Expression::Based { digits: digits.to_owned(), base })
            }
            Rule::fraction | Rule::binomial => {
                let is_binomial = pair.as_rule() == Rule::binomial;
                let mut arguments = pair.into_inner().skip(1).map(|part| self.primary(part));
                let (a, b) = (Box::new(arguments.next()??), Box::new(arguments.next()??));
                Some(if is_binomial {
                    Expression::Binomial(a, b)
                } else {
                    Expression::Quotient(a, b)
                })
            }
            Rule::root => {
                let mut parts = pair.into_inner().rev();
                let radicand = self.primary(parts.next()?)?;
                let index = match parts.next() {
                    Some(index) => self.sum(index)?,
                    None => whole(BigRational::from(BigInt::from(2))),
                };
                Some(Expression::Root(Box::new(index), Box::new(radicand)))
            }
            Rule::absolute => {
                Some(Expression::Absolute(Box::new(self.sum(pair.into_inner().next()?)?)))
            }
            Rule::floor => Some(Expression::Floor(Box::new(self.sum(pair.into_inner().next()?)?))),
            Rule::ceiling => {
                Some(Expression::Ceiling(Box::new(self.sum(pair.into_inner().next()?)?)))
            }
            Rule::call => self.call(pair),
            _ => None,
        }
    }

    fn call(&self, pair: Pair<'_, Rule>) -> Option<Expression> {
        let (mut name, mut base, mut power, mut argument) = ("", None, None, None);
        for part in pair.into_inner() {
            match part.as_rule() {
                Rule::function => name = part.as_str().trim_start_matches('\\'),
                Rule::power => power = Some(self.power(part)?),
                Rule::subscript => {
                    let inner = part.into_inner().next()?;
                    base = Some(Box::new(match inner.as_rule() {
                        Rule::sum => self.sum(inner)?,
                        _ => self.primary(inner)?,
                    }));
                }
                Rule::implicit => {
                    let factors = part.into_inner().map(|factor| self.factor(factor));
                    argument = Some(Expression::Product(factors.collect::<Option<_>>()?));
                }
                _ => argument = Some(self.primary(part)?),
            }
        }
        let argument = Box::new(argument?);
        // The power -1 of a trigonometric function is its inverse.
        let inverse = match name {
            "sin" => Some(Function::Arcsin),
            "cos" => Some(Function::Arccos),
            "tan" => Some(Function::Arctan),
            _ => None,
        };
        let is_inverse = power.as_ref().and_then(super::value::exact) == Some(-BigRational::one());
        if let Some(function) = inverse.filter(|_| is_inverse) {
            return Some(Expression::Call { function, base, argument });
        }
        let call = Expression::Call { function: name.parse().ok()?, base, argument };
        Some(match power {
            Some(power) => Expression::Power(Box::new(call), Box::new(power)),
            None => call,
        })
    }
}

fn value(item: Item) -> Option<Expression> {
    if let Item::Value(value) = item { Some(value) } else { None }
}

fn signed(negative: bool, value: Expression) -> Expression {
    if negative { Expression::Negative(Box::new(value)) } else { value }
}

fn whole(value: BigRational) -> Expression {
    Expression::Number { value, point: false }
}

/// A symbol's name: `x_{1}` and `x_1` are the same, and `\mathrm{d}` is `d`.
fn symbol(text: &str) -> String {
    let text = match text.split_once('{') {
        Some((r"\text" | r"\mathrm" | r"\mathbf" | r"\operatorname", inner)) => inner,
        _ => text,
    };
    text.replace(['{', '}', ' '], "")
}

/// `0.1\overline{6}`: with `d` digits before the bar and `r` under it, `whole.part + bar / (10^d
/// (10^r - 1))`.
fn repeating(text: &str) -> Option<Expression> {
    let (start, bar) = text.split_once(r"\overline{")?;
    let bar = bar.trim_end_matches('}');
    let (whole_part, part) = start.split_once('.')?;
    let start = decimal(&format!("0{whole_part}.{part}"))?;
    let ten = BigInt::from(10);
    let below = Pow::pow(&ten, part.len()) * (Pow::pow(&ten, bar.len()) - BigInt::one());
    Some(whole(start + BigRational::new(bar.parse().ok()?, below)))
}

fn sign(text: &str) -> Sign {
    match text.trim_start_matches('\\') {
        "le" | "leq" | "leqslant" | "<=" => Sign::LessOrEqual,
        "ge" | "geq" | "geqslant" | ">=" => Sign::GreaterOrEqual,
        "ne" | "neq" | "!=" => Sign::NotEqual,
        "<" | "lt" => Sign::Less,
        ">" | "gt" => Sign::Greater,
        "in" => Sign::In,
        _ => Sign::Equal,
    }
}
